"""The Hugging Face model without its weights: parameters on the meta device, buffers real."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import AutoModelForCausalLM, PreTrainedModel

from octavo.frontend.check_config import fields_holding
from octavo.frontend.quiet import quiet_transformers
from octavo.frontend.refused import RefusedArchitecture, gist


def build_model(config: Any, dtype: torch.dtype, **implementations: str) -> Any:
    """AutoModelForCausalLM for a config, in a dtype, in eval mode, with no weights in memory.

    Buffers that no checkpoint holds are computed for real, by the same initialisation that
    transformers runs after loading a checkpoint. Raises RefusedArchitecture.
    """
    try:
        with torch.device("meta"), quiet_transformers():
            # The model keeps, and changes, the config that it is given.
            own = copy.deepcopy(config)
            build: Any = AutoModelForCausalLM.from_config
            model = build(own, dtype=dtype, **implementations).eval()
        _compute_buffers(model, model)
    except Exception as error:  # model classes raise whatever their constructor finds
        raise RefusedArchitecture(_reason(error, config, implementations)) from error
    for module in model.modules():
        _check_attributes(module)
    return model


def _reason(error: Exception, config: Any, implementations: dict[str, str]) -> str:
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    if not isinstance(key, str):
        return f"transformers cannot build it: {gist(error)}"
    if key in implementations.values():
        return "attention does not go through transformers' attention interface"
    if fields := fields_holding(config, key):
        return f"transformers knows no {key!r}, which its config has as {fields}"
    return f"transformers cannot build it: {gist(error)}"


def _compute_buffers(owner: Any, module: nn.Module) -> None:
    """Make a tree's computed buffers real; ``owner`` is the model whose rules initialise it.

    As in transformers, a model inside a model initialises what is in it.
    """
    owner = module if isinstance(module, PreTrainedModel) else owner
    for child in module.children():
        _compute_buffers(owner, child)
    computed = [name for name in module._non_persistent_buffers_set if _on_meta(module, name)]
    for name in computed:
        buffer = module.get_buffer(name)
        # NaN shows up in the check against Hugging Face when an initialisation forgets a buffer.
        fill = torch.nan if buffer.is_floating_point() else 0
        module._buffers[name] = torch.full(buffer.shape, fill, dtype=buffer.dtype)
    if computed:
        with torch.no_grad():
            owner._init_weights(module)


def _check_attributes(module: nn.Module) -> None:
    """A tensor that is neither parameter nor buffer has no numbers now, and no name to load by."""
    for name, value in vars(module).items():
        if isinstance(value, Tensor) and value.is_meta:
            raise RefusedArchitecture(
                f"{type(module).__name__}.{name} is a tensor that is neither parameter nor buffer"
            )


def _on_meta(module: nn.Module, name: str) -> bool:
    buffer = module._buffers.get(name)
    return buffer is not None and buffer.is_meta


def computed_buffers(model: Any) -> dict[str, Tensor]:
    """The buffers that no checkpoint holds, by qualified name."""
    return {name: buffer for name, buffer in model.named_non_persistent_buffers()}


@contextmanager
def parameters_on_cpu(model: nn.Module) -> Iterator[None]:
    """Give the model fake CPU parameters: shapes without storage, on the device of the buffers.

    Tracing on the meta device would bake that device into the graph and lose the numbers of
    constants that a forward pass makes on the device of its inputs.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    tables: list[dict[str, Any]] = [
        table for module in model.modules() for table in (module._parameters, module._buffers)
    ]
    places = [
        (table, name, tensor)
        for table in tables
        for name, tensor in table.items()
        if tensor is not None and tensor.is_meta
    ]
    fakes: dict[int, Tensor] = {}  # tied parameters stay one
    try:
        for table, name, tensor in places:
            if id(tensor) not in fakes:
                fakes[id(tensor)] = _fake(mode, tensor)
            table[name] = fakes[id(tensor)]
        yield
    finally:
        for table, name, tensor in places:
            table[name] = tensor


def _fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    with mode:
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return nn.Parameter(fake, requires_grad=False) if isinstance(tensor, nn.Parameter) else fake
