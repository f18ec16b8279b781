"""The cpu kernels that write and read codes, against the definition and attention in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.codegen.render import render_kernel
from octavo.ir.ops.paged import kv_write, paged_attention, rotary_kv_write
from tests.rendered_kernel import imported
from tests.templates.codes_case import (
    OFFSETS,
    SCHEMES,
    Constants,
    assert_near_codes,
    cached,
    tensors,
)
from tests.templates.triton.paged_case import PagedCase
from tests.tolerances import REWRITE, distance

LENGTHS = [(5, 5), (33, 1), (40, 23), (1, 1), (70, 17), (69, 1), (16, 1)]


def kernel(op: str, case: PagedCase, codes: Constants) -> Any:
    constants = {**case.constants(), **codes.of_kernel}
    return imported(op, render_kernel(f"cpu/{op}.py.j2", op, constants))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*SCHEMES, *OFFSETS])
def test_codes_and_scales_are_the_references(name: str, dtype: torch.dtype) -> None:
    case = PagedCase(LENGTHS, dtype=dtype)
    codes = Constants.of(name, case)
    state, want = cached(case, codes), cached(case, codes)
    _, k, v = case.new()
    k[3], v[1, 1] = 0, 0
    kv_write.evaluate(want, k, v, case.slot_mapping, *codes.operands, slot=0)
    run = kernel("kv_write", case, codes).run
    run(*tensors(state), k, v, case.slot_mapping, *codes.scales, *codes.offset)
    for got, expected in zip(state.tensors(), want.tensors(), strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("name", [*SCHEMES, *OFFSETS])
def test_rotated_keys_become_codes(name: str) -> None:
    """A rotation that rounds otherwise may move a number over the middle of two codes, no more."""
    case = PagedCase(LENGTHS)
    codes = Constants.of(name, case)
    state, want = cached(case, codes), cached(case, codes)
    q, k, v = case.new()
    turned, _ = rotary_kv_write.evaluate(
        want, q, k, v, case.cos, case.sin, case.slot_mapping, *codes.operands, slot=0
    )
    module = kernel("rotary_kv_write", case, codes)
    plan, out = module.plan(case.cos, case.sin), torch.empty_like(q)
    constants = (*codes.scales, *codes.offset)
    module.run(*tensors(state), q, k, v, case.slot_mapping, *constants, plan, out=out)
    assert distance(out, turned) <= REWRITE[torch.float32]
    for got, expected in zip(tensors(state), tensors(want), strict=True):
        if got.dtype == torch.float32:
            assert distance(got, expected) <= REWRITE[torch.float32]
            continue
        assert_near_codes(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "attrs", [{}, {"window": 16}, {"chunk": 16}, {"softcap": 2.0}, {"has_sinks": True}]
)
@pytest.mark.parametrize("name", SCHEMES)
def test_attention_on_codes(name: str, attrs: dict[str, Any], dtype: torch.dtype) -> None:
    case = PagedCase(LENGTHS, dtype=dtype)
    codes = Constants.of(name, case)
    scales, state = codes.scales, cached(case, codes)
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
    module = kernel("paged_attention", case, codes)
    plan = module.plan(*case.layout(), case.block_size)
    prepared = [module.prepare(x) for x in scales]
    out = torch.full(want.shape, torch.nan, dtype=dtype)
    got = module.run(q, *tensors(state), *sinks, *prepared, plan, out=out)
    assert distance(got, want) <= REWRITE[dtype]
