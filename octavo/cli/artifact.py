"""What the command line reads from an artifact directory, without loading the model."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from octavo.ir.errors import OctavoError
from octavo.ir.manifest import Manifest, ManifestError

# Results that begin with @ are weights: their ops ran when the model was compiled.
_FALLBACK = re.compile(r"\s*%.* = (aten\.[\w.]+)\(.*")
_HEADER = re.compile(r"# (op|template|constants): (.*)")
_FLOAT = re.compile(r"(?<![\w.])-?\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)(?![\w.])")


@dataclass(frozen=True)
class Miss:
    """A place that a pass looked at and left alone."""

    where: str
    reason: str


@dataclass(frozen=True)
class Stage:
    """One stage of the graph: the import, or the graph after a pass."""

    number: int
    name: str
    path: Path
    num_nodes: int
    num_rewrites: int
    missed: tuple[Miss, ...]

    def text(self) -> str:
        """The stage's IR."""
        return self.path.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Kernel:
    """A rendered kernel, as the comment lines at its top describe it."""

    name: str
    op: str
    template: str
    constants: str


def require_artifact(directory: Path) -> None:
    """Refuse what is no artifact before anything slow is imported."""
    if not directory.exists():
        raise OctavoError(f"{directory}: no such directory; write one with 'octavo compile'")
    if not (directory / "manifest.json").is_file():
        raise OctavoError(
            f"{directory}: not an artifact, it has no manifest.json; write one with "
            "'octavo compile'"
        )


def read_manifest(directory: Path) -> Manifest:
    """The manifest. Raises OctavoError when it is missing or cannot be read."""
    require_artifact(directory)
    path = directory / "manifest.json"
    try:
        return Manifest.from_json(path.read_text(encoding="utf-8"))
    except (ManifestError, UnicodeDecodeError) as error:
        raise OctavoError(f"{path}: {error}") from error


def require_tokenizer(directory: Path) -> None:
    """Refuse an artifact that takes token ids only: the command line has none to give."""
    if "model/tokenizer.json" not in read_manifest(directory).files:
        raise OctavoError(
            f"{directory}: has no tokenizer, and the command line takes text only; compile the "
            "model again from a directory with tokenizer.json, or give token ids to octavo.LLM"
        )


def read_stages(directory: Path) -> list[Stage]:
    """The stages listed in ir/index.json, in order."""
    path = directory / "ir" / "index.json"
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["stages"]
        return [_stage(path.parent, entry) for entry in entries]
    except FileNotFoundError:
        raise OctavoError(f"{path}: missing; compile the model again") from None
    except (ValueError, KeyError, TypeError) as error:
        raise OctavoError(f"{path}: damaged ({error}); compile the model again") from error


def _stage(folder: Path, entry: dict[str, object]) -> Stage:
    name = str(entry["file"])
    if Path(name).name != name:
        raise ValueError(f"{name!r} is not a file name")
    missed = entry["missed"]
    if not isinstance(missed, list):
        raise TypeError("'missed' is not a list")
    return Stage(
        number=int(str(entry["number"])),
        name=str(entry["name"]),
        path=folder / name,
        num_nodes=int(str(entry["nodes"])),
        num_rewrites=int(str(entry["rewrites"])),
        missed=tuple(Miss(miss["where"], miss["reason"]) for miss in missed),
    )


def find_stage(stages: list[Stage], wanted: str) -> Stage:
    """The stage of that number or pass name. Raises OctavoError when there is not exactly one."""
    found = [stage for stage in stages if wanted in (str(stage.number), stage.name)]
    if len(found) == 1:
        return found[0]
    if found:
        numbers = ", ".join(str(stage.number) for stage in found)
        raise OctavoError(f"stage {wanted!r} ran several times; give its number, one of {numbers}")
    known = ", ".join(f"{stage.number} {stage.name}" for stage in stages)
    raise OctavoError(f"no stage {wanted!r}; there are: {known}")


def group_misses(stage: Stage) -> dict[str, list[str]]:
    """Where a pass passed over something, by reason."""
    groups: dict[str, list[str]] = defaultdict(list)
    for miss in stage.missed:
        groups[miss.reason].append(miss.where)
    return dict(groups)


def read_kernels(directory: Path) -> list[Kernel]:
    """The kernels below kernels/src, by name."""
    paths = sorted((directory / "kernels" / "src").glob("*.py"))
    return [_kernel(path) for path in paths if path.name != "__init__.py"]


def _kernel(path: Path) -> Kernel:
    header = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if match := _HEADER.fullmatch(line):
            header[match[1]] = match[2].strip()
    constants = _FLOAT.sub(_shortest, header.get("constants", ""))
    return Kernel(path.stem, header.get("op", ""), header.get("template", ""), constants)


def _shortest(match: re.Match[str]) -> str:
    """The shortest number that is the same in float32: 1e-05 for 9.999999747378752e-06."""
    value = float(match[0])
    texts = (f"{value:.{digits}g}" for digits in range(1, 10))
    same = (text for text in texts if _to_float32(float(text)) == _to_float32(value))
    return repr(float(next(same, match[0])))


def _to_float32(value: float) -> bytes:
    try:
        return struct.pack("f", value)
    except OverflowError:
        return struct.pack("d", value)


def count_fallbacks(stage: Stage) -> Counter[str]:
    """The ops of a step that PyTorch runs for us: the IR has no meaning of its own for them."""
    from octavo.ir.fold import FoldError, expand

    try:
        lines = expand(stage.text().splitlines())
    except FoldError as error:
        raise OctavoError(f"{stage.path}:{error.line + 1}: {error}") from error
    return Counter(match[1] for line in lines if (match := _FALLBACK.fullmatch(line)))


def read_loss(directory: Path) -> dict[str, str] | None:
    """What tests/loss.json says, in words; None where there is no such file."""
    path = directory / "tests" / "loss.json"
    if not path.is_file():
        return None
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        return {
            "tokens of text": f"{body['num_tokens']:,}",
            "perplexity": f"{body['perplexity']:.4f}",
            "unquantised": f"{body['reference_perplexity']:.4f}",
            "increase": f"{body['perplexity_increase']:+.2%}",
            "KL divergence, mean": f"{body['kl_mean']:.3g} nats",
            "KL divergence, 99th percentile": f"{body['kl_p99']:.3g} nats",
            "same top token": f"{body['top1_agreement']:.2%}",
        }
    except (ValueError, KeyError, TypeError) as error:
        raise OctavoError(f"{path}: damaged ({error}); compile the model again") from error


def bytes_by_role(manifest: Manifest) -> dict[str, tuple[int, int]]:
    """For each role its number of files and their bytes, the largest first."""
    sizes: dict[str, list[int]] = defaultdict(list)
    for entry in manifest.files.values():
        sizes[entry.role].append(entry.size)
    ordered = sorted(sizes.items(), key=lambda item: (-sum(item[1]), item[0]))
    return {role: (len(each), sum(each)) for role, each in ordered}
