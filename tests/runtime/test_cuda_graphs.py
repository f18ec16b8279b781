"""Which steps are graphs, and of what size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from octavo.runtime.batch import Batch
from octavo.runtime.cuda_graphs import (
    GraphSizes,
    Run,
    capture_all,
    decode_sizes,
    mixed_sizes,
    warm_up_batch,
)
from octavo.runtime.step_inputs import StepSize


def batch(num_tokens: int, num_seqs: int) -> Batch:
    return replace(
        warm_up_batch(),
        ids=np.zeros(num_tokens, dtype=np.int64),
        seq_lens=np.ones(num_seqs, dtype=np.int32),
    )


def test_sizes_of_decodes_end_with_the_most_sequences() -> None:
    assert [size.num_seqs for size in decode_sizes(20)] == [1, 2, 4, 8, 16, 20]
    assert [size.num_seqs for size in decode_sizes(1)] == [1]
    assert [size.num_seqs for size in decode_sizes(300)][-4:] == [248, 256, 288, 300]
    assert all(size.num_tokens == size.num_seqs == size.num_rows for size in decode_sizes(300))


@pytest.mark.parametrize("max_num_seqs", [1, 7, 64, 256, 1024])
def test_a_mixed_size_never_looks_like_a_decode(max_num_seqs: int) -> None:
    for size in mixed_sizes(8192, max_num_seqs):
        assert size.num_seqs < size.num_tokens
        assert size.num_seqs == min(max_num_seqs, size.num_tokens - 1)


def test_every_small_step_has_a_graph_with_little_padding() -> None:
    sizes = GraphSizes(8192, 256)
    for num_tokens in range(2, 513):
        padded = sizes.padded(batch(num_tokens, 1))
        assert padded is not None
        assert padded.num_tokens >= num_tokens
        assert num_tokens <= 48 or (padded.num_tokens - num_tokens) / padded.num_tokens < 0.15
    assert sizes.padded(batch(513, 1)) is None
    for num_seqs in range(1, 257):
        padded = sizes.padded(batch(num_seqs, num_seqs))
        assert padded is not None
        assert num_seqs <= padded.num_seqs == padded.num_tokens <= 256


@pytest.mark.parametrize("max_num_seqs", [3, 20, 256])
def test_a_graph_holds_the_rows_of_its_step(max_num_seqs: int) -> None:
    """A prompt may want the logits of each of its tokens: as many rows as sequences may run."""
    sizes = GraphSizes(512, max_num_seqs)
    for num_tokens in range(2, 513):
        rows = np.zeros(min(num_tokens, max_num_seqs), dtype=np.int64)
        padded = sizes.padded(replace(batch(num_tokens, 1), logit_rows=rows))
        assert padded is None or padded.num_rows >= len(rows)
        assert padded is not None or num_tokens > 500
    everything = replace(batch(8, 1), logit_rows=np.zeros(8, dtype=np.int64))
    assert GraphSizes(512, 8).padded(everything) == StepSize(16, 8, 8)


def test_no_size_is_beyond_the_programs_capacity() -> None:
    assert all(size.num_tokens <= 40 for size in GraphSizes(40, 256).all)
    assert max(size.num_seqs for size in GraphSizes(8192, 12).all) == 12
    assert len(set(GraphSizes(8192, 256).all)) == len(GraphSizes(8192, 256).all)


def test_the_largest_is_captured_first_and_what_it_took_is_reported() -> None:
    order: list[StepSize] = []
    memory = iter([1000, 1700])

    def run_of(size: StepSize) -> Run:
        order.append(size)
        return lambda: None

    graphs, report = capture_all(GraphSizes(64, 4), lambda run: run, run_of, lambda: next(memory))
    assert list(graphs) == order
    mixed, decodes = order[:-4], order[-3:]
    assert [size.num_tokens for size in mixed] == [64, 56, 48, 40, 32, 24, 16, 8][: len(mixed)]
    assert [size.num_tokens for size in decodes] == [4, 2, 1]
    assert (report.num_graphs, report.num_bytes) == (len(order), 700)
    assert report.seconds >= 0
