"""Tests that need an NVIDIA GPU: run with ``make test ARGS="-m gpu tests/gpu"``."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter is on; set TRITON_INTERPRET=0")
