"""Tests that need an NVIDIA GPU: run with ``make test ARGS="-m gpu tests/gpu"``."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skip without a GPU; tests of single kernels draw their tensors there."""
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter is on; set TRITON_INTERPRET=0")
    is_kernel = request.node.path.name.startswith("test_kernel_")
    torch.set_default_device("cuda" if is_kernel else None)
    yield
    torch.set_default_device(None)
