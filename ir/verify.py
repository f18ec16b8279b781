"""The rules that every graph keeps, at every stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from octavo.ir.errors import VerifyError
from octavo.ir.graph import Graph, Kind, Node, Value
from octavo.ir.ops import infer_types, op_def
from octavo.ir.types import KVType, QuantType


def verify(graph: Graph) -> None:
    """Raise VerifyError unless the graph keeps the rules of the IR.

    Every value has one definition, before its uses, under a name of its own; the weights region
    reads only weights; operands, attributes and result types are what the op declares; the KV state
    is a single thread, since its caches are changed in place.
    """
    defined: set[Value] = set()
    for value in graph.inputs:
        if isinstance(value.type, QuantType):
            raise VerifyError(f"{value}: a quantised matrix is a weight, not a parameter")
        _define(graph, value, None, Kind.INPUT, defined)
    for node in graph.weight_nodes:
        _check_node(graph, node, Kind.WEIGHT, defined)
    for node in graph.nodes:
        _check_node(graph, node, Kind.STEP, defined)
    for value in graph.outputs:
        if value not in defined:
            raise VerifyError(f"return: {value} is not defined in the graph; replace or restore it")
    if len(graph.named_values()) != len(defined):
        lost = [str(value) for value in graph.named_values() if value not in defined]
        raise VerifyError(f"{lost[0]}: its node is in no region; use Graph.erase to remove a node")
    _check_kv(graph)


def _define(
    graph: Graph, value: Value, producer: Node | None, kind: Kind, defined: set[Value]
) -> None:
    if value in defined:
        raise VerifyError(f"{value}: defined twice; a value has one definition")
    if not graph.has_value(str(value)) or graph.value(str(value)) is not value:
        raise VerifyError(f"{value}: another value has this name; use Graph.rename to name a value")
    if value.producer is not producer or value.kind is not kind:
        raise VerifyError(
            f"{value}: expected a value of kind {kind.value} made by {producer}, got one of kind "
            f"{value.kind.value} made by {value.producer}; add nodes through the graph's methods"
        )
    defined.add(value)


def _check_node(graph: Graph, node: Node, kind: Kind, defined: set[Value]) -> None:
    where = str(node.outputs[0]) if node.outputs else str(node)
    for value in node.operands:
        if kind is Kind.WEIGHT and not value.is_weight:
            raise VerifyError(
                f"{where}: a weight depends on the step's {value}; expected weights only"
            )
        if value not in defined:
            raise VerifyError(
                f"{where}: reads {value}, which is not defined before it; move one of the two"
            )
        if node not in graph.users(value):
            raise VerifyError(
                f"{where}: is no user of its operand {value}; change operands by Graph.set_inputs"
            )
    _check_declaration(node, where)
    for value in node.outputs:
        _define(graph, value, node, kind, defined)


def _check_declaration(node: Node, where: str) -> None:
    definition = op_def(node.op)
    try:
        definition.check_operands(node.inputs)
        complete = definition.complete(node.attrs)
        types = [value.type if value is not None else None for value in node.inputs]
        inferred = infer_types(node.op, types, node.attrs)
    except VerifyError as error:
        raise VerifyError(f"{where}: {error}") from None
    missing = [name for name in complete if name not in node.attrs]
    if missing:
        raise VerifyError(f"{where}: {node.op} lacks the attribute {missing[0]!r}; give it a value")
    actual = tuple(value.type for value in node.outputs)
    if actual != inferred:
        raise VerifyError(
            f"{where}: {node.op} gives {_listed(inferred)}, but its results are declared "
            f"{_listed(actual)}; make a new node where operand types change"
        )


def _listed(types: Iterable[object]) -> str:
    return ", ".join(map(str, types))


def _check_kv(graph: Graph) -> None:
    """Each KV value is written once, and read only before that."""
    overwritten: dict[Value, Node] = {}
    for node in graph.nodes:
        states = [value for value in node.operands if isinstance(value.type, KVType)]
        _check_fresh(str(node.outputs[0]), states, overwritten)
        if any(isinstance(value.type, KVType) for value in node.outputs):
            overwritten.update(dict.fromkeys(states, node))
    _check_fresh("return", graph.outputs, overwritten)


def _check_fresh(where: str, states: Sequence[Value], overwritten: dict[Value, Node]) -> None:
    for value in states:
        if value in overwritten:
            writer = overwritten[value]
            newer = next(v for v in writer.outputs if isinstance(v.type, KVType))
            raise VerifyError(
                f"{where}: reads the KV state {value}, which {writer.op} has overwritten in place; "
                f"read {newer} or a later state"
            )
