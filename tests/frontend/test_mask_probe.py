"""Masks are read off transformers' own predicates, however long the window is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from octavo.frontend.mask_probe import MaskDescription, probe_mask
from octavo.frontend.refused import RefusedArchitecture


@pytest.mark.parametrize("length", [1, 2, 7, 100, 5000])
def test_causal(length: int) -> None:
    assert probe_mask(causal_mask_function, length) == MaskDescription()


@pytest.mark.parametrize("window", [1, 2, 8, 47, 48, 49, 1023, 4096])
def test_window(window: int) -> None:
    predicate = sliding_window_causal_mask_function(window)
    assert probe_mask(predicate, 5000) == MaskDescription(window=window)


@pytest.mark.parametrize("window", [64, 65, 1000])
def test_a_window_that_no_position_can_leave_is_no_window(window: int) -> None:
    assert probe_mask(sliding_window_causal_mask_function(window), 64) == MaskDescription()


@pytest.mark.parametrize("chunk", [2, 8, 47, 48, 49, 1023, 4096])
def test_chunks(chunk: int) -> None:
    padding = torch.zeros(1, dtype=torch.long)
    predicate = chunked_causal_mask_function(chunk, padding)
    assert probe_mask(predicate, 5000) == MaskDescription(chunk=chunk)


def _prefix(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k < 5


def _hole(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k != 3) | (q < 10)


@pytest.mark.parametrize(
    "predicate",
    [
        bidirectional_mask_function,
        sliding_window_bidirectional_mask_function(8),
        or_masks(causal_mask_function, _prefix),
        and_masks(causal_mask_function, _hole),
    ],
)
def test_other_masks_are_refused(predicate: object) -> None:
    with pytest.raises(RefusedArchitecture, match="neither causal, nor a sliding window"):
        probe_mask(predicate, 300)  # type: ignore[arg-type]


def test_a_mask_that_depends_on_data_is_refused() -> None:
    segments = torch.zeros(1, 300, dtype=torch.long)
    predicate = and_masks(causal_mask_function, packed_sequence_mask_function(segments))
    with pytest.raises(RefusedArchitecture, match="depends on a tensor"):
        probe_mask(predicate, 300)
