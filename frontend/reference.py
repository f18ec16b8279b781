"""The Hugging Face model itself, eager, with its weights streamed one module at a time.

This is what a compiled model is compared with, so nothing of Octavo's own arithmetic is in it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octavo.frontend.cached_weights import CachedWeights
from octavo.frontend.meta_model import build_model
from octavo.frontend.refused import RefusedArchitecture, gist
from octavo.frontend.weights import WeightSource, tied_names
from octavo.ir.errors import OctavoError

_log = logging.getLogger(__name__)

Prompt = tuple[list[int], int]  # token ids, position of the first
NewCache = Callable[[], Any]  # makes a transformers Cache
_Table = dict[str, Any]  # a module's parameters or buffers


def eager_logits(
    config: Any,
    dtype: torch.dtype,
    weights: WeightSource,
    prompts: Sequence[Prompt],
    *,
    new_cache: NewCache | None = None,
) -> list[Tensor]:
    """Logits of Hugging Face's model for each prompt: ``[len, V]``, float32.

    Computed in ``dtype``. Memory is that of the largest module and what ``CachedWeights`` keeps;
    give one to share it. ``new_cache`` makes the KV cache of a prompt, where there is to be one.
    Raises RefusedArchitecture where transformers cannot build or run the
    model.
    """
    with streamed_model(config, dtype, weights) as model:
        results = [model_logits(model, *prompt, new_cache) for prompt in prompts]
    if not any(logits.isnan().any() for logits in results):
        return results
    _log.debug("%s cannot be streamed: loading all of its weights", config.model_type)
    whole = eager_model(config, dtype, weights)
    return [model_logits(whole, *prompt, new_cache) for prompt in prompts]


@contextmanager
def streamed_model(config: Any, dtype: torch.dtype, weights: WeightSource) -> Iterator[Any]:
    """Hugging Face's model, eager, whose modules have their weights just while they run.

    Its logits are NaN where it cannot be run so; see ``eager_logits`` for memory.
    """
    if not isinstance(weights, CachedWeights) or weights.dtype != dtype:
        weights = CachedWeights(weights, dtype)
    model = build_model(config, dtype, attn_implementation="eager")
    with _streamed(model, weights):
        yield model


def eager_model(config: Any, dtype: torch.dtype, weights: WeightSource) -> Any:
    """Hugging Face's model, eager, with all its weights in memory: good for ``generate``."""
    model = build_model(config, dtype, attn_implementation="eager")
    weights = CachedWeights(weights, dtype, limit_bytes=0)
    loaded: dict[str, Tensor] = {}
    for table, name, key in list(_weight_places(model)):
        if key not in loaded:
            loaded[key] = _as_weight(table[name], weights.load(key))
        table[name] = loaded[key]
    return model


@torch.no_grad()
def model_logits(
    model: Any, ids: list[int], first_position: int = 0, new_cache: NewCache | None = None
) -> Tensor:
    """Logits ``[len, V]``, float32, of one sequence. Raises RefusedArchitecture."""
    positions = torch.arange(first_position, first_position + len(ids))
    # A mask of ones says that this is one sequence, whatever its positions are.
    try:
        logits: Tensor = model(
            input_ids=torch.tensor([ids]),
            position_ids=positions[None],
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            **_cache_keywords(model, new_cache),
        ).logits
    except OctavoError:
        raise  # a weight that cannot be read
    except Exception as error:  # the model's own code
        raise RefusedArchitecture(
            f"Hugging Face's own model cannot run with this config: {gist(error)}"
        ) from error
    return logits[0].float()


def _cache_keywords(model: Any, new_cache: NewCache | None) -> dict[str, Any]:
    if new_cache is None:
        return {"use_cache": False}
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"  # as transformers once said
    return {"use_cache": True, name: new_cache()}


@contextmanager
def _streamed(model: Any, weights: CachedWeights) -> Iterator[None]:
    """While inside, a module has its own weights just while its forward runs.

    At other times NaNs stand in for them, without memory behind them: a module that reads another
    one's weights then says so in the logits. (On the meta device it would compute with garbage.)
    """
    handles = []
    for module, places in _by_module(model).items():
        hold, free = _hooks(places, weights)
        handles.append(module.register_forward_pre_hook(hold))
        handles.append(module.register_forward_hook(free, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _stand_in(tensor: Tensor) -> Tensor:
    """A CPU tensor of the same shape and dtype: NaN everywhere, stored once."""
    fill = torch.nan if tensor.is_floating_point() else 0
    return _as_weight(tensor, torch.full((), fill, dtype=tensor.dtype).expand(tensor.shape))


_Places = list[tuple[_Table, str, str]]


def _hooks(
    places: _Places, weights: CachedWeights
) -> tuple[Callable[..., None], Callable[..., None]]:
    absent = [_stand_in(table[name]) for table, name, _ in places]

    def hold(*_: Any) -> None:
        for table, name, key in places:
            table[name] = _as_weight(table[name], weights.load(key))

    def free(*_: Any) -> None:
        for (table, name, _key), tensor in zip(places, absent, strict=True):
            table[name] = tensor

    free()
    return hold, free


def _by_module(model: Any) -> dict[nn.Module, _Places]:
    owners = {id(t): module for module in model.modules() for t in _tables(module)}
    groups: dict[nn.Module, _Places] = {}
    for place in _weight_places(model):
        groups.setdefault(owners[id(place[0])], []).append(place)
    return groups


def _weight_places(model: Any) -> Iterator[tuple[_Table, str, str]]:
    """Every parameter and stored buffer: the table it stands in, its name there, its key."""
    ties = tied_names(model)
    for path, module in model.named_modules():
        for table in _tables(module):
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    key = f"{path}.{name}" if path else name
                    yield table, name, ties.get(key, key)


def _tables(module: nn.Module) -> tuple[_Table, _Table]:
    return module._parameters, module._buffers


def _as_weight(like: Any, tensor: Tensor) -> Tensor:
    return nn.Parameter(tensor, requires_grad=False) if isinstance(like, nn.Parameter) else tensor
