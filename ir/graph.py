"""The graph: SSA values, nodes, and the few edits that passes are made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from octavo.ir.types import QuantType, TensorType, Type

if TYPE_CHECKING:
    import networkx

Attr = Any  # int | float | bool | str | None, or a (nested) tuple of those


@dataclass(frozen=True)
class Origin:
    """Where a value came from.

    ``module`` is the Hugging Face module path (``model.layers.3.mlp``), ``source`` its line
    (``modeling_llama.py:174``), ``values`` the names of the previous stage's values.
    """

    module: str | None = None
    source: str | None = None
    values: tuple[str, ...] = ()

    def merged(self, *others: Origin) -> Origin:
        """This origin, extended by the values of the others; a module it lacks comes from them."""
        names = dict.fromkeys([*self.values, *(n for other in others for n in other.values)])
        placed = next((origin for origin in (self, *others) if origin.module), self)
        return replace(placed, values=tuple(names))


class Kind(Enum):
    """How a value is made: a parameter of the graph, a node of the step, or a weight."""

    INPUT = "input"
    STEP = "step"
    WEIGHT = "weight"


class Value:
    """One SSA value. Two values are equal only when they are the same object."""

    __slots__ = ("kind", "name", "origin", "producer", "type")

    def __init__(
        self, name: str, value_type: Type, kind: Kind, producer: Node | None, origin: Origin
    ) -> None:
        self.name = name
        self.type = value_type
        self.kind = kind
        self.producer = producer
        self.origin = origin

    def __str__(self) -> str:
        return ("@" if self.kind is Kind.WEIGHT else "%") + self.name

    __repr__ = __str__

    @property
    def is_weight(self) -> bool:
        """True when the value depends on nothing but constants."""
        return self.kind is Kind.WEIGHT

    @property
    def tensor(self) -> TensorType:
        """The type, where it has to be a tensor's."""
        assert isinstance(self.type, TensorType), f"{self} is a {self.type}, not a tensor"
        return self.type

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape, ints and SymDims."""
        return self.type.shape if isinstance(self.type, QuantType) else self.tensor.shape

    @property
    def dtype(self) -> str:
        """The dtype's name in the IR; the scheme of a quantised matrix."""
        return self.type.dtype


class Node:
    """One application of an op. ``inputs`` holds None for an optional operand that is absent."""

    __slots__ = ("attrs", "inputs", "op", "outputs")

    def __init__(self, op: str, inputs: Sequence[Value | None], attrs: dict[str, Attr]) -> None:
        self.op = op
        self.inputs: list[Value | None] = list(inputs)
        self.attrs = attrs
        self.outputs: list[Value] = []

    @property
    def output(self) -> Value:
        """The only result."""
        assert len(self.outputs) == 1, f"{self.op} has {len(self.outputs)} results"
        return self.outputs[0]

    @property
    def is_weight(self) -> bool:
        """True for a node of the weights region."""
        return self.outputs[0].kind is Kind.WEIGHT

    @property
    def operands(self) -> list[Value]:
        """The operands that are there."""
        return [value for value in self.inputs if value is not None]

    def operand(self, index: int) -> Value:
        """An operand that has to be there."""
        value = self.inputs[index]
        assert value is not None, f"{self} has no operand {index}"
        return value

    def __str__(self) -> str:
        results = ", ".join(map(str, self.outputs))
        return f"{results} = {self.op}({', '.join(map(str, self.inputs))})"

    __repr__ = __str__


class Graph:
    """A step: parameters, a region of weights, nodes in order, results.

    All edits keep order and the use lists right; types are inferred, names are made unique.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.inputs: list[Value] = []
        self.weight_nodes: list[Node] = []
        self.nodes: list[Node] = []
        self.outputs: list[Value] = []
        self._names: dict[str, Value] = {}
        self._suffix: dict[str, int] = {}
        self._users: dict[Value, dict[Node, None]] = {}

    # Reading

    def find(self, *ops: str) -> list[Node]:
        """The step's nodes with one of these ops, in order; a snapshot, safe to edit under."""
        return [node for node in self.nodes if node.op in ops]

    def producer(self, value: Value | None, *ops: str) -> Node | None:
        """The node that makes a value, or None for a parameter or when it is none of ``ops``."""
        node = value.producer if value is not None else None
        return node if node is not None and (not ops or node.op in ops) else None

    def users(self, value: Value) -> list[Node]:
        """The nodes of both regions that read a value, each once."""
        return list(self._users.get(value, ()))

    def sole_user(self, value: Value) -> Node | None:
        """The one node that reads a value, or None when there are more, none, or it is a result."""
        users = self.users(value)
        return users[0] if len(users) == 1 and value not in self.outputs else None

    def value(self, name: str) -> Value:
        """Look a value up by its printed name (``%x`` or ``@w``). Raises KeyError."""
        return self._names[name]

    def has_value(self, name: str) -> bool:
        """True when a printed name (``%x`` or ``@w``) is taken."""
        return name in self._names

    def named_values(self) -> list[Value]:
        """All values of the graph, as its register of names holds them."""
        return list(self._names.values())

    def all_nodes(self) -> Iterator[Node]:
        """The weights region, then the step."""
        yield from self.weight_nodes
        yield from self.nodes

    @property
    def weights(self) -> list[Value]:
        """All values of the weights region, in order."""
        return [value for node in self.weight_nodes for value in node.outputs]

    def used_weights(self) -> list[Value]:
        """The weights that the step itself reads, in order of first use: what is stored."""
        read = (value for node in self.nodes for value in node.operands if value.is_weight)
        results = (value for value in self.outputs if value.is_weight)
        return list(dict.fromkeys([*read, *results]))

    # Building

    def add_input(self, name: str, value_type: Type, origin: Origin | None = None) -> Value:
        """Add a parameter."""
        value = self._new_value(name, value_type, Kind.INPUT, None, origin or Origin())
        self.inputs.append(value)
        return value

    def append(self, op: str, /, *inputs: Value | None, **options: Any) -> Node:
        """Add a node at the end of the step. See ``insert_before`` for the options."""
        node = self._make(op, inputs, Kind.STEP, options)
        self.nodes.append(node)
        return node

    def insert_before(
        self, anchor: Node, op: str, /, *inputs: Value | None, **options: Any
    ) -> Node:
        """Add a node before another of the same region.

        Keywords are the op's attributes, besides ``name`` (a string, or one a result; default: the
        anchor's first result's) and ``origin`` (default: the anchor's).
        """
        options.setdefault("name", anchor.outputs[0].name)
        options.setdefault("origin", anchor.outputs[0].origin)
        node = self._make(op, inputs, anchor.outputs[0].kind, options)
        region = self.weight_nodes if anchor.is_weight else self.nodes
        region.insert(region.index(anchor), node)
        return node

    def insert_after(self, anchor: Node, op: str, /, *inputs: Value | None, **options: Any) -> Node:
        """Add a node after another of the same region; keywords as in ``insert_before``."""
        node = self.insert_before(anchor, op, *inputs, **options)
        region = self.weight_nodes if anchor.is_weight else self.nodes
        region.remove(node)
        region.insert(region.index(anchor) + 1, node)
        return node

    def append_weight(self, op: str, /, *inputs: Value | None, **options: Any) -> Node:
        """Add a node at the end of the weights region; operands must be weights."""
        assert all(v is None or v.is_weight for v in inputs), f"{op}: an operand is no weight"
        options.setdefault("name", inputs[0].name if inputs and inputs[0] else op)
        node = self._make(op, inputs, Kind.WEIGHT, options)
        self.weight_nodes.append(node)
        return node

    def constant(self, op: str, /, *inputs: Value | None, **options: Any) -> Value:
        """Add a node to the weights region and return its only result; operands must be weights."""
        return self.append_weight(op, *inputs, **options).output

    # Editing

    def replace_all(self, olds: Value | Sequence[Value], news: Value | Sequence[Value]) -> None:
        """Make every reader of each old value read the new one, results of the graph included.

        Only the node that makes the new value keeps reading the old one. A new value that was named
        after the old one takes over its name, so that names stay the same through the passes; its
        origin takes in the old one's values. The old producers stay until they are erased or swept.
        """
        olds = [olds] if isinstance(olds, Value) else olds
        news = [news] if isinstance(news, Value) else news
        assert len(olds) == len(news), "as many new values as old ones"
        for old, new in zip(olds, news, strict=True):
            # The new value may itself be made from the old one, as in a cast of it.
            readers = [user for user in self.users(old) if user is not new.producer]
            self.replace_uses(old, new, readers)
            self.outputs = [new if value is old else value for value in self.outputs]
            if new.kind is not Kind.INPUT:
                new.origin = new.origin.merged(old.origin)
            # An older value of the stem keeps its own name: it has the lower suffix.
            if new.kind is old.kind and _stem(new.name) == _stem(old.name):
                if _suffix(new.name) > _suffix(old.name):
                    self._swap_names(old, new)

    def replace_uses(self, old: Value, new: Value, users: Iterable[Node]) -> None:
        """Make just these nodes read ``new`` where they read ``old``."""
        if old is new:
            return
        for user in list(users):
            self.set_inputs(user, [new if value is old else value for value in user.inputs])

    def set_inputs(self, node: Node, inputs: Sequence[Value | None]) -> None:
        """Give a node other operands. Its result types stay: the verifier checks them."""
        for value in node.operands:
            self._users[value].pop(node, None)
        node.inputs = list(inputs)
        for value in node.operands:
            self._users.setdefault(value, {})[node] = None

    def erase(self, node: Node) -> None:
        """Remove a node whose results nobody reads."""
        for value in node.outputs:
            assert not self._users.get(value), f"{value} is still read by {self.users(value)}"
            assert value not in self.outputs, f"{value} is a result of the graph"
            del self._names[str(value)]
        for value in node.operands:
            self._users[value].pop(node, None)
        (self.weight_nodes if node.is_weight else self.nodes).remove(node)

    def sweep(self) -> int:
        """Erase every node of both regions that no result depends on; returns how many."""
        live: set[Node] = set()
        pending = [value.producer for value in self.outputs if value.producer]
        while pending:
            node = pending.pop()
            if node not in live:
                live.add(node)
                pending.extend(value.producer for value in node.operands if value.producer)
        dead = [node for node in self.all_nodes() if node not in live]
        for node in dead:
            for value in node.operands:
                self._users[value].pop(node, None)
            for value in node.outputs:
                del self._names[str(value)]
        self.weight_nodes = [node for node in self.weight_nodes if node in live]
        self.nodes = [node for node in self.nodes if node in live]
        return len(dead)

    def rename(self, value: Value, name: str) -> None:
        """Give a value another name, made unique if it is taken."""
        if value.name == name:
            return
        del self._names[str(value)]
        value.name = self._unique(name, value.kind)
        self._names[str(value)] = value

    def to_networkx(self) -> networkx.DiGraph:
        """A view for analyses: nodes are Node and Value objects, edges follow the data.

        Node attributes: ``op`` for nodes, ``type`` for values; operand edges carry ``index``.
        """
        import networkx

        view = networkx.DiGraph(name=self.name)
        view.add_nodes_from((value, {"type": str(value.type)}) for value in self.inputs)
        for node in self.all_nodes():
            view.add_node(node, op=node.op, weight=node.is_weight)
            for index, operand in enumerate(node.inputs):
                if operand is not None:
                    view.add_edge(operand, node, index=index)
            for value in node.outputs:
                view.add_node(value, type=str(value.type))
                view.add_edge(node, value)
        return view

    # Inside

    def _make(
        self, op: str, inputs: Sequence[Value | None], kind: Kind, options: dict[str, Any]
    ) -> Node:
        from octavo.ir.ops import infer_types, op_def

        names = options.pop("name", None) or op.split(".")[-1]
        origin = options.pop("origin", None) or Origin()
        attrs = op_def(op).complete(options)
        types = infer_types(op, [v.type if v is not None else None for v in inputs], attrs)
        return self._link(op, inputs, attrs, types, kind, names, origin)

    def _link(
        self,
        op: str,
        inputs: Sequence[Value | None],
        attrs: dict[str, Attr],
        types: Sequence[Type],
        kind: Kind,
        names: str | Sequence[str],
        origin: Origin,
    ) -> Node:
        node = Node(op, inputs, attrs)
        names = [names] * len(types) if isinstance(names, str) else names
        assert len(names) == len(types), f"{op}: {len(types)} results, {len(names)} names"
        node.outputs = [
            self._new_value(name, value_type, kind, node, origin)
            for name, value_type in zip(names, types, strict=True)
        ]
        for value in node.operands:
            self._users.setdefault(value, {})[node] = None
        return node

    def _new_value(
        self, name: str, value_type: Type, kind: Kind, producer: Node | None, origin: Origin
    ) -> Value:
        value = Value(self._unique(name, kind), value_type, kind, producer, origin)
        self._names[str(value)] = value
        return value

    def _swap_names(self, one: Value, other: Value) -> None:
        one.name, other.name = other.name, one.name
        self._names[str(one)] = one
        self._names[str(other)] = other

    def _unique(self, name: str, kind: Kind) -> str:
        sigil = "@" if kind is Kind.WEIGHT else "%"
        name = re.sub(r"[^\w.~]", "_", name)
        if sigil + name not in self._names:
            return name
        stem = _stem(name)
        count = self._suffix.get(sigil + stem, 1)
        while f"{sigil}{stem}~{count}" in self._names:
            count += 1
        self._suffix[sigil + stem] = count + 1
        return f"{stem}~{count}"


def _stem(name: str) -> str:
    """A name without the suffix that made it unique."""
    return re.sub(r"~\d+$", "", name)


def _suffix(name: str) -> int:
    """The number that made a name unique, 0 where it has none."""
    found = re.search(r"~(\d+)$", name)
    return int(found.group(1)) if found else 0
