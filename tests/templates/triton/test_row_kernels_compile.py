"""The row kernels compiled for sm_90 at the sizes of Llama-3.1-8B: no spills, wide access."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs

from octavo.ir.types import DTYPES, SymDim, TensorType
from octavo.runtime.cross_compile import Worker, specialisations
from octavo.runtime.kernel import recording
from tests.rendered_kernel import rendered

HIDDEN, WIDTH, TOKENS = 4096, 14336, 8192
NORM = {"hidden": HIDDEN, "dtype": "bf16", "weight_rank": 1, "weight_dtype": "bf16", "eps": 1e-5}
RMS = {**NORM, "has_bias": False, "weight_offset": 0.0, "round_first": True}
STREAM = TensorType("bf16", (SymDim("T"), HIDDEN))
GELU = {
    "expr": "gelu(add(a0, a1), approximate='tanh')",
    "operands": (STREAM, STREAM.with_shape(HIDDEN)),
    "result": STREAM,
}


def _meta(*shape: int, dtype: str = "bf16") -> Tensor:
    return torch.empty(shape, dtype=DTYPES[dtype], device="meta")


def _add_norm(module: ModuleType, rows: int) -> None:
    x, y, out, total = (_meta(rows, HIDDEN) for _ in range(4))
    module.run(x, y, _meta(HIDDEN), out=out, total=total)


def _head_norm(module: ModuleType, rows: int) -> None:
    q = _meta(rows, 6144)[:, :4096].view(rows, 32, 128)
    module.run(q, _meta(128), out=_meta(rows, 32, 128))


def _embedding(module: ModuleType, rows: int) -> None:
    ids, sumsq = _meta(rows, dtype="i64"), _meta(rows, HIDDEN // 64, dtype="f32")
    module.run(ids, _meta(1000, HIDDEN), out=_meta(rows, HIDDEN), sumsq=sumsq)


def _gated(module: ModuleType, rows: int) -> None:
    gate, up = _meta(rows, 2 * WIDTH).split(WIDTH, dim=1)
    module.run(gate, up, out=_meta(rows, WIDTH))


def _pointwise(module: ModuleType, rows: int) -> None:
    module.run(_meta(rows, HIDDEN), _meta(HIDDEN), out=_meta(rows, HIDDEN))


KERNELS: list[tuple[str, dict[str, Any], Callable[[ModuleType, int], None]]] = [
    ("add_rms_norm", RMS, _add_norm),
    ("rms_norm", {**RMS, "hidden": 128}, _head_norm),
    (
        "embedding",
        {"hidden": HIDDEN, "dtype": "bf16", "emit_sumsq": True, "scale": None},
        _embedding,
    ),
    ("gated_activation", {"width": WIDTH, "dtype": "bf16", "activation": "silu"}, _gated),
    ("pointwise", GELU, _pointwise),
]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as made:
        yield made


@pytest.mark.parametrize(("op", "constants", "call"), KERNELS, ids=[k[0] for k in KERNELS])
def test_compiles_well(
    op: str,
    constants: dict[str, Any],
    call: Callable[[ModuleType, int], None],
    worker: Worker,
    tmp_path: Path,
) -> None:
    module = rendered(op, constants)
    with recording() as launches:
        call(module, 1)
        call(module, TOKENS)
    for wanted in specialisations(launches, 90):
        binary = worker.compile(wanted)
        assert binary.info.stack_bytes == 0, f"{wanted} spills"
        path = tmp_path / "kernel.cubin"
        path.write_bytes(binary.cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-sass", str(path)]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        stores = re.findall(r"STG\.E\S*", sass)
        assert "LDG.E.128" in sass, f"{wanted}: no load of 16 bytes"
        assert any(".128" in store for store in stores), f"{wanted}: no store of 16 bytes"
        assert "ACQBULK" in sass, f"{wanted} does not wait for the kernel before"
