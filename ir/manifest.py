"""The artifact's table of contents: the schema that the compiler writes and the runtime reads."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

FORMAT = 2
# The formats that are read, the present one and the one before it, each with the folders whose
# files do not enter its content id.
OUTSIDE_ID = {
    1: ("tests/",),
    2: ("tests/", "plans/", "kernels/bin/"),
}


class ManifestError(ValueError):
    """A manifest that is not one: names the field, what was expected and what came."""


@dataclass(frozen=True)
class KVSlot:
    """One K/V pair of caches: as many as there are attention calls in a step.

    ``window`` is the sliding window in tokens, ``chunk`` the length of chunks that do not see each
    other; both None when all of the context is attended. ``group`` numbers the block group, whose
    slots share a block table.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    chunk: int | None = None
    group: int = 0


# The name in `required_features` of a program whose step has more than one block table.
BLOCK_GROUPS = "block-groups"


def num_groups(slots: Iterable[KVSlot]) -> int:
    """How many block tables a sequence has; one where there are no slots."""
    return 1 + max((slot.group for slot in slots), default=0)


@dataclass(frozen=True)
class FileEntry:
    """A file of the artifact: size in bytes, lower-case hex SHA-256, and what it is for."""

    size: int
    sha256: str
    role: str


@dataclass(frozen=True)
class Manifest:
    """What an artifact is: everything the runtime decides by before it reads a weight.

    ``max_position`` is the model's own bound on prompt plus output, in tokens. ``producer`` maps
    package names to versions and, like ``source``, does not enter the content id.
    ``quantization`` names the recipe, or is None; ``quant_schemes`` says how many linears multiply
    by matrices of each scheme. ``kv_scheme`` is how the KV cache holds codes (ir/kv_scheme.py);
    without it, it is of the model's dtype. ``num_key_offsets`` is in how many slots keys have an
    offset taken off.
    """

    architecture: str
    model_type: str
    target: str
    dtype: str
    vocab_size: int
    max_position: int
    kv_slots: tuple[KVSlot, ...]
    files: dict[str, FileEntry]
    quantization: str | None = None
    quant_schemes: dict[str, int] = field(default_factory=dict)
    kv_scheme: str | None = None
    num_key_offsets: int = 0
    source: str = ""
    revision: str | None = None
    producer: dict[str, str] = field(default_factory=dict)
    required_features: tuple[str, ...] = ()
    format: int = FORMAT

    @property
    def artifact_id(self) -> str:
        """Content id, ``sha256:<hex>``: equal for equal behaviour, on any machine.

        Files below ``tests/`` stay outside: they hold what Hugging Face computed where the artifact
        was made, and its last bits depend on the processor and the number of threads. So do those
        below ``plans/``, which choose among ways that are all right, and below ``kernels/bin/``,
        which are made from the sources: who goes by the id does not use these. Format 1 left out
        ``tests/`` alone.
        """
        body = self._body()
        for outside in ("producer", "source", "revision"):
            del body[outside]
        # By place and not by role, which the manifest may claim of a file that is run.
        body["files"] = {
            path: entry.sha256 for path, entry in sorted(self.files.items()) if self.id_covers(path)
        }
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()

    def _body(self) -> dict[str, Any]:
        """The fields, but for what is younger than format 2 and says nothing: so ids stay what they
        were."""
        body = dataclasses.asdict(self)
        for name in ("quant_schemes", "kv_scheme", "num_key_offsets"):
            if not body[name]:
                del body[name]
        for slot in body["kv_slots"]:
            for name in ("chunk", "group"):
                if not slot[name]:
                    del slot[name]
        return body

    def id_covers(self, path: str) -> bool:
        """Whether the content of a file at ``path`` enters the content id."""
        return not path.startswith(OUTSIDE_ID[self.format])

    def to_json(self) -> str:
        """The text of manifest.json."""
        body = {"artifact_id": self.artifact_id, **self._body()}
        return json.dumps(body, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read manifest.json. Raises ManifestError for anything that is not a readable manifest."""
        try:
            body = json.loads(text)
        except ValueError as error:
            raise ManifestError(f"not JSON: {error}") from None
        if not isinstance(body, dict):
            raise ManifestError(f"expected an object, got {type(body).__name__}")
        format_ = body.get("format")
        if type(format_) is not int or format_ not in OUTSIDE_ID:
            raise ManifestError(
                f"format {format_!r} is not one of {list(OUTSIDE_ID)} that this version reads; "
                "upgrade octavo or compile the model again"
            )
        return cls._from_body(body)

    @classmethod
    def _from_body(cls, body: dict[str, Any]) -> Manifest:
        claimed = body.pop("artifact_id", None)
        try:
            body["kv_slots"] = tuple(KVSlot(**slot) for slot in body["kv_slots"])
            body["files"] = {path: FileEntry(**entry) for path, entry in body["files"].items()}
            body["required_features"] = tuple(body.get("required_features", ()))
            manifest = cls(**body)
            actual = manifest.artifact_id
        except (KeyError, TypeError, AttributeError) as error:
            raise ManifestError(
                f"a field is missing, unknown or of a wrong kind: {error}"
            ) from None
        if claimed != actual:
            raise ManifestError(
                f"its content id, by the rule of format {manifest.format}, is {actual}, not "
                f"{claimed} as it says; copy the artifact again or compile the model again"
            )
        return manifest
