"""An artifact directory, opened: refused at once or trusted to be what its manifest says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.ir.errors import VerifyError
from octavo.ir.kv_scheme import KVScheme
from octavo.ir.manifest import BLOCK_GROUPS, Manifest, ManifestError
from octavo.ir.types import DTYPES
from octavo.runtime.artifact_files import RECOMPILE, check_files
from octavo.runtime.errors import ArtifactError
from octavo.runtime.kv_cache import KVCaches, KVFormat
from octavo.runtime.program_loader import import_program

# Names that a compiler may put into `required_features`; a reader that does not know one refuses.
SUPPORTED_FEATURES: frozenset[str] = frozenset((BLOCK_GROUPS,))

# What users call the codes of a KV cache, as vLLM does.
KV_CACHE_DTYPES = {"f8e4m3": "fp8", "i8": "int8"}


class Step(Protocol):
    """An instance of the artifact's Program: one step, see docs/architecture.md."""

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_table: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        logit_rows: Tensor,
    ) -> Tensor: ...


class ProgramClass(Protocol):
    """The class ``Program`` of ``program.py``."""

    def __call__(
        self,
        weights: Mapping[str, Tensor],
        kv_caches: KVCaches,
        *,
        max_num_tokens: int,
        max_num_seqs: int,
    ) -> Step: ...


@dataclass(frozen=True)
class Artifact:
    """A checked artifact directory."""

    root: Path
    manifest: Manifest

    @classmethod
    def open(
        cls, path: str | Path, *, artifact_id: str | None = None, verify: bool = True
    ) -> Artifact:
        """Check an artifact and open it. Raises ArtifactError, naming the file and the remedy.

        ``artifact_id`` pins the content that is wanted. ``verify=False`` skips the hashes of the
        weights only: those of code are always checked. What the manifest alone can refuse is
        refused before any other file is read.
        """
        root = Path(path)
        manifest = read_manifest(root)
        unknown = sorted(set(manifest.required_features) - SUPPORTED_FEATURES)
        if unknown:
            raise ArtifactError(
                f"{root}: needs {', '.join(unknown)}, which this version of octavo does not have; "
                "upgrade octavo"
            )
        if artifact_id is not None and artifact_id != manifest.artifact_id:
            raise ArtifactError(
                f"{root}: its content id is {manifest.artifact_id}, the pinned one is "
                f"{artifact_id}; load the artifact that was pinned, or pin this one if you trust it"
            )
        if "program.py" not in manifest.files:
            raise ArtifactError(f"{root}: the manifest lists no program.py; {RECOMPILE}")
        check_files(root, manifest, hash_weights=verify)
        return cls(root, manifest)

    def load_program(self) -> ProgramClass:
        """Import ``program.py`` and give its class ``Program``."""
        module = import_program(self.root, self.manifest)
        program = getattr(module, "Program", None)
        if program is None:
            raise ArtifactError(f"{self.root}: program.py defines no class Program; {RECOMPILE}")
        return program  # type: ignore[no-any-return]

    def load_weights(self, device: torch.device | str = "cpu") -> Mapping[str, Tensor]:
        """Weights by name, memory-mapped: a tensor is read when it is first used."""
        return LazyWeights(self, torch.device(device))

    @property
    def dtype(self) -> torch.dtype:
        """What activations are held in; the manifest says ``f32`` or ``float32``.

        Raises ArtifactError for a name that is no dtype.
        """
        name = self.manifest.dtype
        found = DTYPES.get(name, getattr(torch, name, None))
        if not isinstance(found, torch.dtype):
            raise ArtifactError(f"{self.root}: unknown dtype {name!r}; upgrade octavo")
        return found

    @property
    def kv_format(self) -> KVFormat:
        """What the KV cache holds. Raises ArtifactError for a scheme that is none."""
        scheme = self._kv_scheme()
        if scheme is None:
            return KVFormat(self.dtype)
        return KVFormat(scheme.dtype, scheme.has_token_scales)

    @property
    def kv_cache_dtype(self) -> str | None:
        """What ``--kv-cache-dtype`` made of it, fp8 or int8; None for a cache without codes."""
        scheme = self._kv_scheme()
        return None if scheme is None else KV_CACHE_DTYPES[scheme.codes]

    def _kv_scheme(self) -> KVScheme | None:
        text = self.manifest.kv_scheme
        try:
            return None if text is None else KVScheme.parse(text)
        except VerifyError as error:
            raise ArtifactError(f"{self.root}: {error}; upgrade octavo") from None

    def file(self, name: str) -> Path | None:
        """The path of a file that the manifest lists, None for any other."""
        return self.root / name if name in self.manifest.files else None

    def model_file(self, name: str) -> Path | None:
        """The path of ``model/<name>`` if the artifact has it."""
        return self.file(f"model/{name}")

    def model_json(self, name: str) -> dict[str, Any]:
        """The object in ``model/<name>``, empty when the artifact has no such file."""
        path = self.model_file(name)
        return {} if path is None else read_json_object(path)


def read_manifest(root: Path) -> Manifest:
    """Read ``manifest.json`` of an artifact directory."""
    path = root / "manifest.json"
    if not root.exists():
        raise ArtifactError(f"{root} does not exist; give the directory of a compiled artifact")
    if not path.is_file():
        raise ArtifactError(
            f"{root} is not an artifact: it has no manifest.json; "
            f"make one with `octavo compile MODEL -o DIR`"
        )
    try:
        return Manifest.from_json(path.read_text("utf-8"))
    except ManifestError as error:
        raise ArtifactError(f"{path}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that must hold an object."""
    try:
        body = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path} is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ArtifactError(f"{path}: expected an object, got {type(body).__name__}")
    return body


class LazyWeights(Mapping[str, Tensor]):
    """The tensors of ``weights/``, each in a mapping of its own file that it alone keeps.

    So what is only read to be packed in another way is unmapped with its tensor, and its pages no
    longer count as memory of the process.
    """

    def __init__(self, artifact: Artifact, device: torch.device) -> None:
        self._root = artifact.root
        self._device = device
        self._shard_of = self._read_index(artifact)

    @staticmethod
    def _read_index(artifact: Artifact) -> dict[str, str]:
        name = "weights/index.json"
        if name not in artifact.manifest.files:
            raise ArtifactError(f"{artifact.root}: the manifest lists no {name}; {RECOMPILE}")
        index = read_json_object(artifact.root / name)
        if index.get("shapes"):
            raise ArtifactError(
                f"{artifact.root} was compiled without weights; load it with load_format='dummy',"
                " or compile it again with the weights"
            )
        shard_of = index.get("weight_map")
        if not isinstance(shard_of, dict):
            raise ArtifactError(f"{artifact.root}: {name} has no weight_map; {RECOMPILE}")
        for shard in set(shard_of.values()):
            if f"weights/{shard}" not in artifact.manifest.files:
                raise ArtifactError(
                    f"{artifact.root}: {name} names {shard!r}, which the manifest does not list"
                )
        return shard_of

    def __getitem__(self, name: str) -> Tensor:
        shard = self._shard_of[name]
        path = self._root / "weights" / shard
        try:
            with safe_open(path, framework="pt", device=str(self._device)) as opened:
                tensor: Tensor = opened.get_tensor(name)
        except SafetensorError as error:
            raise ArtifactError(f"{path}: {name} cannot be read: {error}; {RECOMPILE}") from None
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard_of)

    def __len__(self) -> int:
        return len(self._shard_of)
