"""Which device an artifact's target means, here."""

from __future__ import annotations

import torch

from octavo.runtime.errors import ArtifactError

OLDEST_ARCH = 80


def device_for(target: str) -> torch.device:
    """The device for ``cpu`` or ``cuda:sm_90``. Raises ArtifactError when this machine has none.

    An artifact for another architecture runs too: its kernels are compiled anew when it is loaded.
    """
    if target == "cpu":
        return torch.device("cpu")
    kind, _, arch = target.partition(":sm_")
    if kind != "cuda" or not arch.isdigit():
        raise ArtifactError(f"target {target!r} is not one that this version runs; upgrade octavo")
    if not torch.cuda.is_available():
        raise ArtifactError(
            f"the artifact was compiled for {target} and this machine has no usable NVIDIA GPU; "
            "run it where there is one, or compile the model again with --target cpu"
        )
    major, minor = torch.cuda.get_device_capability()
    if major * 10 + minor < OLDEST_ARCH:
        raise ArtifactError(
            f"this GPU is sm_{major}{minor}; kernels need sm_80 (Ampere) or later; compile the "
            "model again with --target cpu"
        )
    return torch.device("cuda", torch.cuda.current_device())
