"""Tests that need an NVIDIA GPU: ``TRITON_INTERPRET=0 pytest -m gpu -n 4 tests/gpu``.

Several processes share one GPU: models are tiny, their caches are given in bytes, and what a test
leaves is freed after it. What they compile they share too (see tests/conftest.py).
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from model_zoo import tiny_model
from torch.overrides import TorchFunctionMode

from octavo.compile import compile_model
from octavo.frontend.refused import RefusedArchitecture
from tests.gpu.gpu_lock import share_of_gpu

# The checkpoint and the artifact of a tiny model in a dtype.
Compiled = Callable[[str, str], tuple[Path, Path]]


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
def _gpu(request: pytest.FixtureRequest, session_dir: Path) -> Iterator[None]:
    """Skip without a GPU; share it, unless a test is marked ``gpu_alone``."""
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter is on; set TRITON_INTERPRET=0")
    alone = request.node.get_closest_marker("gpu_alone") is not None
    with share_of_gpu(session_dir, alone=alone):
        yield
        _free()


@pytest.fixture(autouse=True)
def _tensors_on_the_gpu(_gpu: None, request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests of single kernels make their tensors there."""
    if not request.node.path.name.startswith("test_kernel_"):
        yield
        return
    torch.set_default_device("cuda")
    with DrawnOnHost():
        yield
    torch.set_default_device(None)


def _free() -> None:
    gc.unfreeze()  # an LLM that is loaded freezes what there is
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def compiled(session_dir: Path) -> Compiled:
    """Compiles a tiny model in a dtype, once for all processes of this session."""

    def compiled(name: str, dtype: str) -> tuple[Path, Path]:
        checkpoint, artifact = (session_dir / f"{name}-{dtype}-{part}" for part in ("hf", "octavo"))
        with FileLock(f"{artifact}.lock"):
            if not checkpoint.exists():
                model = tiny_model(name, seed=0, dtype=getattr(torch, dtype))
                model.save_pretrained(checkpoint)
            if not artifact.exists():
                try:
                    compile_model(checkpoint, artifact, dtype=dtype, target="cuda", progress=False)
                except RefusedArchitecture as error:
                    pytest.skip(f"this version of transformers: {error}")
        return checkpoint, artifact

    return compiled
