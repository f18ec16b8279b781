"""What a step must move and compute at least: the numerator of every share of the roofline."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.ir.graph import Graph
from octavo.ir.manifest import KVSlot
from octavo.ir.parser import parse_graph
from octavo.runtime.artifact import Artifact, read_json_object
from octavo.runtime.artifact_files import RECOMPILE
from octavo.runtime.device_weights import StoredWeight, stored_weights
from octavo.runtime.errors import ArtifactError
from octavo.runtime.kv_cache import KVFormat

# Ops that read only those rows of a weight that a token asks for.
_ROW_OPS = ("embedding", "embedding_sumsq", "gather_rows")


@dataclass(frozen=True)
class Traffic:
    """Bytes and elements of the weights that a step reads whole, and of the KV cache.

    ``head_elements`` are those of the output layer, which runs for one row of each sequence only.
    """

    weight_bytes: int
    matmul_elements: int
    head_elements: int
    kv_slots: tuple[KVSlot, ...]
    kv_format: KVFormat

    @classmethod
    def of(cls, artifact: Artifact) -> Traffic:
        """Of a compiled model: its embedding and position tables are left out."""
        weights = stored_weights(artifact)
        looked_up = _looked_up(_last_stage(artifact))
        read = {name: weight for name, weight in weights.items() if name not in looked_up}
        matrices = [w for w in read.values() if w.dtype.is_floating_point and len(w.shape) == 2]
        vocab_size = artifact.manifest.vocab_size
        return cls(
            weight_bytes=sum(weight.num_bytes for weight in read.values()),
            matmul_elements=_elements(w for w in matrices if w.shape[0] != vocab_size),
            head_elements=_elements(w for w in matrices if w.shape[0] == vocab_size),
            kv_slots=artifact.manifest.kv_slots,
            kv_format=artifact.kv_format,
        )

    def kv_bytes(self, context: float) -> float:
        """Bytes of K and V that one sequence's next token attends to, over all layers."""
        return sum(
            min(context, slot.window or math.inf) * self.kv_format.token_bytes(slot)
            for slot in self.kv_slots
        )

    def decode_bytes(self, batch_size: int, context: float) -> float:
        """Bytes of a decode step: each weight once, each sequence's K and V once."""
        return self.weight_bytes + batch_size * self.kv_bytes(context)

    def flops(self, num_tokens: int, num_rows: int) -> float:
        """Operations of the linear layers of a step with so many rows of logits."""
        return 2.0 * (num_tokens * self.matmul_elements + num_rows * self.head_elements)


def _elements(weights: Iterable[StoredWeight]) -> int:
    return sum(math.prod(weight.shape) for weight in weights)


def _last_stage(artifact: Artifact) -> Graph:
    index = artifact.root / "ir" / "index.json"
    try:
        stages = read_json_object(index)["stages"]
        path = artifact.root / "ir" / stages[-1]["file"]
        text = path.read_text(encoding="utf-8")
    except (OSError, LookupError, TypeError) as error:
        raise ArtifactError(
            f"{index}: the stages cannot be read ({error!r}); {RECOMPILE}"
        ) from None
    return parse_graph(text, str(path))


def _looked_up(graph: Graph) -> set[str]:
    """Names of the weights of which a step reads single rows only."""
    rows: set[str] = set()
    whole: set[str] = set()
    for node in graph.nodes:
        for value in node.operands:
            if value.is_weight:
                (rows if node.op in _ROW_OPS else whole).add(value.name)
    return rows - whole
