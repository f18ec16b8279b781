"""Kernels: signatures, the interpreter, recording, choices."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import pytest
import torch

from octavo.runtime.kernel import Choices, Kernel, Workspace, recording
from octavo.runtime.kernel_signature import Parameter, parse_signature
from tests.rendered_kernel import imported

SOURCE = '''
import triton
import triton.language as tl
from octavo.runtime.kernel import Kernel, pdl_trigger, pdl_wait


@triton.jit
def scale_add(
    x_ptr, SCALE: tl.constexpr, y_ptr, num, bias, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """y = x * SCALE + bias"""
    if PDL:
        pdl_trigger()
        pdl_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < num).to(tl.float32)
    tl.store(y_ptr + at, x * SCALE + bias, mask=at < num)


@triton.jit
def dot(a_ptr, b_ptr, product_ptr, less_ptr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(product_ptr + at, tl.dot(a, b))
    tl.store(less_ptr + at, tl.where(a < b, a * b + 2.0, -a))


SCALE_ADD = Kernel(scale_add, "x_ptr: *bf16, y_ptr: *f32, num: i32, bias: f32")
DOT = Kernel(dot, "a_ptr: *bf16, b_ptr: *bf16, product_ptr: *f32, less_ptr: *bf16")
'''


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return imported("scale_add", SOURCE)


def launch(module: ModuleType, x: torch.Tensor, y: torch.Tensor, **changes: Any) -> None:
    constants: dict[str, Any] = {"SCALE": 3.0, "BLOCK": 64, **changes}
    module.SCALE_ADD.launch((-(-x.numel() // 64),), x, y, x.numel(), 0.5, **constants)


@pytest.mark.parametrize("num", [1, 64, 123])
def test_interpreted_on_the_cpu(module: ModuleType, num: int) -> None:
    x = torch.randn(num).bfloat16()
    y = torch.full((num,), torch.nan)
    launch(module, x, y, num_warps=8)
    torch.testing.assert_close(y, x.float() * 3.0 + 0.5, rtol=0, atol=0)


def test_an_empty_grid_runs_nothing(module: ModuleType) -> None:
    launch(module, torch.empty(0).bfloat16(), torch.empty(0))


def test_the_patched_interpreter_computes_in_bfloat16(module: ModuleType) -> None:
    a, b = torch.randn(2, 16, 16).bfloat16()
    product, less = torch.full((16, 16), torch.nan), torch.full((16, 16), torch.nan).bfloat16()
    module.DOT.launch((1,), a, b, product, less)
    torch.testing.assert_close(product.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    assert torch.equal(less, torch.where(a < b, a * b + 2, -a))


def test_recorded_on_the_meta_device(module: ModuleType) -> None:
    x = torch.empty(100, dtype=torch.bfloat16, device="meta")
    y = torch.empty(100, device="meta")
    launch(module, x, y)  # nobody records: nothing happens
    with recording() as launches:
        launch(module, x, y)
        launch(module, x, y, num_warps=8, num_stages=1, pdl=False)
    launch(module, x, y)
    first, second = launches
    assert first.kernel is module.SCALE_ADD
    assert first.constants == {"SCALE": 3.0, "BLOCK": 64}
    assert first.options == {"num_warps": 4, "num_stages": 3}
    assert second.options == {"num_warps": 8, "num_stages": 1}
    assert first.grid == (2,)
    assert [first.constants_for(arch)["PDL"] for arch in (89, 90)] == [False, True]
    assert second.constants_for(90)["PDL"] is False
    assert first.identity != second.identity


def test_the_module_s_text_is_known(module: ModuleType) -> None:
    assert module.SCALE_ADD.source() == SOURCE


@pytest.mark.parametrize(
    ("args", "constants", "message"),
    [
        (("x", "y", 3), {}, "3 arguments, not 4"),
        (("x", "y", 3, 0.5), {"BLOCK": 64}, "constexprs are ['BLOCK', 'SCALE'], given are"),
        (("x", "y", 3, 0.5), {"BLOCK": 64, "SCALE": 1.0, "PDL": True}, "given are ['BLOCK', 'PDL'"),
        (("y", "y", 3, 0.5), {}, "x_ptr is torch.float32, not a tensor of torch.bfloat16"),
        (("x", "y", 3.0, 0.5), {}, "num is a float, not i32"),
        (("x", "y", "y", 0.5), {}, "num is Tensor, not i32"),
    ],
)
def test_arguments_that_do_not_fit(
    module: ModuleType, args: tuple[Any, ...], constants: dict[str, Any], message: str
) -> None:
    x = torch.empty(8, dtype=torch.bfloat16, device="meta")
    tensors = {"x": x, "y": torch.empty(8, device="meta")}
    given = [tensors.get(arg, arg) if isinstance(arg, str) else arg for arg in args]
    with pytest.raises(ValueError, match=re.escape(message)):
        module.SCALE_ADD.launch((1,), *given, **(constants or {"SCALE": 1.0, "BLOCK": 64}))


def test_a_tensor_that_is_not_aligned_gets_another_binary(module: ModuleType) -> None:
    x = torch.empty(9, dtype=torch.bfloat16, device="meta")
    y = torch.empty(8, device="meta")
    with recording() as launches:
        launch(module, x[1:], y)
        launch(module, x[:8], y)
    odd, even = launches
    assert even.kernel is module.SCALE_ADD
    assert odd.kernel.signature == "x_ptr: *bf16@2, y_ptr: *f32@4, num: i32, bias: f32"
    assert (odd.kernel.fn, odd.constants) == (even.kernel.fn, even.constants)
    assert odd.identity != even.identity


def test_alignment_that_cannot_be_done_without(module: ModuleType) -> None:
    signature = "x_ptr: *bf16{}, y_ptr: *f32, num: i32, bias: f32"
    x = torch.empty(9, dtype=torch.bfloat16, device="meta")[1:]
    for kernel, message in (
        (Kernel(module.scale_add, signature.format(""), is_strict=True), "x_ptr = 0x2 is not a"),
        (Kernel(module.scale_add, signature.format("@8")), "x_ptr begins 2 bytes into its storage"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel.launch((1,), x, torch.empty(8, device="meta"), 8, 0.5, SCALE=1.0, BLOCK=64)


def test_a_signature_that_does_not_fit_the_function(module: ModuleType) -> None:
    with pytest.raises(ValueError, match="its parameters are"):
        Kernel(module.scale_add, "x_ptr: *bf16, num: i32, y_ptr: *f32, bias: f32")


def test_signatures() -> None:
    assert parse_signature("a: *bf16, b: *f16@2, n: i32, m: i64@16, eps: f32") == (
        Parameter("a", True, "bf16", 16),
        Parameter("b", True, "f16", 2),
        Parameter("n", False, "i32", 1),
        Parameter("m", False, "i64", 16),
        Parameter("eps", False, "f32", 1),
    )
    for wrong in ("a", "a: bf16", "a: *b", "a: *f32@"):
        with pytest.raises(ValueError, match=re.escape(repr(wrong))):
            parse_signature(wrong)


def choices() -> Choices:
    return Choices(
        (1, [{"how": "gemv"}]), (64, [{"how": "skinny", "BM": 64}, {"how": "skinny", "BM": 32}]),
        (None, [{"how": "torch"}]),
    )  # fmt: skip


def test_choices_by_rows() -> None:
    found = choices()
    hows = [found.for_rows(rows)["how"] for rows in (1, 2, 64, 65, 10**6)]
    assert hows == ["gemv", "skinny", "skinny", "torch", "torch"]
    found.choose("64", {"how": "skinny", "BM": 32})
    assert found.for_rows(64) == {"how": "skinny", "BM": 32}
    found.reset()
    assert found.for_rows(64) == {"how": "skinny", "BM": 64}


def test_the_default_is_the_first_that_fits_the_gpu() -> None:
    found = Choices(
        (64, [{"BM": 128, "needs_kib": 164}, {"BM": 64, "needs_kib": 163}, {"BM": 32}]),
        (None, [{"BM": 16}]),
    )
    by_arch = {None: 32, 80: 64, 86: 32, 89: 32, 90: 128, 100: 128, 120: 32, 75: 32}
    for arch, expected in by_arch.items():
        found.reset(arch)
        assert found.for_rows(2) == {"BM": expected}, arch
        assert found.for_rows(65) == {"BM": 16}
    found.choose("64", {"BM": 128})
    assert found.for_rows(64) == {"BM": 128}


def test_a_candidate_for_one_architecture_is_for_no_other() -> None:
    found = Choices(
        (64, [{"how": "wide", "needs_arch": 90, "needs_kib": 200}, {"how": "torch"}]), (None, [{}])
    )
    for arch in (None, 80, 89, 100, 120):
        found.reset(arch)
        assert found.for_rows(64) == {"how": "torch"}
        assert found.bucket(64).candidates == [{"how": "torch"}]
        with pytest.raises(ValueError, match="no candidate for 64 rows"):
            found.choose("64", {"how": "wide"})
    found.reset(90)
    assert found.for_rows(64) == {"how": "wide"}
    assert found.bucket(64).candidates == [{"how": "wide"}, {"how": "torch"}]
    again = Choices((None, [{"BN": 64, "needs_arch": 90}, {"BN": 32}, {"BN": 64}]))
    assert again.bucket(1).candidates == [{"BN": 32}, {"BN": 64}]
    again.reset(90)
    assert again.bucket(1).candidates == [{"BN": 64}, {"BN": 32}], "the default first, and once"
    with pytest.raises(ValueError, match="no candidate fits every GPU"):
        Choices((None, [{"needs_arch": 90}]))


def test_choices_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="64 rows: no candidate fits every GPU"):
        Choices((64, [{"needs_kib": 100}]), (None, [{}]))
    with pytest.raises(ValueError, match="no candidate for 64 rows"):
        choices().choose("64", {"how": "skinny", "BM": 16})
    with pytest.raises(ValueError, match=r"no row bucket '2'; there are 1, 64, \*"):
        choices().choose("2", {"how": "gemv"})
    with pytest.raises(ValueError, match="must ascend"):
        Choices((64, [{}]), (1, [{}]), (None, [{}]))
    with pytest.raises(ValueError, match="must ascend"):
        Choices((64, [{}]))


def test_workspace() -> None:
    workspace = Workspace.allocate("cpu")
    assert workspace.scratch.shape == (2**24,)
    assert not workspace.counters.any()
    tensors = (workspace.scratch, workspace.counters)
    assert Workspace.num_bytes() == sum(t.numel() * t.element_size() for t in tensors)
