"""Tests that need an NVIDIA GPU: run with ``make test ARGS="-m gpu tests/gpu"``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode


class DrawnOnHost(TorchFunctionMode):
    """What a seeded generator draws is drawn where the generator is, then moved to the GPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is None or generator.device.type != "cpu" or "device" in kwargs:
            return func(*args, **kwargs)
        return func(*args, **kwargs, device="cpu").cuda()


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skip without a GPU; tests of single kernels make their tensors there."""
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter is on; set TRITON_INTERPRET=0")
    if not request.node.path.name.startswith("test_kernel_"):
        yield
        return
    torch.set_default_device("cuda")
    with DrawnOnHost():
        yield
    torch.set_default_device(None)
