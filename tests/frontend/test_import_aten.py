"""ATen calls become the IR's ops where those have a meaning, and stay ``aten`` where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from octavo.frontend.import_aten import import_program
from octavo.frontend.refused import RefusedArchitecture
from octavo.ir.graph import Graph
from octavo.ir.interpret import interpret
from octavo.ir.printer import print_graph
from octavo.ir.verify import verify

Body = Callable[[Tensor, Tensor, Tensor], Tensor]


class Toy(nn.Module):
    """Embeds the ids and applies a function of (x ``[1, T, 6]``, table ``[40, 6]``, positions)."""

    base_model_prefix = ""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.table = nn.Parameter(torch.randn(40, 6, generator=torch.Generator().manual_seed(1)))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.body(F.embedding(ids, self.table), self.table, positions)


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        result: Tensor = self.model(ids, positions)
        return result


class Weights:
    def __init__(self, toy: Toy, buffers: dict[str, Tensor]) -> None:
        self.toy = toy
        self.buffers = buffers

    def load(self, key: str) -> Tensor:
        return self.toy.state_dict()[key]

    def buffer(self, key: str) -> Tensor:
        return self.buffers[key]


def exported(toy: Toy, dim: Any = Dim.DYNAMIC) -> ExportedProgram:
    example = torch.zeros(1, 13, dtype=torch.long), torch.arange(13)[None]
    dynamic = ({1: dim}, {1: dim})
    with torch.no_grad():
        return export(Wrapper(toy), example, dynamic_shapes=dynamic, strict=False)


def imported(body: Body) -> Graph:
    """The graph, after it has given the function's own numbers at two other lengths."""
    toy = Toy(body)
    result = import_program(exported(toy).run_decompositions({}), toy, "toy")
    verify(result.graph)
    for length in (4, 31):
        ids = torch.arange(length)[None] * 7 % 40
        positions = torch.arange(5, 5 + length)[None]
        weights = Weights(toy, result.constants)
        (got,) = interpret(result.graph, {"ids": ids, "positions": positions}, weights)
        assert isinstance(got, Tensor)
        torch.testing.assert_close(got, toy(ids, positions).detach(), rtol=1e-6, atol=1e-6)
    return result.graph


def index_of(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    return x[:, :, torch.tensor([5, 0, 3])]


def interleave(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def norm_of_two_dims(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    return F.layer_norm(x.view(1, -1, 2, 3), (2, 3))


CASTS = "cast cast unsqueeze cast add"
ADDMM = "select select slice transpose linear"
CASES: list[tuple[str, Body, str]] = [
    ("copies", lambda x, w, p: x.clone().contiguous().detach().to(x.dtype), ""),
    ("dropout", lambda x, w, p: F.dropout(x, 0.5, training=False), ""),
    ("whole-slices", lambda x, w, p: x[:, :, :][..., 0:6], ""),
    ("same-view", lambda x, w, p: x.view(1, -1, 6).expand(1, -1, 6), ""),
    ("scalars", lambda x, w, p: 3 * (x + 2) / 4 - 1, "add mul div sub"),
    ("alpha", lambda x, w, p: torch.add(x, x * 2, alpha=3), "mul mul add"),
    ("alpha-scalar", lambda x, w, p: torch.sub(x, 2, alpha=3), "sub"),
    ("reversed", lambda x, w, p: 1 - x, "neg add"),
    ("power", lambda x, w, p: x.pow(2) + x**3, "pow pow add"),
    (
        "casts",
        lambda x, w, p: x.double().float() + p.type_as(x)[..., None],
        "cast cast cast unsqueeze add",
    ),
    ("linear", lambda x, w, p: F.linear(x, w), "linear"),
    (
        "addmm",
        lambda x, w, p: torch.addmm(w[0], x[0], w[:6]),
        "select select slice transpose linear",
    ),
    ("matmul", lambda x, w, p: x @ w.t(), "transpose matmul"),
    ("layer-norm", lambda x, w, p: F.layer_norm(x, (6,), w[0]), "select layer_norm"),
    (
        "two-dims-norm",
        lambda x, w, p: F.layer_norm(x.view(1, -1, 2, 3), (2, 3)),
        "reshape aten.layer_norm.default",
    ),
    (
        "activations",
        lambda x, w, p: F.silu(x) + F.gelu(x, approximate="tanh") + F.relu(x),
        "silu gelu add relu add",
    ),
    ("negative-slices", lambda x, w, p: x[..., -4:-1], "slice"),
    (
        "strided",
        lambda x, w, p: torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2),
        "slice neg slice unsqueeze unsqueeze concat reshape",
    ),
    ("last-token", lambda x, w, p: x[:, -1], "select"),
    ("all-but-last", lambda x, w, p: x[:, :-1], "slice"),
    ("chunk", lambda x, w, p: torch.cat(x.chunk(3, -1)[::-1], -1), "split concat"),
    ("split", lambda x, w, p: x.split([1, 5], -1)[1], "split"),
    ("split-unequal", lambda x, w, p: x.split(4, -1)[1], "split"),
    ("unbind", lambda x, w, p: x.view(1, -1, 3, 2).unbind(-1)[1], "reshape select"),
    ("permute", lambda x, w, p: x.permute(2, 0, 1).squeeze(1), "permute squeeze"),
    ("squeeze-nothing", lambda x, w, p: x.squeeze(-1), ""),
    ("transpose", lambda x, w, p: x.transpose(-1, -2).movedim(0, 1), "transpose permute"),
    ("merge-tokens", lambda x, w, p: x.view(-1, 2).view(1, -1, 6), "reshape reshape"),
    ("softmax", lambda x, w, p: x.softmax(-1), "aten.softmax.int"),
    ("mean", lambda x, w, p: x.mean(-1, keepdim=True), "aten.mean.dim"),
    ("clamp", lambda x, w, p: x.clamp(min=-0.5), "aten.clamp.default"),
    ("where", lambda x, w, p: torch.where(x > 0, x, x.exp()), "aten.gt.Scalar exp aten.where.self"),
    ("gather", lambda x, w, p: w[p + 1], "add aten.index.Tensor"),
    ("constant-index", index_of, "aten.index.Tensor"),
]


@pytest.mark.parametrize(("body", "ops"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_ops(body: Body, ops: str) -> None:
    graph = imported(body)
    assert " ".join(node.op for node in graph.nodes if node.op != "embedding") == ops


def test_arguments_read_well() -> None:
    graph = imported(
        lambda x, w, p: torch.cat((x[..., 2:], x.softmax(-1, dtype=torch.float64)), -1)
    )
    assert print_graph(graph) == (
        """\
graph @toy(%ids: i64[1, T], %positions: i64[1, T], @table: f32[40, 6]) {
  %embedding: f32[1, T, 6] = embedding(%ids, @table)
  %slice: f32[1, T, 4] = slice(%embedding, dim=2, start=2, end=6)
  %softmax: f64[1, T, 6] = aten.softmax.int(%embedding, dim=-1, dtype="f64")
  %logits: f64[1, T, 10] = concat(%slice, %softmax, dim=2)
  return %logits
}
"""
    )


def test_a_small_constant_is_written_out_and_a_large_one_is_a_buffer() -> None:
    small, large = torch.arange(6.0), torch.linspace(0, 1, 600).view(100, 6)
    toy = Toy(lambda x, w, p: x * small + F.embedding(p, large))
    result = import_program(exported(toy), toy, "toy")
    literal, buffer = (n for n in result.graph.weight_nodes if n.op != "checkpoint")
    assert (literal.op, literal.attrs["data"]) == ("literal", (0.0, 1.0, 2.0, 3.0, 4.0, 5.0))
    assert buffer.op == "buffer"
    assert torch.equal(result.constants[buffer.attrs["key"]], large)


def test_a_length_that_was_baked_in_is_refused() -> None:
    toy = Toy(lambda x, w, p: x + w[:13])
    with pytest.raises(RefusedArchitecture, match="only at the length that was traced"):
        import_program(exported(toy, Dim.STATIC), toy, "toy")


def test_a_size_that_is_not_affine_is_refused() -> None:
    toy = Toy(lambda x, w, p: x.new_zeros(x.shape[1] * x.shape[1], 2) + x.sum())
    with pytest.raises(RefusedArchitecture, match="not affine in the number of tokens"):
        import_program(exported(toy), toy, "toy")
