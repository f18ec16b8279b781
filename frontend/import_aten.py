"""From an exported ATen program to the first graph of the IR."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from octavo.frontend.aten_call import AtenCall
from octavo.frontend.aten_generic import import_generic
from octavo.frontend.aten_rules import RULES
from octavo.frontend.refused import RefusedArchitecture
from octavo.frontend.sizes import Sizes
from octavo.frontend.value_names import name_module_results, origin_of, strip_prefix
from octavo.frontend.weights import tied_names
from octavo.ir.errors import VerifyError
from octavo.ir.graph import Graph, Value
from octavo.ir.types import DTYPE_NAMES, TensorType

_LITERAL_ELEMENTS = 64  # what still reads well in the text


@dataclass
class ImportedProgram:
    """A graph, the tensors of its ``buffer`` nodes that the export made, and what was counted."""

    graph: Graph
    attention_calls: int = 0
    constants: dict[str, Tensor] = field(default_factory=dict)


def import_program(program: ExportedProgram, model: Any, name: str) -> ImportedProgram:
    """Translate a program of ``(ids[1, T], positions[1, T]) -> logits``.

    Parameters become ``checkpoint``, buffers and constants ``buffer`` or, up to 64 elements,
    ``literal``. Raises RefusedArchitecture for what the IR cannot say.
    """
    importer = _Importer(program, model, name)
    importer.run()
    return importer.result


class _Importer:
    def __init__(self, program: ExportedProgram, model: Any, name: str) -> None:
        self.program = program
        self.prefix = f"{model.base_model_prefix}." if model.base_model_prefix else ""
        self.graph = Graph(name)
        self.result = ImportedProgram(self.graph)
        self.ties = tied_names(model)
        self.values: dict[fx.Node, Any] = {}
        self.specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        inputs = [node for node in program.graph.nodes if self._kind(node) is InputKind.USER_INPUT]
        if len(inputs) != 2:
            raise RefusedArchitecture(f"the traced program takes {len(inputs)} inputs, not 2")
        self.sizes = Sizes([node.meta["val"] for node in inputs])
        for node, input_name in zip(inputs, ("ids", "positions"), strict=True):
            if not any(isinstance(size, torch.SymInt) for size in node.meta["val"].shape):
                raise RefusedArchitecture("it runs only at the length that was traced")
            self.values[node] = self.graph.add_input(input_name, self.sizes.type(node.meta["val"]))

    def _kind(self, node: fx.Node) -> InputKind | None:
        return self.specs[node.name].kind if node.op == "placeholder" else None

    def run(self) -> None:
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self._import_call(node)
            elif node.op == "output":
                self._finish(node)

    def _import_call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = cast(tuple[fx.Node, int], node.args)
            self.values[node] = self.values[source][index]
            return
        if not _makes_tensors(node):
            return  # sizes are read off their symbolic values where they are used
        if not isinstance(node.target, torch._ops.OpOverload):
            raise RefusedArchitecture(f"unknown operation {node.target}")
        call = AtenCall(self.graph, node, self.value_of, self.sizes, origin_of(node), self.prefix)
        self.values[node] = self._translate(call)

    def _translate(self, call: AtenCall) -> Value | Sequence[Value]:
        rule = RULES.get(str(call.node.target))
        if rule is not None:
            try:
                result = rule(call)
            except VerifyError as error:
                if not str(call.node.target).startswith("aten."):
                    raise RefusedArchitecture(str(error)) from error
                result = None  # the op means less than ATen's: PyTorch runs this one
            if result is not None and call.fits(result):
                return result
        result = import_generic(call)
        if not call.fits(result):
            raise RefusedArchitecture(
                f"{call.node.target} gives {result}, the trace says otherwise"
            )
        return result

    def value_of(self, node: fx.Node) -> Value:
        """The value of an fx node; parameters and constants are made at their first use."""
        if node not in self.values:
            self.values[node] = self._weight(node, self.specs[node.name])
        value = self.values[node]
        assert isinstance(value, Value), f"{node} has several results"
        return value

    def _weight(self, node: fx.Node, spec: InputSpec) -> Value:
        target = spec.target or node.name
        key = target.removeprefix("model.")  # the wrapper's attribute
        key = self.ties.get(key, key)
        name = strip_prefix(key, self.prefix)
        tensor_type = self.sizes.type(node.meta["val"])
        if spec.kind is InputKind.PARAMETER or (spec.kind is InputKind.BUFFER and spec.persistent):
            return self.graph.constant("checkpoint", name=name, key=key, type=tensor_type)
        tensor = self.program.constants.get(target)
        if tensor is None:
            raise RefusedArchitecture(f"the constant {target} has no value")
        if tensor.numel() <= _LITERAL_ELEMENTS and not tensor.is_complex():
            return self._literal(name, tensor.detach())
        if spec.kind is not InputKind.BUFFER:
            self.result.constants[key] = tensor.detach().clone()
        return self.graph.constant("buffer", name=name, key=key, type=tensor_type)

    def _literal(self, name: str, tensor: Tensor) -> Value:
        literal_type = TensorType(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        return self.graph.constant("literal", name=name, data=tensor.tolist(), type=literal_type)

    def _finish(self, node: fx.Node) -> None:
        (results,) = cast(tuple[tuple[fx.Node, ...]], node.args)
        if len(results) != 1:
            raise RefusedArchitecture("the traced program changes its own state")
        self.graph.outputs = [self.value_of(results[0])]
        self.graph.sweep()
        self.result.attention_calls = len(self.graph.find("attention"))
        name_module_results(self.graph, self.prefix)
        self.graph.rename(self.graph.outputs[0], "logits")


def _makes_tensors(node: fx.Node) -> bool:
    value = node.meta.get("val")
    items = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(item, Tensor) for item in items)
