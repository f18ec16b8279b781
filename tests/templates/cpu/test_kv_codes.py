"""The cpu kernels that write and read codes, against the definition and attention in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.codegen.render import render_kernel
from octavo.ir.kv_scheme import KVScheme
from octavo.ir.ops.paged import KVState, kv_write, paged_attention, rotary_kv_write
from octavo.ir.types import DTYPE_NAMES
from tests.rendered_kernel import imported
from tests.templates.triton.paged_case import PagedCase
from tests.tolerances import REWRITE, distance

SCHEMES = ["f8e4m3 head", "f8e4m3 token", "i8 head", "i8 token"]
LENGTHS = [(5, 5), (33, 1), (40, 23), (1, 1), (70, 17), (69, 1), (16, 1)]


def kernel(op: str, case: PagedCase, scheme: KVScheme, *, has_head_scales: bool) -> Any:
    constants = {
        **case.constants(),
        "kv_dtype": DTYPE_NAMES[scheme.dtype],
        "kv_scales": scheme.scales,
        "kv_largest": scheme.largest,
        "has_head_scales": has_head_scales,
    }
    return imported(op, render_kernel(f"cpu/{op}.py.j2", op, constants))


def head_scales(scheme: KVScheme) -> list[Tensor]:
    """Of two KV heads, for k and v; none where tokens have scales."""
    if scheme.scales == "token":
        return []
    return [torch.tensor([0.01, 0.03]), torch.tensor([0.02, 0.05])]


def cached(case: PagedCase, scheme: KVScheme, scales: list[Tensor]) -> KVState:
    """The case's context as codes; zeros where nothing was written, as the runtime allocates."""
    shape = (case.num_blocks, case.kv_heads, case.block_size)
    sides = [torch.zeros(shape) for _ in range(2 * scheme.has_token_scales)]
    codes = [torch.zeros(x.shape).to(scheme.dtype) for x in (case.keys, case.values)]
    state = KVState(*((x,) for x in codes), *((x,) for x in sides))  # type: ignore[arg-type]
    flat = case.keys.flatten(0, 1), case.values.flatten(0, 1)
    written = torch.nonzero(flat[0][:, 0, 0].isfinite()).flatten()
    kv_write.evaluate(state, *(x[written] for x in flat), written, *scales, slot=0)
    return state


def tensors(state: KVState) -> list[Tensor]:
    """What a kernel gets: the caches flat, scales of tokens as they are."""
    codes = [state.keys[0].flatten(0, 1), state.values[0].flatten(0, 1)]
    return [*codes, *(x[0] for x in (state.key_scales, state.value_scales) if x)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCHEMES)
def test_codes_and_scales_are_the_references(name: str, dtype: torch.dtype) -> None:
    case, scheme = PagedCase(LENGTHS, dtype=dtype), KVScheme.parse(name)
    scales = head_scales(scheme)
    state = cached(case, scheme, scales)
    want = cached(case, scheme, scales)
    _, k, v = case.new()
    k[3], v[1, 1] = 0, 0
    kv_write.evaluate(want, k, v, case.slot_mapping, *scales, slot=0)
    run = kernel("kv_write", case, scheme, has_head_scales=bool(scales)).run
    run(*tensors(state), k, v, case.slot_mapping, *scales)
    for got, expected in zip(state.tensors(), want.tensors(), strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("name", SCHEMES)
def test_rotated_keys_become_codes(name: str) -> None:
    """A rotation that rounds otherwise may move a number over the middle of two codes, no more."""
    case, scheme = PagedCase(LENGTHS), KVScheme.parse(name)
    scales = head_scales(scheme)
    state, want = cached(case, scheme, scales), cached(case, scheme, scales)
    q, k, v = case.new()
    turned, _ = rotary_kv_write.evaluate(
        want, q, k, v, case.cos, case.sin, case.slot_mapping, *scales, slot=0
    )
    module = kernel("rotary_kv_write", case, scheme, has_head_scales=bool(scales))
    plan, out = module.plan(case.cos, case.sin), torch.empty_like(q)
    module.run(*tensors(state), q, k, v, case.slot_mapping, *scales, plan, out=out)
    assert distance(out, turned) <= REWRITE[torch.float32]
    for got, expected in zip(tensors(state), tensors(want), strict=True):
        if got.dtype == torch.float32:
            assert distance(got, expected) <= REWRITE[torch.float32]
            continue
        steps = (got.view(torch.int8).int() - expected.view(torch.int8).int()).abs()
        assert steps.max() <= 1
        # Of numbers that differ by 2**-22 next to codes 2**-8 apart, one in 2**13 changes over.
        assert (steps > 0).sum() <= 2 + steps.numel() / 2**12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "attrs", [{}, {"window": 16}, {"chunk": 16}, {"softcap": 2.0}, {"has_sinks": True}]
)
@pytest.mark.parametrize("name", SCHEMES)
def test_attention_on_codes(name: str, attrs: dict[str, Any], dtype: torch.dtype) -> None:
    case, scheme = PagedCase(LENGTHS, dtype=dtype), KVScheme.parse(name)
    scales = head_scales(scheme)
    state = cached(case, scheme, scales)
    q, k, v = case.new()
    kv_write.evaluate(state, k, v, case.slot_mapping, *scales, slot=0)
    sinks = [torch.randn(4, dtype=dtype)] if "has_sinks" in attrs else []
    known = {key: value for key, value in attrs.items() if key != "has_sinks"}
    want = paged_attention.evaluate(
        q.double(),
        state,
        *case.layout(),
        *([x.double() for x in sinks] or [None]),
        *scales,
        slot=0,
        scale=case.head_dim**-0.5,
        **known,
    )
    constants = {**case.constants(), **attrs}
    case.constants = lambda: constants  # type: ignore[method-assign]
    module = kernel("paged_attention", case, scheme, has_head_scales=bool(scales))
    plan = module.plan(*case.layout(), case.block_size)
    prepared = [module.prepare(x) for x in scales]
    out = torch.full(want.shape, torch.nan, dtype=dtype)
    got = module.run(q, *tensors(state), *sinks, *prepared, plan, out=out)
    assert distance(got, want) <= REWRITE[dtype]
