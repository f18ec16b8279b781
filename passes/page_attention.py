"""Attention over whole sequences becomes attention on the paged KV cache (Kwon et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.ir.graph import Graph, Node, Value
from octavo.ir.kv_scheme import KVScheme
from octavo.ir.types import KVType, SlotShape, SymDim, TensorType
from octavo.passes.base import Report, register_pass
from octavo.passes.block_groups import Span, group_slots

_T, _S, _B = SymDim("T"), SymDim("S"), SymDim("B")
STEP_INPUTS = {
    "slot_mapping": TensorType("i64", (_T,)),
    "block_table": TensorType("i32", (_S, _B)),
    "query_start": TensorType("i32", (SymDim("S", 1, 1),)),
    "seq_lens": TensorType("i32", (_S,)),
}
# With several block groups these have a row for each.
GROUPED_INPUTS = ("slot_mapping", "block_table")
KV_SCALES = ("k_scale", "v_scale")  # buffers of the module that attends, as checkpoints name them
K_OFFSET = "k_offset"


@register_pass("page-attention")
def page_attention(graph: Graph, report: Report) -> int:
    """Write each attention's K and V into a slot of the cache and read them through block tables.

    Slots are numbered in the order of the calls, since some models call a layer many times and some
    attend twice in a layer. Calls with the very same K and V share a slot, and it is written once.
    Slots that see different parts of the context have block tables of their own.
    Where the cache holds codes with scales of heads, these are weights named after the module;
    offsets of keys are named after the call.
    """
    calls = graph.find("attention")
    if not calls or not all([_is_pageable(node, report) for node in calls]):
        return 0
    pairs = list(dict.fromkeys((node.operand(1), node.operand(2)) for node in calls))
    kv_type = _kv_type(pairs, report.context.kv_scheme)
    groups = _groups(calls, pairs, kv_type, report)
    steps = _step_inputs(graph, 1 + max(groups))
    kv = graph.add_input("kv", kv_type)
    scales: dict[int, list[Value]] = {}
    for node in calls:
        slot = _slot_of(node, pairs)
        step = steps[groups[slot]]
        if slot not in scales:
            scales[slot] = _scales(graph, node, kv_type.slots[slot], report)
            readers = [call for call in calls if _slot_of(call, pairs) == slot]
            offset = _offset(graph, readers, kv_type.slots[slot], report)
            kv = _write(graph, node, kv, step["slot_mapping"], slot, (scales[slot], offset))
        _read(graph, node, kv, step, slot, scales[slot])
    graph.outputs.append(kv)
    return len(calls)


def _slot_of(node: Node, pairs: Sequence[tuple[Value, Value]]) -> int:
    return pairs.index((node.operand(1), node.operand(2)))


def _groups(
    calls: Sequence[Node], pairs: Sequence[tuple[Value, Value]], kv: KVType, report: Report
) -> list[int]:
    """The block group of each slot."""
    readers: list[set[Span]] = [set() for _ in pairs]
    for node in calls:
        slot = _slot_of(node, pairs)
        readers[slot].add(_span(node, report.context.max_position))
    spans = [found.pop() if len(found) == 1 else Span() for found in readers]
    sizes = {(s.num_kv_heads * s.head_dim, s.num_kv_heads * s.v_head_dim) for s in kv.slots}
    if len(sizes) > 1 and len(set(spans)) > 1:
        report.missed(calls[0], "slots of different sizes have one block table, with no window")
        return [0] * len(pairs)
    return group_slots(spans)


def _span(node: Node, max_position: int) -> Span:
    """What an attention sees; a window that is never left is all of the context."""
    window, chunk = (
        length if length is not None and length < max_position else None
        for length in (node.attrs["window"], node.attrs["chunk"])
    )
    return Span(window, chunk)


def _step_inputs(graph: Graph, num_groups: int) -> list[dict[str, Value]]:
    """The step's inputs as each group sees them: the grouped ones have one row for each group."""
    types = dict(STEP_INPUTS)
    if num_groups > 1:
        for name in GROUPED_INPUTS:
            types[name] = types[name].with_shape(num_groups, *types[name].shape)
    step = {name: graph.add_input(name, tensor) for name, tensor in types.items()}
    if num_groups == 1:
        return [step]
    first = graph.nodes[0]
    return [
        step
        | {
            name: graph.insert_before(
                first,
                "select",
                step[name],
                dim=0,
                index=group,
                name=f"{name}_{group}",
                origin=step[name].origin,
            ).output
            for name in GROUPED_INPUTS
        }
        for group in range(num_groups)
    ]


def _is_pageable(node: Node, report: Report) -> bool:
    if not node.attrs["causal"]:
        return report.missed(node, "it is not causal: later tokens would change what is cached")
    if len(node.inputs) > 4 and node.inputs[4] is not None:
        return report.missed(node, "it adds a bias of its own to the scores")
    if node.operand(0).shape[0] != 1:
        return report.missed(node, f"its batch dim is {node.operand(0).shape[0]}, not 1")
    return True


def _kv_type(pairs: list[tuple[Value, Value]], scheme: KVScheme | None) -> KVType:
    slots = tuple(_slot_shape(k, v) for k, v in pairs)
    if scheme is None:
        return KVType(pairs[0][0].dtype, slots)
    return KVType(scheme.codes, slots, scheme.scales)


def _scales(graph: Graph, node: Node, slot: SlotShape, report: Report) -> list[Value]:
    """The scales of the heads of k and v as weights; none where they are ones or the tokens'."""
    if not report.context.has_kv_scales:
        return []
    module = node.output.origin.module or node.output.name
    scales = TensorType("f32", (slot.num_kv_heads,))
    return [
        graph.append_weight(
            "buffer", key=f"{module}.{name}", type=scales, name=f"{node.output.name}.{name}"
        ).output
        for name in KV_SCALES
    ]


def _offset(graph: Graph, readers: Sequence[Node], slot: SlotShape, report: Report) -> Value | None:
    """The offset of a slot's keys as a weight; none where scores are not just compared."""
    if not report.context.has_kv_offsets:
        return None
    for node in readers:
        reason = _why_not_offset(node)
        if reason is not None:
            report.missed(node, f"its keys have no offset: {reason}")
            return None
    offsets = TensorType("f32", (slot.num_kv_heads, slot.head_dim))
    # By the call and not by the module: one that is called twice has keys of two kinds.
    key = f"{readers[0].output.name}.{K_OFFSET}"
    return graph.append_weight("buffer", key=key, type=offsets, name=key).output


def _why_not_offset(node: Node) -> str | None:
    if node.attrs["softcap"] is not None:
        return "a softcap bends scores, so that one number added to all does not cancel"
    if len(node.inputs) > 3 and node.inputs[3] is not None:
        return "a sink is compared with scores, so that a number added to these does not cancel"
    return None


def _slot_shape(k: Value, v: Value) -> SlotShape:
    return SlotShape(k.shape[1], k.shape[3], v.shape[3])


def _write(
    graph: Graph,
    node: Node,
    kv: Value,
    slot_mapping: Value,
    slot: int,
    codes: tuple[list[Value], Value | None],
) -> Value:
    """``codes`` are the scales of heads and the offset of keys."""
    k, v = (_tokens_first(graph, node, node.operand(index)) for index in (1, 2))
    name = f"{node.output.name}.kv"
    scales, offset = codes
    operands: list[Value | None] = [kv, k, v, slot_mapping, *scales]
    if offset is not None:
        operands += [*([] if scales else [None, None]), offset]
    return graph.insert_before(node, "kv_write", *operands, slot=slot, name=name).output


def _read(
    graph: Graph,
    node: Node,
    kv: Value,
    step: dict[str, Value],
    slot: int,
    scales: list[Value],
) -> None:
    q = _tokens_first(graph, node, node.operand(0))
    sinks = node.inputs[3] if len(node.inputs) > 3 else None
    kept = {name: node.attrs[name] for name in ("scale", "window", "chunk", "softcap")}
    tables = (step["block_table"], step["query_start"], step["seq_lens"])
    operands = (q, kv, *tables, sinks, *scales)
    paged = graph.insert_before(node, "paged_attention", *operands, slot=slot, **kept)
    name = node.output.name
    batched = graph.insert_before(node, "unsqueeze", paged.output, dim=0, name=f"{name}.batched")
    graph.replace_all(node.output, batched.output)
    graph.erase(node)
    graph.rename(paged.output, name)


def _tokens_first(graph: Graph, anchor: Node, x: Value) -> Value:
    """``[1, H, T, D]`` to ``[T, H, D]``; the transpose cancels with the one that made it."""
    flat = graph.insert_before(anchor, "squeeze", x, dim=0, name=x.name, origin=x.origin).output
    return graph.insert_before(
        anchor, "transpose", flat, dim0=0, dim1=1, name=x.name, origin=x.origin
    ).output
