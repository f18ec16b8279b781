"""From a Hugging Face config to the first graph: build without weights, export, import."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from octavo.frontend.attention_hook import IMPLEMENTATION, attention_hooks
from octavo.frontend.check_config import check_config
from octavo.frontend.import_aten import import_program
from octavo.frontend.mask_probe import MaskDescription
from octavo.frontend.meta_model import build_model, computed_buffers, parameters_on_cpu
from octavo.frontend.positions import bound_positions
from octavo.frontend.refused import RefusedArchitecture, gist, refusing
from octavo.frontend.weights import QuantizedWeights, WeightSource
from octavo.ir.graph import Graph
from octavo.ir.quant_tensor import QuantTensor

_LENGTHS = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)


@dataclass(frozen=True)
class Imported:
    """A traced model.

    ``graph`` takes ``ids: i64[1, T]`` and ``positions: i64[1, T]``, returns logits ``[1, T, V]``.
    ``model`` is the Hugging Face model with its parameters on the meta device; ``buffers`` are the
    tensors behind ``buffer(key=)``; positions run from 0 to ``max_position - 1``. ``notices`` are
    lines for the user.
    """

    graph: Graph
    model: Any
    buffers: dict[str, Tensor]
    max_position: int
    attention_calls: int
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class BoundWeights:
    """The weights of an imported graph: a checkpoint's tensors and the model's own buffers."""

    source: WeightSource
    buffers: dict[str, Tensor]
    quantized: QuantizedWeights | None = None

    def load(self, key: str) -> Tensor:
        """A tensor of the checkpoint."""
        return self.source.load(key)

    def buffer(self, key: str) -> Tensor:
        """A buffer that the model computed when it was built."""
        return self.buffers[key]

    def load_quantized(self, key: str) -> QuantTensor:
        """A matrix that the checkpoint holds quantised. Raises KeyError where there is none."""
        if self.quantized is None:
            raise KeyError(key)
        return self.quantized.load_quantized(key)


class _Step(nn.Module):
    """The forward pass as it is traced: one row of tokens and their positions, to logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return logits


def import_model(config: Any, dtype: torch.dtype) -> Imported:
    """Trace the causal language model that a config describes, in a dtype, with no weights.

    Raises RefusedArchitecture with the reason when the model cannot be traced, or when the traced
    graph could not be executed on several sequences laid end to end.
    """
    with refusing(config.model_type):
        check_config(config)
        with attention_hooks():
            model = build_model(
                config,
                dtype,
                attn_implementation=IMPLEMENTATION,
                experts_implementation=IMPLEMENTATION,
            )
            _check_forward(model)
            bound = bound_positions(model)
            program = _export(model)
        _check_attention(model, _count_attention(program))
        imported = import_program(program, model, config.model_type)
        _check_attention(model, imported.attention_calls)
    return Imported(
        graph=imported.graph,
        model=model,
        buffers={**computed_buffers(model), **imported.constants},
        max_position=bound.max_position,
        attention_calls=imported.attention_calls,
        notices=(bound.notice,) if bound.notice else (),
    )


def _check_forward(model: Any) -> None:
    """A model that is not told positions counts them itself, from 0 in every row."""
    forwards = (model.forward, model.base_model.forward)
    if not any("position_ids" in inspect.signature(forward).parameters for forward in forwards):
        raise RefusedArchitecture(
            "its forward takes no position_ids, so the positions of several sequences in one step"
            " cannot be given"
        )


def _count_attention(program: ExportedProgram) -> int:
    target = torch.ops.octavo.attention.default
    return sum(node.target is target for node in program.graph.nodes)


def _check_attention(model: Any, attention_calls: int) -> None:
    layers = model.config.get_text_config().num_hidden_layers
    if attention_calls < layers:
        raise RefusedArchitecture(
            f"{attention_calls} of {layers} layers attend through transformers' interface;"
            " the others attend, or remember, in a way of their own"
        )


def _example_length(model: Any) -> int:
    """A length that is no constant of the model, so that no dimension is taken for it."""
    constants = {size for tensor in model.state_dict().values() for size in tensor.shape}
    constants |= {n for n in model.config.get_text_config().to_dict().values() if type(n) is int}
    return next((length for length in _LENGTHS if length not in constants), 101)


def _export(model: Any) -> ExportedProgram:
    length = _example_length(model)
    ids = torch.zeros(1, length, dtype=torch.long)
    positions = torch.arange(length)[None]
    try:
        with parameters_on_cpu(model), torch.no_grad(), _no_warnings():
            dynamic = ({1: Dim.DYNAMIC}, {1: Dim.DYNAMIC})
            step = _Step(model)
            program = export(step, (ids, positions), dynamic_shapes=dynamic, strict=False)
            return _functional(program)
    except Exception as error:  # the model's own code runs here
        raise _refusal(error) from error


def _functional(program: ExportedProgram) -> ExportedProgram:
    """The program without in-place operations.

    PyTorch makes any program functional by tracing it again, which takes three times as long as the
    export did; most models need nothing of the kind.
    """
    targets = [node.target for node in program.graph.nodes if node.op == "call_function"]
    if any(isinstance(t, torch._ops.OpOverload) and t._schema.is_mutable for t in targets):
        program = program.run_decompositions({})
    return program


def _refusal(error: BaseException) -> RefusedArchitecture:
    """The reason behind an error of the export."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, RefusedArchitecture):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        return cause
    if MaskDescription.__name__ in str(error):
        return RefusedArchitecture(
            "it computes with its attention mask, so attention does not go through transformers'"
            " attention interface"
        )
    if "Constraints violated" in str(error):
        return RefusedArchitecture(
            "its code fixes the number of tokens to the one it was traced with"
        )
    return RefusedArchitecture(f"torch.export cannot trace it: {gist(error)}")


@contextmanager
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
