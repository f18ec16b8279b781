"""The product of some hundreds of rows by codes: no interpreter runs it, so it is compiled here."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs

from octavo.codegen.triton_layouts import TritonLayout
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.types import DTYPES
from octavo.runtime.cross_compile import Worker, specialisations
from octavo.runtime.kernel import Launch, Workspace, recording
from tests.linear_kernels import PLAIN
from tests.rendered_kernel import rendered

pytestmark = [pytest.mark.cross_compile, pytest.mark.timeout(1200)]
SCHEMES = [
    "int4<1x128, bf16>",
    "int4<1x64, f32>",
    "int4<1x*, f32>",
    "uint4<1x128, f16, zero=u8>",
    "uint4<1x32, bf16, zero=u8>",
    "f4e2m1<1x32, f8e8m0>",
    "int8<1x*, f32>",
    "int8<1x32, f16>",
    "int6<1x16, f32>",
    "f8e4m3<1x*, bf16>",
]
AROUND: dict[str, dict[str, Any]] = {
    "gated": {"n": 28672, "k": 4096, "activation": "silu", "norm_eps": 1e-5, "has_bias": True},
    "residual": {"n": 4096, "k": 4096, "has_residual": True, "emit_sumsq": True},
    "odd": {"n": 4099, "k": 4096, "dtype": "f16", "out_dtype": "f16", "has_bias": True},
    "logits": {"n": 128256, "k": 4096, "norm_eps": 1e-5, "out_dtype": "f32"},
}
CASES = [
    *((scheme, name) for scheme in SCHEMES for name in ("gated", "residual")),
    ("int4<1x128, bf16>", "odd"),
    ("int4<1x128, bf16>", "logits"),
]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as made:
        yield made


@pytest.mark.parametrize(("scheme", "name"), CASES)
def test_wide_compiles_without_spilling(
    scheme: str, name: str, worker: Worker, tmp_path: Path
) -> None:
    seen: dict[str, int] = {}
    for wanted in specialisations(_wide(scheme, **AROUND[name]), 90):
        info = (binary := worker.compile(wanted)).info
        assert info.stack_bytes == 0, f"{wanted} spills"
        assert info.shared_bytes <= 227 * 1024
        path = tmp_path / "kernel.cubin"
        path.write_bytes(binary.cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-sass", str(path)]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        products = re.findall(r"HGMMA\.64x(\d+)x16\.F32\S* R\d+, (\w+)", sass)
        assert products, f"{wanted} does not use the tensor cores"
        assert all(first.startswith("R") for _, first in products), "codes go by shared memory"
        assert "UTMALDG" in sass, f"{wanted} does not fetch x by TMA"
        assert "ACQBULK" in sass, f"{wanted} does not wait for the kernel before"
        seen[wanted.stem] = info.shared_bytes
    assert seen


def _wide(scheme: str, n: int, k: int, **more: Any) -> list[Launch]:
    """What is launched of `wide` for every candidate of every bucket."""
    layout = TritonLayout.of(QuantScheme.parse(scheme), n, k)
    constants = {"k": k, "n": n, "sums_one_row": False} | PLAIN | more
    constants |= layout.constants(constants["dtype"], constants["out_dtype"])
    module = rendered("linear", constants, "quant_linear")
    module.CHOICES.reset(90)
    dtype, out_dtype = DTYPES[constants["dtype"]], DTYPES[constants["out_dtype"]]
    width = n // 2 if constants["activation"] else n

    def on_meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    parts = [on_meta(shape, DTYPES[name]) for name, shape in layout.shapes().values()]
    found: list[Launch] = []
    for bucket in module.CHOICES.buckets:
        for candidate in (each for each in bucket.candidates if each["how"] == "wide"):
            module.CHOICES.choose(bucket.name, candidate)
            rows = bucket.max_rows or 2000
            around = [on_meta((n,), dtype)] if constants["has_bias"] else []
            around += [on_meta((rows, width), out_dtype)] if constants["has_residual"] else []
            buffers = {
                "out": on_meta((rows, width), out_dtype),
                "normed": on_meta((rows, k), dtype),
                "wide": on_meta((rows, n), dtype),
                "sumsq_out": on_meta((rows, width // 64), torch.float32),
            }
            wanted = module.run.__annotations__
            with recording() as launches:
                module.run(
                    *(on_meta((rows, k), dtype), *parts, *around),
                    **{name: each for name, each in buffers.items() if name in wanted},
                    workspace=Workspace.allocate("meta"),
                )
            found += [launch for launch in launches if launch.kernel.name == "wide"]
    return found
