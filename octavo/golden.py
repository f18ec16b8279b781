"""The answers that an artifact carries to prove itself by, tests/golden.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from octavo.codegen.generate import STEP_INPUTS
from octavo.codegen.quant_layouts import find_layout
from octavo.frontend.check_trace import NUM_TOP, TraceCheck
from octavo.ir.graph import Graph, Node, Value
from octavo.ir.interpret import interpret
from octavo.ir.ops.paged import KVState
from octavo.ir.parser import parse_graph
from octavo.ir.printer import print_graph
from octavo.ir.quant_tensor import QuantTensor
from octavo.ir.types import KVType, QuantType
from octavo.ir.weight_cache import WeightCache
from octavo.passes.fused_linear import LINEARS
from octavo.runtime.self_check import golden_batch
from octavo.runtime.window_logits import BLOCK_SIZE


def golden_json(check: TraceCheck) -> str:
    """What Hugging Face said, and how near the program has to be."""
    # Logits that are each off by d give log-probabilities that are off by up to 2 d.
    return _text("Hugging Face", 2 * check.bound.largest, _cases(check))


def quantized_golden_json(
    check: TraceCheck, graph: Graph, weights: Mapping[str, Tensor], layouts: Mapping[Value, str]
) -> str:
    """What the final graph of a quantised model says, by the interpreter.

    ``weights`` are those of the artifact. A kernel may round what a scheme lets it round, so the
    program may be as far from this as the graph is from Hugging Face with whole weights, and three
    times as far as it is from itself with x, scales and products rounded, besides what the dtype
    allows.
    """
    cases = _cases(check)
    whole = torch.stack([logits[-1] for logits in check.logits]).float().log_softmax(-1)
    logprobs = _logits(graph, cases, StoredWeights(graph, weights, layouts)).log_softmax(-1)
    top = logprobs.topk(min(NUM_TOP, logprobs.shape[-1]), dim=-1)
    loss = float((logprobs - whole).abs().gather(1, top.indices).max())
    copy, same = _rounding(graph, layouts)
    rounded = _logits(copy, cases, _NarrowScales(copy, weights, same)).log_softmax(-1)
    # Of all ids, not the few likeliest: the largest of few numbers is a matter of luck.
    loss += 3 * float((logprobs - rounded).abs().max())
    for case, ids, values in zip(cases, top.indices, top.values, strict=True):
        case |= {"top_ids": ids.tolist(), "top_logprobs": values.tolist()}
    return _text("the quantised graph", 2 * check.bound.largest + loss, cases)


class StoredWeights(WeightCache):
    """The weights that a step reads, out of an artifact."""

    def __init__(
        self, graph: Graph, stored: Mapping[str, Tensor], layouts: Mapping[Value, str]
    ) -> None:
        super().__init__(graph, _Nothing())
        self._stored = stored
        self._layouts = layouts

    def get(self, value: Value) -> Tensor | QuantTensor:
        """The tensor or quantised matrix of a weight."""
        if not isinstance(value.type, QuantType):
            return self._stored[value.name]
        layout = find_layout(self._layouts[value])
        parts = {
            part: self._stored[f"{value.name}.{part}"] for part in layout.part_types(value.type)
        }
        return layout.unpack(parts, value.type)


class _NarrowScales(StoredWeights):
    """With scales and offsets in bf16, as kernels that multiply in it have them."""

    def get(self, value: Value) -> Tensor | QuantTensor:
        found = super().get(value)
        if not isinstance(found, QuantTensor) or found.scales.dtype.itemsize == 1:
            return found
        offsets = found.offsets
        return replace(
            found,
            scales=found.scales.bfloat16().to(found.scales.dtype),
            offsets=None if offsets is None else offsets.bfloat16().to(offsets.dtype),
        )


class _Nothing:
    """A source that holds no weights."""

    def load(self, key: str) -> Tensor:
        raise KeyError(key)

    def buffer(self, key: str) -> Tensor:
        raise KeyError(key)

    def load_quantized(self, key: str) -> QuantTensor:
        raise KeyError(key)


def _rounding(graph: Graph, layouts: Mapping[Value, str]) -> tuple[Graph, dict[Value, str]]:
    """A copy in which quantised linears read and give the narrowest types that a kernel has.

    They read 8 bits where the scheme permits them, else bf16, and give bf16; a float of 8 bits
    rounds most numbers no less than an i8 with a scale does.
    """
    copy = parse_graph(print_graph(graph, origins=False))
    for node in copy.find(*LINEARS):
        weight, x = node.operand(1).type, node.operand(0)
        if isinstance(weight, QuantType):
            narrow = copy.insert_before(
                node, "cast", x, dtype="f8e4m3" if weight.scheme.x else "bf16"
            )
            wide = copy.insert_before(node, "cast", narrow.output, dtype=x.dtype)
            copy.set_inputs(node, [wide.output, *node.inputs[1:]])
            _round_result(copy, node)
    return copy, {copy.value(str(value)): layout for value, layout in layouts.items()}


def _round_result(graph: Graph, linear: Node) -> None:
    y = linear.outputs[0]  # besides it there may be its sums of squares
    narrow = graph.insert_after(linear, "cast", y, dtype="bf16")
    wide = graph.insert_after(narrow, "cast", narrow.output, dtype=y.dtype).output
    graph.replace_uses(y, wide, [user for user in graph.users(y) if user is not narrow])
    graph.outputs = [wide if value is y else value for value in graph.outputs]


def _logits(graph: Graph, cases: list[dict[str, Any]], weights: WeightCache) -> Tensor:
    """Logits ``f32[cases, vocab]`` after the last token of each."""
    tables = next(value.tensor for value in graph.inputs if value.name == "block_table")
    num_groups = tables.shape[0] if tables.rank == 3 else 1
    assert isinstance(num_groups, int), "block groups are counted when the model is compiled"
    batch = golden_batch(cases, num_groups)
    given: dict[str, Any] = dict(
        zip(STEP_INPUTS, batch.to_tensors(torch.device("cpu")), strict=True)
    )
    for value in graph.inputs:
        if isinstance(value.type, KVType):
            num_blocks = int(batch.block_table.max()) + 1
            given[value.name] = KVState.empty(value.type, num_blocks, BLOCK_SIZE)
    inputs = {value.name: given[value.name] for value in graph.inputs}
    logits = interpret(graph, inputs, weights)[0]
    assert isinstance(logits, Tensor), "a step gives logits first"
    return logits.float()


def _cases(check: TraceCheck) -> list[dict[str, Any]]:
    return [
        {
            "ids": row.ids,
            "first_position": row.first_position,
            "top_ids": row.top_ids,
            "top_logprobs": row.top_logprobs,
        }
        for row in check.rows
    ]


def _text(reference: str, tolerance: float, cases: list[dict[str, Any]]) -> str:
    body = {"reference": reference, "tolerance": tolerance, "cases": cases}
    return json.dumps(body, indent=1) + "\n"
