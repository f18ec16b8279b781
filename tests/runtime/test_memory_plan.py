"""The plan of a GPU's memory, in bytes, and what it says when it does not work out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.runtime.errors import CapacityError
from octavo.runtime.memory_plan import RESERVE_BYTES, MemoryPlan, fits_or_says_why, plan_memory

GIB = 2**30


def plan(free: int = 70 * GIB) -> MemoryPlan:
    return plan_memory(
        free, 80 * GIB, 0.9, weights=16 * GIB, program=GIB, inputs=2**20, graphs=2**28
    )


def test_the_cache_gets_what_the_rest_leaves() -> None:
    fixed = 17 * GIB + 2**20 + 2**28 + RESERVE_BYTES
    assert plan().fixed == fixed
    assert plan().kv_cache_room == pytest.approx(62 * GIB - fixed, abs=2)
    assert replace(plan(), kv_cache=5 * GIB).planned == fixed + 5 * GIB


def test_what_does_not_fit_has_no_room() -> None:
    assert plan(free=20 * GIB).kv_cache_room < 0


def test_the_table_names_every_item() -> None:
    text = str(replace(plan(), kv_cache=40 * GIB))
    for line in (
        "GPU memory                                 80.00 GiB",
        "in use already                             10.00 GiB",
        "left to others (gpu_memory_utilization)     8.00 GiB",
        "weights                                    16.00 GiB",
        "KV cache                                   40.00 GiB",
    ):
        assert line in text


def test_an_allocation_that_fails_shows_the_plan() -> None:
    with (
        pytest.raises(CapacityError, match=r"(?s)weights +16.00 GiB.*lower max_num_batched_tokens"),
        fits_or_says_why(plan()),
    ):
        raise torch.OutOfMemoryError("no")
    with pytest.raises(RuntimeError, match="other"), fits_or_says_why(plan()):
        raise RuntimeError("other")
