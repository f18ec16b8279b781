"""raise-linear: matrix products with a weight become ``linear``, biases and views included."""

from __future__ import annotations

from octavo.ir.graph import Graph, Node, Value
from octavo.passes.base import Report, register_pass

_PRODUCTS = ("matmul", "aten.mm.default", "aten.addmm.default", "aten.bmm.default")


@register_pass("raise-linear")
def raise_linear(graph: Graph, report: Report) -> int:
    """Turn products with a weight into linears, then take biases in and views out."""
    count = sum(_raise_product(graph, node, report) for node in graph.find(*_PRODUCTS))
    count += sum(_take_bias(graph, node, report) for node in graph.find("add"))
    count += sum(_drop_views(graph, node) for node in graph.find("linear"))
    return count


def _raise_product(graph: Graph, node: Node, report: Report) -> bool:
    bias, x, weight = _parts(node)
    if not (x.is_weight or weight.is_weight):
        # Of activations only: attention spelled out, or a router. It stays as it is.
        return False
    if x.is_weight:
        return report.missed(node, "the weight is the left operand")
    if weight.tensor.rank != 2:
        return report.missed(node, f"the weight {weight.type} is no matrix")
    if bias is not None and (not bias.is_weight or bias.shape != weight.shape[1:]):
        return report.missed(node, f"the addend {bias.type} is no bias")
    if node.attrs.get("alpha", 1) != 1 or node.attrs.get("beta", 1) != 1:
        return report.missed(node, "alpha or beta is not 1")
    operands = [x, _transposed(graph, weight), *([bias] if bias is not None else [])]
    linear = graph.insert_before(node, "linear", *operands)
    graph.replace_all(node.output, linear.output)
    return True


def _parts(node: Node) -> tuple[Value | None, Value, Value]:
    """The addend, the left and the right factor of a product."""
    if node.op == "aten.addmm.default":
        return node.operand(0), node.operand(1), node.operand(2)
    return None, node.operand(0), node.operand(1)


def _transposed(graph: Graph, weight: Value) -> Value:
    """The matrix ``[N, K]`` of a weight ``[K, N]``; a transpose that is already there is used."""
    if _is_transpose(weight.producer):
        assert weight.producer is not None
        return weight.producer.operand(0)
    for user in graph.users(weight):
        if user.is_weight and _is_transpose(user):
            return user.output
    return graph.constant("transpose", weight, dim0=0, dim1=1, origin=weight.origin)


def _is_transpose(node: Node | None) -> bool:
    if node is None or node.operands == [] or node.operand(0).tensor.rank != 2:
        return False
    if node.op == "transpose":
        return {node.attrs["dim0"] % 2, node.attrs["dim1"] % 2} == {0, 1}
    return node.op == "permute" and tuple(node.attrs["dims"]) == (1, 0)


def _take_bias(graph: Graph, add: Node, report: Report) -> bool:
    """Make the 1-D weight that is added to a linear its bias."""
    if len(add.operands) != 2:
        return False
    for product, bias in (add.operands, add.operands[::-1]):
        linear = graph.producer(product, "linear")
        if linear is not None and bias.is_weight:
            return _add_bias(graph, add, linear, bias, report)
    return False


def _add_bias(graph: Graph, add: Node, linear: Node, bias: Value, report: Report) -> bool:
    if len(linear.operands) == 3:
        return report.missed(add, "the linear has a bias already")
    if bias.shape != linear.output.shape[-1:]:
        return report.missed(add, f"the addend {bias.type} is no bias")
    if bias.dtype != linear.output.dtype:
        return report.missed(add, f"the addend is {bias.dtype}, the linear {linear.output.dtype}")
    if graph.sole_user(linear.output) is not add:
        return report.missed(add, "the product is also read without the bias")
    _stand_in(graph, add, linear, linear.operand(0), bias)
    return True


def _stand_in(graph: Graph, last: Node, linear: Node, x: Value, bias: Value | None) -> None:
    """Put a linear of other operands for the linear and the node after it, under the old name."""
    name = linear.output.name
    operands = [x, linear.operand(1), *([bias] if bias is not None else [])]
    direct = graph.insert_before(linear, "linear", *operands)
    graph.replace_all(last.output, direct.output)
    for dead in (last, linear):
        graph.erase(dead)
    graph.rename(direct.output, name)


def _drop_views(graph: Graph, linear: Node) -> bool:
    """Drop the views that only flatten the leading dims around a linear, as Conv1D has them."""
    before = graph.producer(linear.operand(0), "reshape")
    after = graph.sole_user(linear.output)
    if before is None or after is None or after.op != "reshape":
        return False
    x = before.operand(0)
    if after.output.shape != (*x.shape[:-1], linear.output.shape[-1]):
        return False
    if x.shape[-1] != linear.operand(0).shape[-1]:
        return False
    _stand_in(graph, after, linear, x, linear.operand(2) if len(linear.operands) == 3 else None)
    return True
