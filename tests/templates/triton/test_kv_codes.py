"""Kernels on caches of codes against the IR's reference ops: in float64 on the same codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.ir.ops.fused import rotary_paged_attention
from octavo.ir.ops.paged import KVState, kv_write, paged_attention, rotary_kv_write
from octavo.runtime.kernel import Workspace
from tests.rendered_kernel import rendered
from tests.templates.codes_case import (
    OFFSETS,
    ONES,
    SCHEMES,
    Constants,
    assert_near_codes,
    cached,
    tensors,
)
from tests.templates.triton.paged_case import PagedCase
from tests.tolerances import REWRITE, distance

DECODE = [(1, 1), (2, 1), (16, 1), (17, 1), (70, 1)]
MIXED = [(5, 5), (33, 1), (40, 23), (1, 1), (70, 17)]
STEPS = {"decode": DECODE, "mixed": MIXED}
# Beside every scheme: what masks and heads of other sizes do.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window": ({}, {"window": 17}),
    "softcap": ({}, {"softcap": 2.0}),
    "group of 3": ({"heads": 6}, {}),
    "head dim 80": ({"head_dim": 80, "v_head_dim": 48, "rotary_dim": 32}, {}),
    "block size 1": ({"block_size": 1}, {}),
}
DTYPES = [torch.float32, torch.bfloat16]


def kernel(op: str, case: PagedCase, codes: Constants, **attrs: Any) -> Any:
    return rendered(op, {**case.constants(), **attrs, **codes.of_kernel})


def clone(state: KVState) -> KVState:
    sides = (state.keys, state.values, state.key_scales, state.value_scales)
    return KVState(*(tuple(x.clone() for x in side) for side in sides))


def check(got: Tensor, want: Tensor, what: str) -> None:
    gap = distance(got, want)
    assert gap <= REWRITE[got.dtype], f"{what}: differs by {gap:.3g}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*SCHEMES, ONES, *OFFSETS])
def test_codes_and_scales_are_the_references(name: str, dtype: torch.dtype) -> None:
    """Of numbers that are given, not rotated, codes and scales are exact."""
    case = PagedCase(MIXED, dtype=dtype)
    codes = Constants.of(name, case)
    want = cached(case, codes)
    state = clone(want)
    _, k, v = case.new()
    k[3], v[1, 1] = 0, 0
    v[2] *= 1000  # beyond the largest code
    kv_write.evaluate(want, k, v, case.slot_mapping, *codes.operands, slot=0)
    constants = (*codes.scales, *codes.offset)
    kernel("kv_write", case, codes).run(*tensors(state), k, v, case.slot_mapping, *constants)
    for got, expected in zip(state.tensors(), want.tensors(), strict=True):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("name", [*SCHEMES, ONES, *OFFSETS])
def test_rotated_keys_become_codes(name: str) -> None:
    case = PagedCase(MIXED)
    codes = Constants.of(name, case)
    want = cached(case, codes)
    state = clone(want)
    q, k, v = case.new()
    new = (q, k, v, case.cos, case.sin, case.slot_mapping)
    turned, _ = rotary_kv_write.evaluate(want, *new, *codes.operands, slot=0)
    out, constants = torch.empty_like(turned), (*codes.scales, *codes.offset)
    kernel("rotary_kv_write", case, codes).run(*tensors(state), *new, *constants, out=out)
    check(out, turned, "q")
    check_written(state, want)


def check_written(state: KVState, want: KVState) -> None:
    for got, expected in zip(state.tensors(), want.tensors(), strict=True):
        if got.dtype == torch.float32:
            check(got, expected, "scales")
        else:
            assert_near_codes(got, expected)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*SCHEMES, ONES])
def test_attention_to_codes(name: str, dtype: torch.dtype, step: list[tuple[int, int]]) -> None:
    """All tokens are written: attention in float64 on what the codes stand for."""
    case = PagedCase(step, dtype=dtype)
    codes = Constants.of(name, case)
    scales, state = codes.scales, cached(case, codes)
    q, k, v = case.new()
    kv_write.evaluate(state, k, v, case.slot_mapping, *codes.operands, slot=0)
    sinks = torch.randn(4, dtype=dtype)
    want = paged_attention.evaluate(
        q.double(), state, *case.layout(), sinks.double(), *scales, slot=0, scale=0.25
    )
    module = kernel("paged_attention", case, codes, scale=0.25, has_sinks=True)
    out = torch.full(want.shape, torch.nan, dtype=dtype)
    given = (*tensors(state), *case.layout(), sinks, *scales)
    workspace = Workspace.allocate(out.device)
    module.run(q, *given, out=out, block_size=case.block_size, workspace=workspace)
    check(out, want, "attention")


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(("sizes", "attrs"), VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("name", ["f8e4m3 head", "i8 token", ONES, *OFFSETS])
def test_the_fused_kernels(
    name: str, sizes: dict[str, Any], attrs: dict[str, Any], step: list[tuple[int, int]]
) -> None:
    """What a step writes is what it reads: attention on the codes that the kernel itself wrote."""
    case = PagedCase(step, **sizes)
    codes = Constants.of(name, case)
    want = cached(case, codes)
    state = clone(want)
    q, k, v = case.new()
    new = (q, k, v, case.cos, case.sin, case.slot_mapping)
    attrs = {"scale": case.head_dim**-0.5, **attrs}
    operands = (*case.layout(), None, None, None, *codes.operands)
    rotary_paged_attention.evaluate(want, *new, *operands, slot=0, **attrs)
    module = kernel("rotary_paged_attention", case, codes, **attrs)
    out = torch.full((len(q), case.heads, case.v_head_dim), torch.nan, dtype=case.dtype)
    workspace = Workspace.allocate(out.device)
    module.run(
        *(*tensors(state), *new, *case.layout(), *codes.scales, *codes.offset),
        out=out,
        block_size=case.block_size,
        workspace=workspace,
    )
    check_written(state, want)
    turned, _ = rotary_kv_write.evaluate(
        clone(state), *(x.double() for x in new[:-1]), case.slot_mapping, *codes.operands, slot=0
    )
    exact = paged_attention.evaluate(
        turned, state, *case.layout(), None, *codes.scales, slot=0, **attrs
    )
    check(out, exact, "attention")
    assert not workspace.counters.any(), "counters are left as they were found"


@pytest.mark.parametrize("name", ["f8e4m3 head", "i8 token", *OFFSETS[:1]])
def test_shares_of_the_context(name: str) -> None:
    """A decode whose programs split the context says what one program says."""
    case = PagedCase([(17, 1), (65, 1), (66, 1), (1, 1)], dtype=torch.bfloat16)
    codes = Constants.of(name, case)
    q, k, v = case.new()
    new = (q, k, v, case.cos, case.sin, case.slot_mapping)
    results = []
    for choice in ({"BN": 16, "SPLIT": 4, "SHARE": 16}, {"BN": 16, "SPLIT": 1, "SHARE": 1000}):
        state = cached(case, codes)
        module = kernel("rotary_paged_attention", case, codes)
        module.CHOICES.bucket(4).chosen |= choice
        out = torch.full((4, 4, 16), torch.nan, dtype=case.dtype)
        module.run(
            *(*tensors(state), *new, *case.layout(), *codes.scales, *codes.offset),
            out=out,
            block_size=16,
            workspace=Workspace.allocate(out.device),
        )
        results.append(out)
    check(results[0], results[1], "attention")
