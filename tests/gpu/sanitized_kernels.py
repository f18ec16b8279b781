"""A few kernels at small odd sizes, for NVIDIA's compute-sanitizer: see test_sanitizer.py.

    python -m tests.gpu.sanitized_kernels [--beyond] [DEVICE]

Whether the results are right is tested elsewhere; here they have to be finite. With ``--beyond``
one kernel more writes behind its tensor. Tensors are drawn on the host, so that hardly any kernels
of PyTorch's are looked at as well.
"""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from octavo.codegen.triton_layouts import TritonLayout
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import quantize
from octavo.runtime.kernel import Workspace
from tests.rendered_kernel import imported, rendered
from tests.templates.triton.paged_case import PagedCase

BEYOND = """
import triton
import triton.language as tl

from octavo.runtime.kernel import Kernel


@triton.jit
def beyond(x_ptr, num):
    tl.store(x_ptr + num, 1.0)


WRITE = Kernel(beyond, "x_ptr: *f32@4, num: i32")
"""
LINEAR = {
    "dtype": "f16",
    "out_dtype": "f16",
    "has_bias": True,
    "norm_eps": 1e-5,
    "activation": None,
    "softcap": None,
    "has_residual": True,
    "takes_sumsq": False,
    "emit_sumsq": False,
}
NUM_ROWS = {"gemv": 1, "skinny": 5, "tiled": 123}
# A scheme, K, rows and a way to run them.
QUANTISED = [
    ("int4<1x32, f16>", 224, 5, "skinny"),
    ("uint4<1x32, f16, zero=u8>", 224, 123, "torch"),
    ("f8e4m3<1x*, f32>", 200, 1, "gemv"),
    ("int8<1x*, f32, x=i8>", 200, 123, "tiled"),
]
STEPS = {
    "decode": [(1, 1), (17, 1), (70, 1)],
    "mixed": [(5, 5), (33, 1), (40, 23)],
}


def attention(device: torch.device, workspace: Workspace, step: str) -> Tensor:
    """A step of grouped heads in a window, with sinks."""
    case = PagedCase(STEPS[step], heads=6, head_dim=16, dtype=torch.float16)
    constants = {**case.constants(), "window": 17, "has_sinks": True}
    for name, value in vars(case).items():
        if isinstance(value, Tensor):
            setattr(case, name, value.to(device))
    q, k, v = case.new()
    out = torch.empty(len(q), case.heads, case.v_head_dim, dtype=case.dtype, device=device)
    return rendered("rotary_paged_attention", constants).run(  # type: ignore[no-any-return]
        *(case.keys.flatten(0, 1), case.values.flatten(0, 1)),
        *(q, k, v, case.cos, case.sin, case.slot_mapping),
        *case.layout(),
        torch.randn(case.heads).to(case.dtype).to(device),
        out=out,
        block_size=case.block_size,
        workspace=workspace,
    )


def linear(device: torch.device, workspace: Workspace, how: str) -> Tensor:
    """A product with norm, bias and residual, of sizes that fill no tile."""
    k, n = 200, 130
    module = choosing(rendered("linear", {"k": k, "n": n, **LINEAR}), NUM_ROWS[how], how)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape).half().to(device)

    rows = NUM_ROWS[how]
    operands = (drawn(rows, k), drawn(n, k), drawn(n), drawn(rows, n))
    out = torch.empty(rows, n, dtype=torch.float16, device=device)
    normed = torch.empty(rows, k, dtype=torch.float16, device=device)
    return module.run(*operands, out=out, normed=normed, workspace=workspace)  # type: ignore[no-any-return]


def quant_linear(
    device: torch.device, workspace: Workspace, scheme: str, k: int, rows: int, how: str
) -> Tensor:
    """The same with a weight of a scheme."""
    n = 130
    matrix = quantize(torch.randn(n, k), QuantScheme.parse(scheme))
    layout = TritonLayout.of(matrix.scheme, n, k)
    made = layout.constants("f16", "f16")
    constants = {"k": k, "n": n, **LINEAR, **made, "sums_one_row": False}
    module = choosing(rendered("linear", constants, "quant_linear"), rows, how)
    packed = [part.to(device) for part in layout.pack(matrix).values()]
    half: dict[str, Any] = {"dtype": torch.float16, "device": device}
    width = layout.num_spans * layout.span
    buffers = {"normed": torch.empty(rows, k, **half)}
    if matrix.scheme.x is not None:
        buffers["rounded"] = torch.empty(rows, width, dtype=torch.int8, device=device)
        buffers["row_scales"] = torch.empty(rows, 1, device=device)
    return module.run(  # type: ignore[no-any-return]
        torch.randn(rows, k).half().to(device),
        *packed,
        torch.randn(n).half().to(device),
        torch.randn(rows, n).half().to(device),
        out=torch.empty(rows, n, **half),
        **buffers,
        workspace=workspace,
    )


def choosing(module: ModuleType, rows: int, how: str) -> ModuleType:
    """Have a linear run ``how`` for so many rows, whatever is the default."""
    bucket = module.CHOICES.bucket(rows)
    module.CHOICES.choose(
        bucket.name, next(each for each in bucket.candidates if each["how"] == how)
    )
    return module


def sample(device: torch.device, workspace: Workspace, has_filters: bool) -> Tensor:
    """Draw from three rows; with filters, each by another."""
    columns: dict[str, Any] = {
        "temperature": torch.tensor([0.0, 1.0, 0.7]),
        "top_k": torch.tensor([0, 20, 0], dtype=torch.int32),
        "top_p": torch.tensor([1.0, 1.0, 0.9]),
        "min_p": torch.tensor([0.1, 0.0, 0.0]),
        "seed": torch.tensor([1, 2, 3]),
        "stream": torch.tensor([0, 1, 2]),
        "position": torch.tensor([7, 8, 9]),
    }
    return rendered("sample", {"vocab_size": 5003}).run(  # type: ignore[no-any-return]
        torch.randn(3, 5003).to(device),
        *(column.to(device) for column in columns.values()),
        out=torch.empty(3, dtype=torch.int64, device=device),
        fault=torch.empty(3, dtype=torch.int32, device=device),
        has_filters=has_filters,
        workspace=workspace,
    )


def write_beyond(device: torch.device) -> None:
    """Write right behind a tensor."""
    x = torch.empty(5, device=device)
    imported("beyond", BEYOND).WRITE.launch((1,), x, x.numel())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beyond", action="store_true", help="make one fault")
    parser.add_argument("device", type=torch.device, nargs="?", default=torch.device("cuda", 0))
    options = parser.parse_args()
    device = options.device
    torch.manual_seed(0)
    workspace = Workspace.allocate(device)
    results = {
        **{f"attention, {step}": attention(device, workspace, step) for step in STEPS},
        **{f"linear, {how}": linear(device, workspace, how) for how in NUM_ROWS},
        **{
            f"linear, {' '.join(map(str, case))}": quant_linear(device, workspace, *case)
            for case in QUANTISED
        },
        **{f"sample, {has}": sample(device, workspace, has) for has in (False, True)},
    }
    if options.beyond:
        write_beyond(device)
    for name, result in results.items():
        assert result.cpu().isfinite().all(), name
        print(name, tuple(result.shape))


if __name__ == "__main__":
    main()
