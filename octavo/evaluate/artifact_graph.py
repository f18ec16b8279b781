"""The last stage of an artifact's IR, run by the interpreter with the weights that it stores."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from octavo.calibrate.streamed_run import StreamedRun
from octavo.codegen.generate import weight_layouts
from octavo.codegen.lower import lower
from octavo.codegen.quant_layouts import find_layout
from octavo.codegen.target import resolve_targets
from octavo.ir.graph import Graph, Node, Value
from octavo.ir.interpret import Result
from octavo.ir.parser import parse_graph
from octavo.ir.quant_tensor import QuantTensor
from octavo.ir.types import QuantType
from octavo.ir.weight_cache import WeightCache
from octavo.runtime.artifact import Artifact
from octavo.runtime.errors import ArtifactError


def graph_values(artifact: Artifact, ids: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the step for one sequence, by name, in order: ``[len, ...]`` and others."""
    graph = last_stage(artifact)
    found: list[tuple[str, Tensor]] = []

    def keep(node: Node, results: list[Result]) -> None:
        pairs = zip(node.outputs, results, strict=True)
        found.extend((value.name, result) for value, result in pairs if isinstance(result, Tensor))

    run = StreamedRun(graph, StoredWeights(artifact, graph), [list(ids)], observe=keep)
    for node in graph.nodes:
        run.advance(node)
        yield from found
        found.clear()
    run.advance(None)
    yield from found


def last_stage(artifact: Artifact) -> Graph:
    """The graph that the program was written from. Raises ArtifactError."""
    index = artifact.file("ir/index.json")
    if index is None:
        raise ArtifactError(f"{artifact.root}: the manifest lists no ir/index.json")
    name = json.loads(index.read_text("utf-8"))["stages"][-1]["file"]
    path = artifact.file(f"ir/{name}")
    if path is None:
        raise ArtifactError(f"{artifact.root}: the manifest lists no ir/{name}")
    return parse_graph(path.read_text("utf-8"))


class StoredWeights(WeightCache):
    """The weights of a step as an artifact stores them: nothing is computed from a checkpoint."""

    def __init__(self, artifact: Artifact, graph: Graph) -> None:
        target = resolve_targets(artifact.manifest.target).main
        self._layouts = weight_layouts(lower(graph, target.rules).lines)
        self._stored: Mapping[str, Tensor] = artifact.load_weights("cpu")

    def get(self, value: Value) -> Tensor | QuantTensor:
        """A weight that the step reads; a quantised one unpacked."""
        if not isinstance(value.type, QuantType):
            return self._stored[value.name]
        layout = find_layout(self._layouts[value])
        names = layout.part_types(value.type)
        parts = {part: self._stored[f"{value.name}.{part}"] for part in names}
        return layout.unpack(parts, value.type)
