"""Each op, rendered alone behind an embedding, gives what its reference evaluation gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.codegen.generate import STEP_INPUTS, generate
from octavo.codegen.target import resolve_target
from octavo.ir.errors import OctavoError
from octavo.ir.graph import Graph, Value
from octavo.ir.interpret import interpret
from octavo.ir.ops import op_def
from octavo.ir.ops.aten import OperandRef
from octavo.ir.ops.registry import OpDef
from octavo.ir.random_inputs import RandomSource
from octavo.ir.types import SymDim, TensorType
from tests.codegen.loading import Compiled, assert_close

T = SymDim("T")
TOLERANCE = {"f32": 1e-6, "bf16": 2**-7}  # bf16: one rounding more or less


class Bench:
    """A graph with a hidden state ``x [T, 12]`` that is looked up."""

    def __init__(self, dtype: str) -> None:
        self.graph = Graph("ops")
        self.dtype = dtype
        self.ids = self.graph.add_input("ids", TensorType("i64", (T,)))
        self.x = self.op("embedding", self.ids, self.weight("table", 32, 12))

    def weight(self, name: str, *dims: int) -> Value:
        kind = TensorType(self.dtype, dims)
        return self.graph.constant("checkpoint", key=name, type=kind, name=name)

    def op(self, op: str, *operands: Value | None, **attrs: Any) -> Value:
        return self.graph.append(op, *operands, **attrs).outputs[0]

    def heads(self) -> Value:
        return self.op("reshape", self.x, shape=(T, 3, 4))


CASES: dict[str, Callable[[Bench], Value]] = {
    **{
        op: (lambda b, op=op: b.op(op, b.x))
        for op in "neg exp cos sin tanh sigmoid relu silu gelu".split()
    },
    "gelu tanh": lambda b: b.op("gelu", b.x, approximate="tanh"),
    "sqrt": lambda b: b.op("sqrt", b.op("exp", b.x)),
    "rsqrt": lambda b: b.op("rsqrt", b.op("exp", b.x)),
    "add": lambda b: b.op("add", b.x, b.op("neg", b.x)),
    "add to itself": lambda b: b.op("add", b.x, b.x),
    "add broadcast": lambda b: b.op("add", b.x, b.weight("row", 12)),
    "sub scalar": lambda b: b.op("sub", b.x, scalar=0.5),
    "mul scalar": lambda b: b.op("mul", b.x, scalar=3),
    "div": lambda b: b.op("div", b.x, b.op("exp", b.x)),
    "pow": lambda b: b.op("pow", b.x, scalar=2),
    "softcap": lambda b: b.op("softcap", b.x, cap=0.5),
    "cast": lambda b: b.op("cast", b.x, dtype="f32"),
    "linear with bias": lambda b: b.op("linear", b.x, b.weight("w", 7, 12), b.weight("b", 7)),
    "linear of heads": lambda b: b.op("linear", b.heads(), b.weight("w", 5, 4), b.weight("b", 5)),
    "matmul": lambda b: b.op("matmul", b.x, b.weight("w", 12, 5)),
    "layer_norm": lambda b: b.op("layer_norm", b.x, b.weight("w", 12), b.weight("b", 12), eps=1e-5),
    "layer_norm without bias": lambda b: b.op("layer_norm", b.x, b.weight("w", 12), eps=1e-5),
    "layer_norm of heads": lambda b: b.op("layer_norm", b.heads(), b.weight("w", 3, 4), eps=1e-5),
    "layer_norm bare": lambda b: b.op("layer_norm", b.x, eps=1e-5),
    "add_layer_norm": lambda b: b.op(
        "add_layer_norm", b.x, b.op("exp", b.x), b.weight("w", 12), b.weight("b", 12), eps=1e-5
    ),
    "rms_norm": lambda b: b.op("rms_norm", b.x, b.weight("w", 12), eps=1e-5),
    "rms_norm round first": lambda b: b.op(
        "rms_norm", b.x, b.weight("w", 12), eps=1e-5, round_first=True
    ),
    "rms_norm offset": lambda b: b.op(
        "rms_norm", b.x, b.weight("w", 12), eps=1e-5, weight_offset=1.0
    ),
    "rms_norm round first offset": lambda b: b.op(
        "rms_norm", b.x, b.weight("w", 12), eps=1e-5, round_first=True, weight_offset=1.0
    ),
    "rms_norm bare": lambda b: b.op("rms_norm", b.x, eps=1e-5),
    "rms_norm of heads": lambda b: b.op("rms_norm", b.heads(), b.weight("w", 3, 4), eps=1e-5),
    **{
        f"gated {name}": (
            lambda b, name=name: b.op("gated_activation", b.x, b.op("exp", b.x), activation=name)
        )
        for name in ("silu", "gelu", "gelu_tanh", "relu", "sigmoid")
    },
    "concat": lambda b: b.op("concat", b.x, b.op("exp", b.x), dim=1),
    "select": lambda b: b.op("select", b.heads(), dim=1, index=2),
    "slice with a step": lambda b: b.op("slice", b.x, dim=1, start=1, end=11, step=3),
    "expand": lambda b: b.op("expand", b.op("unsqueeze", b.x, dim=1), shape=(T, 2, 12)),
    "permute and copy": lambda b: b.op(
        "reshape", b.op("permute", b.heads(), dims=(0, 2, 1)), shape=(T, 12)
    ),
    "squeeze": lambda b: b.op("squeeze", b.op("reshape", b.x, shape=(T, 1, 12)), dim=1),
    "transpose of a part": lambda b: b.op(
        "transpose", b.op("slice", b.heads(), dim=2, start=1, end=3), dim0=1, dim1=2
    ),
    "aten with attributes": lambda b: b.op("aten.cumsum.default", b.x, dim=1),
    "aten with a list": lambda b: b.op(
        "aten.stack.default", b.x, b.x, tensors=(OperandRef(0), OperandRef(1)), dim=1
    ),
    "aten view": lambda b: b.op("exp", b.op("aten.alias.default", b.x)),
}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_op(case: str, dtype: str, tmp_path: Path) -> None:
    bench = Bench(dtype)
    bench.graph.outputs = [CASES[case](bench)]
    name = "".join(c if c.isalnum() else "_" for c in f"op_{case}_{dtype}")
    compiled = Compiled(bench.graph, tmp_path / name)
    program = compiled.module.Program(compiled.weights, [], max_num_tokens=8, max_num_seqs=2)
    for num_tokens in (1, 5):
        for memory in program.memory:
            memory.fill_(0xFF)
        ids = torch.randint(0, 32, (num_tokens,), generator=torch.Generator().manual_seed(1))
        step = dict.fromkeys(STEP_INPUTS, torch.zeros(1, dtype=torch.int64)) | {"ids": ids}
        want = interpret(bench.graph, {"ids": ids}, compiled.source)[0]
        assert isinstance(want, torch.Tensor)
        assert_close(program(*step.values()), want.float(), TOLERANCE[dtype])


def test_ops_left_to_pytorch_are_counted(tmp_path: Path) -> None:
    bench = Bench("f32")
    x = bench.op("aten.cumsum.default", bench.x, dim=1)
    bench.graph.outputs = [bench.op("aten.cumsum.default", x, dim=1)]
    assert Compiled(bench.graph, tmp_path / "counted").generated.fallback_ops == {
        "aten.cumsum.default": 2
    }


def test_an_op_without_a_kernel_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.ir.ops import registry

    exp = op_def("exp")
    unknown = OpDef("unknown", exp.evaluate, exp.operands, exp.required, False, {})
    monkeypatch.setitem(registry._OPS, "unknown", unknown)
    bench = Bench("f32")
    bench.graph.outputs = [bench.op("unknown", bench.x)]
    with pytest.raises(OctavoError, match="there is no kernel for 'unknown'"):
        generate(bench.graph, resolve_target("cpu"), tmp_path, RandomSource(bench.graph))


def test_inputs_that_no_step_has_are_refused(tmp_path: Path) -> None:
    bench = Bench("f32")
    bench.graph.add_input("mask", TensorType("f32", (T,)))
    bench.graph.outputs = [bench.x]
    with pytest.raises(OctavoError, match="%mask is no input of a step"):
        generate(bench.graph, resolve_target("cpu"), tmp_path, RandomSource(bench.graph))
