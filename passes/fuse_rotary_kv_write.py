"""The rotation of q and k and the write of K and V become one op: k never goes through memory."""

from __future__ import annotations

from octavo.ir.graph import Graph, Node
from octavo.passes.base import Report, register_pass


@register_pass("fuse-rotary-kv-write")
def fuse_rotary_kv_write(graph: Graph, report: Report) -> int:
    """Fuse ``rotary(q)``, ``rotary(k)`` and ``kv_write`` where they belong to one attention."""
    return sum(_fuse(graph, node, report) for node in graph.find("kv_write"))


def _fuse(graph: Graph, write: Node, report: Report) -> bool:
    turn_k = graph.producer(write.operand(1), "rotary")
    if turn_k is None:
        return report.missed(write, "its k is not rotated")
    if graph.sole_user(turn_k.output) is not write:
        return report.missed(write, "its rotated k has another reader")
    turn_q = _query_rotation(graph, write)
    if turn_q is None:
        return report.missed(write, "no single attention reads a rotated q beside it")
    if turn_q.inputs[1:] != turn_k.inputs[1:] or turn_q.attrs != turn_k.attrs:
        return report.missed(write, "q and k are rotated by different tables")
    if graph.nodes.index(turn_q) > graph.nodes.index(write):
        return report.missed(write, "q is rotated after k was written")
    fused = graph.insert_before(
        write,
        "rotary_kv_write",
        write.operand(0),
        turn_q.operand(0),
        turn_k.operand(0),
        write.operand(2),
        *turn_q.inputs[1:],
        *write.inputs[3:],
        slot=write.attrs["slot"],
        name=[turn_q.output.name, write.output.name],
        **turn_q.attrs,
    )
    fused.outputs[0].origin = turn_q.output.origin.merged(turn_k.output.origin)
    graph.replace_all([turn_q.output, write.output], fused.outputs)
    for node in (write, turn_k, turn_q):
        graph.erase(node)
    return True


def _query_rotation(graph: Graph, write: Node) -> Node | None:
    """The rotation whose result is the q of the one attention that reads this write."""
    readers = [
        node
        for node in graph.users(write.output)
        if node.op == "paged_attention" and node.attrs["slot"] == write.attrs["slot"]
    ]
    if len(readers) != 1:
        return None
    rotation = graph.producer(readers[0].operand(0), "rotary")
    if rotation is None or graph.sole_user(rotation.output) is not readers[0]:
        return None
    return rotation
