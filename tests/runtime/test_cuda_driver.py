"""Launches are packed as cuda.h lays them out: compared byte for byte, with no GPU."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.runtime.cuda_driver import (
    CudaDriver,
    CudaError,
    LaunchAttribute,
    LaunchConfig,
    Launcher,
    RefusedBinary,
)
from octavo.runtime.kernel_binary import Binary, BinaryInfo
from tests.runtime.fake_cuda import ATTRIBUTE_BYTES, CONFIG_BYTES, FakeCuda

SIGNATURE = "x_ptr: *bf16, num_rows: i32, scale: f32, y_ptr: *f32@4, seed: i64"
INFO = BinaryInfo(
    module="norm",
    kernel="add_norm",
    constants={},
    options={},
    signature=SIGNATURE,
    arch="sm_90a",
    entry="add_norm",
    num_warps=8,
    shared_bytes=1024,
    num_parameters=7,
    num_scratch_parameters=2,
    global_scratch_bytes=0,
    registers=32,
    stack_bytes=0,
    triton="3.6.0",
    ptxas="12.8",
)
VALUES = [0x7F0000000010, -3, 1.5, 0x7F0000000204, -(2**40)]


def launcher(cuda: FakeCuda, *, uses_pdl: bool = False, **changes: Any) -> Launcher:
    binary = Binary(replace(INFO, **changes), b"cubin")
    return Launcher(
        CudaDriver(cuda),
        binary,
        0,
        uses_pdl=uses_pdl,
        stream_of=lambda index: 0xABC0 + index,
        allocate=lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8),
    )


def test_structures_have_the_layout_of_the_header() -> None:
    assert ctypes.sizeof(LaunchConfig) == CONFIG_BYTES
    assert (LaunchConfig.hStream.offset, LaunchConfig.attrs.offset) == (32, 40)
    assert ctypes.sizeof(LaunchAttribute) == ATTRIBUTE_BYTES
    assert LaunchAttribute.value.offset == 8


def test_parameters_and_config_byte_for_byte() -> None:
    cuda = FakeCuda()
    launcher(cuda)((3, 2), VALUES)
    [launch] = cuda.launches
    assert launch.parameters == (
        struct.pack("<Q", 0x7F0000000010),
        struct.pack("<i4x", -3),
        struct.pack("<f4x", 1.5),
        struct.pack("<Q", 0x7F0000000204),
        struct.pack("<q", -(2**40)),
        bytes(8),  # no global scratch, no profile scratch
        bytes(8),
    )
    assert launch.config == struct.pack("<7I4xQQI4x", 3, 2, 1, 256, 1, 1, 1024, 0xABC0, 0, 0)
    assert launch.attributes == ()
    assert (cuda.images, cuda.entries) == ([b"cubin"], [b"add_norm"])
    assert launch.function == 0x2001


def test_a_pdl_kernel_says_so() -> None:
    cuda = FakeCuda()
    launcher(cuda, uses_pdl=True)((1,), VALUES)
    assert cuda.launches[0].attributes == (struct.pack("<II", 6, 0) + struct.pack("<i60x", 1),)


def test_each_launch_has_its_own_grid_and_values() -> None:
    cuda = FakeCuda()
    run = launcher(cuda)
    run((1,), VALUES)
    run((5, 6, 7), [16, 2, 0.0, 4, 0])
    assert cuda.launches[0].config[:12] == struct.pack("<3I", 1, 1, 1)
    assert cuda.launches[1].config[:12] == struct.pack("<3I", 5, 6, 7)
    assert cuda.launches[1].parameters[1] == struct.pack("<i4x", 2)


def test_an_empty_grid_launches_nothing() -> None:
    cuda = FakeCuda()
    launcher(cuda)((0, 4), VALUES)
    assert cuda.launches == []


@pytest.mark.parametrize(
    ("num_bytes", "asked"), [(49152, []), (49153, [(8, 49153)]), (232448, [(8, 232448)])]
)
def test_much_shared_memory_is_asked_for(num_bytes: int, asked: list[tuple[int, int]]) -> None:
    cuda = FakeCuda()
    launcher(cuda, shared_bytes=num_bytes)
    assert cuda.attributes == asked


def test_global_scratch_is_made_once_for_each_grid() -> None:
    cuda = FakeCuda()
    sizes: list[int] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    binary = Binary(replace(INFO, global_scratch_bytes=384), b"")
    run = Launcher(
        CudaDriver(cuda), binary, 0, uses_pdl=False, stream_of=lambda _: 0, allocate=allocate
    )
    for grid in ((4, 2), (4, 2), (3,)):
        run(grid, VALUES)
    assert sizes == [384 * 8, 384 * 3]
    first, again, other = (launch.parameters[5:] for launch in cuda.launches)
    assert first == again != other
    assert first[0] != bytes(8)
    assert first[1] == bytes(8)


def test_a_toolchain_without_scratch_parameters() -> None:
    cuda = FakeCuda()
    launcher(cuda, num_scratch_parameters=0)((1,), VALUES)
    assert len(cuda.launches[0].parameters) == 5


@pytest.mark.parametrize("result", [200, 209, 218, 222, 300])
def test_a_binary_that_does_not_fit_is_refused(result: int) -> None:
    cuda = FakeCuda(fails={"cuModuleLoadData": [result]})
    with pytest.raises(RefusedBinary, match=rf"loading norm.add_norm failed: CUDA_ERROR_{result}"):
        launcher(cuda)


def test_other_errors_name_kernel_and_call() -> None:
    cuda = FakeCuda(fails={"cuLaunchKernelEx": [700]})
    with pytest.raises(CudaError, match=r"launching norm.add_norm with grid \(2,\) failed: CUDA"):
        launcher(cuda)((2,), VALUES)


def test_a_thread_without_a_context_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr("octavo.runtime.cuda_driver.make_context_current", made.append)
    cuda = FakeCuda(fails={"cuLaunchKernelEx": [201]})
    launcher(cuda)((2,), VALUES)
    assert (made, len(cuda.launches)) == ([0], 2)


def test_numbers_out_of_range_are_not_cut_off() -> None:
    with pytest.raises(struct.error):
        launcher(FakeCuda())((1,), [16, 2**31, 1.0, 4, 0])
