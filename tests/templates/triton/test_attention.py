"""Attention kernels against the IR's reference ops in float64, on caches that are NaN elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.ir.ops.attention import allowed_pairs
from octavo.ir.ops.fused import rotary_paged_attention
from octavo.ir.ops.paged import KVState, kv_write, paged_attention, rotary_kv_write
from octavo.ir.ops.rotary import rotary
from octavo.runtime.kernel import Workspace
from tests.rendered_kernel import rendered
from tests.templates.triton.paged_case import PagedCase
from tests.tolerances import REWRITE, distance

DECODE = [(1, 1), (2, 1), (16, 1), (17, 1), (70, 1)]
MIXED = [(5, 5), (33, 1), (40, 23), (1, 1), (70, 17)]
STEPS = {"decode": DECODE, "mixed": MIXED}

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "window": ({}, {"window": 16}),
    "window of 1": ({}, {"window": 1}),
    "window of 17": ({}, {"window": 17}),
    "chunk": ({}, {"chunk": 16}),
    "softcap": ({}, {"softcap": 2.0}),
    "interleaved": ({}, {"interleaved": True}),
    "partial": ({"rotary_dim": 8}, {}),
    "group of 1": ({"heads": 2}, {}),
    "group of 3": ({"heads": 6}, {}),
    "group of 7": ({"heads": 7, "kv_heads": 1}, {}),
    "head dim 80": ({"head_dim": 80, "v_head_dim": 80, "rotary_dim": 32}, {}),
    "other value dim": ({"head_dim": 32, "v_head_dim": 16, "rotary_dim": 32}, {}),
    "block size 32": ({"block_size": 32}, {}),
    "block size 1": ({"block_size": 1}, {}),
    "head dim 256": ({"head_dim": 256, "v_head_dim": 256}, {}),
}


def check(got: Tensor, want: Tensor, what: str) -> None:
    gap = distance(got, want)
    assert gap <= REWRITE[got.dtype], f"{what}: differs by {gap:.3g}"


def check_written(case: PagedCase, want: Any, keys: Tensor, values: Tensor) -> None:
    """The caches are the reference's: new tokens written, all else untouched, NaN included."""
    for got, exact in ((keys, want.keys[0]), (values, want.values[0])):
        assert torch.equal(got.isnan(), exact.isnan())
        check(got.nan_to_num(), exact.nan_to_num().to(got.device), "cache")


def run_fused(
    case: PagedCase,
    attrs: dict[str, Any],
    *optional: Tensor | None,
    block_table: Tensor | None = None,
    choice: dict[str, int] | None = None,
) -> None:
    """Against the reference, which sees the case's own block table whatever the kernel gets."""
    given = [value for value in optional if value is not None]
    module = rendered("rotary_paged_attention", {**case.constants(), **attrs, **_has(optional)})
    module.CHOICES.bucket(len(case.lengths)).chosen |= choice or {}
    known = {k: v for k, v in attrs.items() if k != "has_norm_weight"}
    q, k, v = case.new()
    exact = [x.double() for x in (q, k, v, case.cos, case.sin)]
    want, state = rotary_paged_attention.evaluate(
        case.exact_state(),
        *exact,
        case.slot_mapping,
        *case.layout(),
        *[None if value is None else value.double() for value in optional],
        slot=0,
        scale=case.head_dim**-0.5,
        **known,
    )
    out = torch.full((len(q), case.heads, case.v_head_dim), torch.nan, dtype=case.dtype)
    workspace = Workspace.allocate(out.device)
    keys, values = case.keys.clone(), case.values.clone()
    module.run(
        keys.flatten(0, 1),
        values.flatten(0, 1),
        *(q, k, v, case.cos, case.sin, case.slot_mapping),
        case.block_table if block_table is None else block_table,
        *case.layout()[1:],
        *given,
        out=out,
        block_size=case.block_size,
        workspace=workspace,
    )
    check(out, want, "attention")
    check_written(case, state, keys, values)
    assert not workspace.counters.any(), "counters are left as they were found"


def _has(optional: tuple[Tensor | None, ...]) -> dict[str, bool]:
    sinks, q_norm = (*optional, None, None)[:2]
    return {"has_sinks": sinks is not None, "has_norm_weight": q_norm is not None}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(("sizes", "attrs"), VARIANTS.values(), ids=VARIANTS)
def test_every_variant(
    step: list[tuple[int, int]], sizes: dict[str, Any], attrs: dict[str, Any]
) -> None:
    run_fused(PagedCase(step, **sizes), attrs)


@pytest.mark.parametrize("keys", [16, 33, 1000])
def test_shares_of_the_context(keys: int) -> None:
    """Four splits: all have a share, only three (of 65 keys in tiles of 16 too), and one."""
    lengths = [(17, 1), (65, 1), (66, 1), (1, 1)]
    choice = {"BN": 16, "SPLIT": 4, "SHARE": keys}
    run_fused(PagedCase(lengths, heads=2, kv_heads=1), {}, torch.randn(2), choice=choice)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(step: list[tuple[int, int]], dtype: torch.dtype) -> None:
    run_fused(PagedCase(step, dtype=dtype), {})


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_sinks_and_head_norms(step: list[tuple[int, int]]) -> None:
    case = PagedCase(step)
    sinks, q_norm, k_norm = torch.randn(4), torch.randn(16), torch.randn(16)
    run_fused(case, {"norm_eps": 1e-6, "norm_offset": 1.0}, sinks, q_norm, k_norm)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_head_norms_without_weights(step: list[tuple[int, int]]) -> None:
    run_fused(PagedCase(step), {"norm_eps": 1e-6})


@pytest.mark.parametrize("context", [31, 32, 33, 34, 64, 65, 66, 160])
def test_both_sides_of_a_split(context: int) -> None:
    run_fused(PagedCase([(context, 1)]), {})


def test_a_larger_batch_has_fewer_splits() -> None:
    lengths = [(1 + 7 * i % 90, 1) for i in range(20)]
    run_fused(PagedCase(lengths, heads=4, kv_heads=4), {})


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_to_what_is_written_already(step: list[tuple[int, int]], has_sinks: bool) -> None:
    case = PagedCase(step)
    q, k, v = case.new()
    sinks = torch.randn(4) if has_sinks else None
    kv_write.evaluate(
        KVState((case.keys,), (case.values,)),
        k,
        v,
        case.slot_mapping,
        slot=0,
    )
    want = paged_attention.evaluate(
        q.double(),
        case.exact_state(),
        *case.layout(),
        None if sinks is None else sinks.double(),
        slot=0,
        scale=0.25,
    )
    module = rendered(
        "paged_attention", {**case.constants(), "scale": 0.25, "has_sinks": has_sinks}
    )
    out = torch.full((len(q), 4, 16), torch.nan)
    flat = case.keys.flatten(0, 1), case.values.flatten(0, 1)
    given = [] if sinks is None else [sinks]
    workspace = Workspace.allocate(out.device)
    module.run(q, *flat, *case.layout(), *given, out=out, block_size=16, workspace=workspace)
    check(out, want, "attention")


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_alibi(step: list[tuple[int, int]]) -> None:
    """Against the formula of Press et al. 2022, written out."""
    case = PagedCase(step, heads=4, kv_heads=4)
    q, k, v = case.new()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    kv_write.evaluate(KVState((case.keys,), (case.values,)), k, v, case.slot_mapping, slot=0)
    module = rendered("paged_attention", {**case.constants(), "has_alibi": True})
    out = torch.full((len(q), 4, 16), torch.nan)
    flat = case.keys.flatten(0, 1), case.values.flatten(0, 1)
    workspace = Workspace.allocate(out.device)
    module.run(q, *flat, *case.layout(), slopes, out=out, block_size=16, workspace=workspace)
    for i, (context, new) in enumerate(case.lengths):
        first = int(case.query_start[i])
        slots = case._slots(i)
        old_k, old_v = (x[slots].double().transpose(0, 1) for x in flat)
        scores = q[first : first + new].double().transpose(0, 1) @ old_k.mT / 4
        ticks = torch.arange(context)
        distance_ = ticks[None, :] - ticks[context - new :, None]
        scores = scores + slopes.double()[:, None, None] * distance_
        allowed = allowed_pairs(ticks[context - new :], ticks, True, None, None)
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
        check(out[first : first + new], (weights @ old_v).transpose(0, 1), f"sequence {i}")


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_padding_writes_to_the_null_block_alone(step: list[tuple[int, int]]) -> None:
    case = PagedCase(step)
    is_decode = all(new == 1 for _, new in step)
    q, k, v = case.new()
    pad = 3
    padded = [torch.cat([x, torch.randn(pad, *x.shape[1:])]) for x in (q, k, v, case.cos, case.sin)]
    slots = torch.cat([case.slot_mapping, torch.zeros(pad, dtype=torch.int64)])
    table, start, lens = case.layout()
    table = torch.cat([table, torch.zeros_like(table[:pad])])
    last = start[-1:]
    more = last + torch.arange(1, pad + 1, dtype=torch.int32) if is_decode else last.repeat(pad)
    start = torch.cat([start, more])
    lens = torch.cat([lens, torch.ones(pad, dtype=torch.int32)])
    module = rendered("rotary_paged_attention", case.constants())
    keys, values = case.keys.clone(), case.values.clone()
    keys[0], values[0] = 0, 0
    out = torch.full((len(q) + pad, 4, 16), torch.nan)
    want, state = rotary_paged_attention.evaluate(
        case.exact_state(),
        *[x.double() for x in (q, k, v, case.cos, case.sin)],
        case.slot_mapping,
        *case.layout(),
        slot=0,
        scale=0.25,
    )
    module.run(
        *(keys.flatten(0, 1), values.flatten(0, 1), *padded, slots, table, start, lens),
        out=out,
        block_size=16,
        workspace=Workspace.allocate(out.device),
    )
    check(out[: len(q)], want, "attention")
    check_written(
        case, type(state)((state.keys[0][1:],), (state.values[0][1:],)), keys[1:], values[1:]
    )


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (80, 32), (64, 16)])
def test_rotary_alone(interleaved: bool, head_dim: int, rotary_dim: int) -> None:
    case = PagedCase(
        MIXED, heads=3, kv_heads=3, head_dim=head_dim, v_head_dim=head_dim, rotary_dim=rotary_dim
    )
    q, _, _ = case.new()
    module = rendered("rotary", {**case.constants(), "interleaved": interleaved})
    out = torch.full(q.shape, torch.nan)
    module.run(q, case.cos, case.sin, out=out)
    exact = [x.double() for x in (q, case.cos, case.sin)]
    check(out, rotary.evaluate(*exact, interleaved=interleaved), "rotary")


def test_rotary_with_the_write() -> None:
    case = PagedCase(MIXED, head_dim=32, rotary_dim=16)
    q, k, v = case.new()
    exact = [x.double() for x in (q, k, v, case.cos, case.sin)]
    want, state = rotary_kv_write.evaluate(
        case.exact_state(), *exact, case.slot_mapping, slot=0, interleaved=False
    )
    module = rendered("rotary_kv_write", case.constants())
    out = torch.full(q.shape, torch.nan)
    flat = case.keys.flatten(0, 1), case.values.flatten(0, 1)
    module.run(*flat, q, k, v, case.cos, case.sin, case.slot_mapping, out=out)
    check(out, want, "rotated q")
    check_written(case, state, case.keys, case.values)


def test_the_write_alone() -> None:
    case = PagedCase(MIXED, head_dim=80, v_head_dim=16, kv_heads=3, heads=3)
    _, k, v = case.new()
    state = kv_write.evaluate(case.exact_state(), k.double(), v.double(), case.slot_mapping, slot=0)
    module = rendered("kv_write", case.constants())
    module.run(case.keys.flatten(0, 1), case.values.flatten(0, 1), k, v, case.slot_mapping)
    check_written(case, state, case.keys, case.values)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("attrs", [{"window": 20}, {"chunk": 32}], ids=["window", "chunk"])
def test_blocks_that_no_token_sees_may_be_gone(
    step: list[tuple[int, int]], attrs: dict[str, Any]
) -> None:
    """Their entries of the block table name the null block, which holds NaN."""
    case = PagedCase(step)
    table = case.block_table.clone()
    for row, (context, new) in zip(table, case.lengths, strict=True):
        oldest = context - new
        window = attrs.get("window")
        seen_from = oldest + 1 - window if window else oldest // 32 * 32
        row[: max(seen_from, 0) // case.block_size] = 0
    run_fused(case, attrs, block_table=table)


@pytest.mark.parametrize("heads", [(128, 1), (71, 1), (32, 8), (64, 64)])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_parts_of_all_splits_fit_into_the_workspace(heads: tuple[int, int], head_dim: int) -> None:
    case = PagedCase([(1, 1)], *heads, head_dim, head_dim, head_dim)
    module = rendered("rotary_paged_attention", case.constants())
    workspace = Workspace.allocate("meta")
    for bucket in module.CHOICES.buckets[:-1]:
        for candidate in bucket.candidates:
            if candidate["SPLIT"] > 1:
                num_parts = bucket.max_rows * heads[0] * candidate["SPLIT"]
                assert num_parts * (head_dim + 2) <= workspace.scratch.numel()
                assert bucket.max_rows * heads[1] <= workspace.counters.numel()
