"""Thousands of random steps: nothing is lost, nobody starves, every context is in order."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.runtime.batch import BatchBuilder
from octavo.runtime.block_manager import BlockManager
from octavo.runtime.executor import with_known_ids
from octavo.runtime.request import Request
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.scheduler import Scheduler, SchedulerConfig, StepPlan


class Replay:
    """A scheduler under random traffic, and a cache that remembers which token a slot holds."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.block_size = self.random.choice([1, 4, 16])
        num_blocks = self.random.randint(8, 40)
        self.config = SchedulerConfig(
            max_num_seqs=self.random.randint(1, 6),
            max_num_batched_tokens=self.random.randint(1, 40),
            long_prefill_token_threshold=self.random.choice([0, 3, 7]),
            watermark=self.random.choice([0.0, 0.01, 0.3]),
        )
        blocks = BlockManager(
            num_blocks, self.block_size, enable_prefix_caching=self.random.random() < 0.7
        )
        self.scheduler = Scheduler(self.config, blocks)
        self.stems = [self.tokens(self.random.randint(1, 30)) for _ in range(3)]
        self.max_len = (num_blocks - 1) * self.block_size + 1
        self.depth = self.random.choice([1, 2])
        self.batches = BatchBuilder(self.block_size)
        self.running: list[tuple[StepPlan, list[int]]] = []
        self.sampled: list[int] = []
        self.slots: dict[int, int] = {}
        self.live: dict[str, Request] = {}
        self.num_added = 0
        self.num_finished = 0

    def add(self) -> None:
        stem = self.random.choice(self.stems)
        kept = self.random.choice([0, len(stem), self.random.randint(0, len(stem))])
        prompt = stem[:kept] + self.tokens(self.random.randint(not kept, 12))
        if len(prompt) >= self.max_len:
            return
        params = SamplingParams(max_tokens=self.random.randint(1, 20))
        request = Request(str(self.num_added), prompt, params, max_model_len=self.max_len)
        self.scheduler.add(request)
        self.live[request.request_id] = request
        self.num_added += 1

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(1000) for _ in range(count)]

    def end(self, request: Request) -> None:
        self.scheduler.finish(request)
        del self.live[request.request_id]
        self.num_finished += 1

    def step(self) -> None:
        """Launch a step, and take the tokens of the one before if steps overlap."""
        plan = self.scheduler.schedule()
        self.scheduler.blocks.check()
        assert plan.sequences or self.running or not self.scheduler.has_unfinished
        if plan.sequences:
            assert plan.num_tokens <= self.config.max_num_batched_tokens
            assert len(plan.sequences) <= self.config.max_num_seqs
            tokens = self.write_and_read(plan)
            if self.random.random() < 0.1:
                return  # the step failed: it is planned again
            self.scheduler.begin(plan)
            self.running.append((plan, tokens))
            self.sampled = tokens
        if self.running and (len(self.running) == self.depth or not plan.sequences):
            self.finish_oldest()

    def finish_oldest(self) -> None:
        plan, tokens = self.running.pop(0)
        taken = self.scheduler.update(plan, tokens)
        requests = [s.request for s in plan.sequences if s.is_sampled]
        for request, is_taken in zip(requests, taken, strict=True):
            assert is_taken == (request.request_id in self.live)
            if is_taken and (request.is_at_limit or self.random.random() < 0.1):
                self.end(request)

    def write_and_read(self, plan: StepPlan) -> list[int]:
        """Run a step over the slots. Its tokens: the sum of the context, so that all agree on it"""
        batch = with_known_ids(self.batches.build(plan), np.array(self.sampled, dtype=np.int64))
        assert len(set(batch.slot_mapping.tolist())) == plan.num_tokens
        self.slots.update(zip(batch.slot_mapping.tolist(), batch.ids.tolist(), strict=True))
        tokens = []
        for row, sequence in enumerate(plan.sequences):
            length = int(batch.seq_lens[row])
            table = batch.block_table[row].tolist()
            places = [table[p // self.block_size] * self.block_size for p in range(length)]
            context = [self.slots[place + p % self.block_size] for p, place in enumerate(places)]
            known = sequence.request.token_ids
            assert context[: len(known)] == known[:length]
            assert length <= len(known) + 1
            if sequence.is_sampled:
                tokens.append((sum(context) * 31 + length) % 1000)
        return tokens


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_random_traffic(seed: int) -> None:
    replay = Replay(seed)
    for _ in range(100):
        if replay.random.random() < 0.3:
            replay.add()
        if replay.live and replay.random.random() < 0.05:
            replay.end(replay.random.choice(list(replay.live.values())))
        replay.step()
    for _ in range(20000):
        if not replay.live and not replay.running:
            break
        replay.step()
    assert not replay.live, "somebody starves"
    assert replay.num_finished == replay.num_added
    blocks = replay.scheduler.blocks
    assert blocks.num_free_blocks == blocks.num_usable_blocks
