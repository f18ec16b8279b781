"""Giving memory back to the system between the phases of a compile."""

from __future__ import annotations

import ctypes
import gc
import sys


def release_memory() -> None:
    """Return freed memory to the system.

    glibc keeps freed tensors of up to 32 MiB in its heap: hundreds of megabytes after the weights
    have streamed through once, which would add to the peak of the phases that follow.
    """
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
