"""What was asked for of the KV cache, checked before any work: its codes, and their scales."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.calibrate.kv_samples import KV_PASSAGE
from octavo.codegen.target import Targets
from octavo.ir.errors import OctavoError
from octavo.ir.kv_scheme import KVScheme

KV_CACHE_DTYPES = ("auto", "fp8", "int8")
_CODES = {"fp8": "f8e4m3", "int8": "i8"}
# e4m3 spans what keys and values are, so that ones do; integers have to be scaled to their tokens.
_USUAL_SCALES = {"fp8": "head", "int8": "token"}
_FP8_ARCH = 89  # the first whose GPUs convert e4m3
BUILT_IN = "passage"


@dataclass(frozen=True)
class KVOptions:
    """The scheme, None for a cache in the model's dtype, and where scales of heads are.

    ``scales`` is a safetensors file, ``checkpoint``, or None for ones or for those of tokens.
    ``calibration`` is the text that offsets of keys are found with, None for no offsets.
    """

    scheme: KVScheme | None = None
    scales: str | Path | None = None
    calibration: Path | None = None

    @property
    def has_head_scales(self) -> bool:
        """Whether scales of heads are weights of the artifact."""
        return self.scales is not None


def resolve_kv_options(
    dtype: str,
    scale_per: str | None,
    scales: str | Path | None,
    targets: Targets,
    calibration: str | Path | None = None,
) -> KVOptions:
    """Options from what the user wrote: ``auto``, ``fp8`` or ``int8``; ``head`` or ``token``.

    ``calibration`` is a text, ``passage`` for the one that comes with Octavo, or None for keys
    without offsets. Raises OctavoError for what does not go together, and for a GPU that cannot
    convert the codes.
    """
    if dtype not in KV_CACHE_DTYPES:
        raise OctavoError(
            f"unknown KV cache dtype {dtype!r}; choose from {', '.join(KV_CACHE_DTYPES)}"
        )
    if dtype == "auto":
        if any(given is not None for given in (scale_per, scales, calibration)):
            raise OctavoError(
                "a KV cache of the model's dtype has no scales and no offsets; choose"
                " --kv-cache-dtype fp8 or int8"
            )
        return KVOptions()
    scheme = KVScheme(_CODES[dtype], scale_per or _USUAL_SCALES[dtype])
    if scheme.scales not in ("head", "token"):
        raise OctavoError(f"scales of a KV cache are per head or token, not {scheme.scales!r}")
    if scheme.has_token_scales and scales is not None:
        raise OctavoError(
            "scales of tokens are made as tokens are written; leave out --kv-scales, or choose "
            "--kv-scale-per head"
        )
    if scheme == KVScheme("i8", "head") and scales is None:
        raise OctavoError(
            "INT8 with a scale a head would round keys and values to whole numbers; give "
            "--kv-scales, or choose --kv-scale-per token"
        )
    old = [arch for arch in targets.archs if arch < _FP8_ARCH]
    if dtype == "fp8" and old:
        raise OctavoError(
            f"an FP8 KV cache needs a GPU of sm_{_FP8_ARCH} or later, and sm_{old[0]} is to be "
            "compiled for; choose --kv-cache-dtype int8"
        )
    return KVOptions(scheme, scales, _calibration(scheme, calibration))


def _calibration(scheme: KVScheme, given: str | Path | None) -> Path | None:
    if given is None:
        return None
    if scheme.codes != "f8e4m3":
        raise OctavoError(
            "only keys of FP8 have offsets, which --kv-calibration finds; leave it out, or choose"
            " --kv-cache-dtype fp8"
        )
    text = KV_PASSAGE if given == BUILT_IN else Path(given)
    if not text.is_file():
        raise OctavoError(
            f"--kv-calibration {text}: no such file; expected a UTF-8 text, or `{BUILT_IN}`"
        )
    return text
