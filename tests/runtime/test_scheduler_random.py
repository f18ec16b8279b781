"""Thousands of random steps: nothing is lost, nobody starves, every context is in order."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.runtime.batch import build_batch
from octavo.runtime.block_manager import BlockManager
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
        self.scheduler = Scheduler(self.config, BlockManager(num_blocks, self.block_size))
        self.max_len = (num_blocks - 1) * self.block_size + 1
        self.slots: dict[int, int] = {}
        self.live: dict[str, Request] = {}
        self.num_added = 0
        self.num_finished = 0

    def add(self) -> None:
        prompt = [self.random.randrange(1000) for _ in range(self.random.randint(1, 30))]
        if len(prompt) >= self.max_len:
            return
        params = SamplingParams(max_tokens=self.random.randint(1, 20))
        request = Request(str(self.num_added), prompt, params, max_model_len=self.max_len)
        self.scheduler.add(request)
        self.live[request.request_id] = request
        self.num_added += 1

    def end(self, request: Request) -> None:
        self.scheduler.finish(request)
        del self.live[request.request_id]
        self.num_finished += 1

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.scheduler.blocks.check()
        assert bool(plan.sequences) == self.scheduler.has_unfinished
        if not plan.sequences:
            return
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(plan.sequences) <= self.config.max_num_seqs
        self.write_and_read(plan)
        if self.random.random() < 0.1:
            return  # the step failed: it is planned again
        new = {s.request_id: self.random.randrange(1000) for s in plan.sequences if s.is_sampled}
        self.scheduler.update(plan, new)
        for request_id in new:
            if self.live[request_id].is_at_limit:
                self.end(self.live[request_id])

    def write_and_read(self, plan: StepPlan) -> None:
        batch = build_batch(plan, self.block_size)
        assert len(set(batch.slot_mapping.tolist())) == plan.num_tokens
        self.slots.update(zip(batch.slot_mapping.tolist(), batch.ids.tolist(), strict=True))
        for row, sequence in enumerate(plan.sequences):
            length = int(batch.seq_lens[row])
            table = batch.block_table[row].tolist()
            places = [table[p // self.block_size] * self.block_size for p in range(length)]
            context = [self.slots[place + p % self.block_size] for p, place in enumerate(places)]
            assert context == self.live[sequence.request_id].token_ids[:length]


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
        if not replay.live:
            break
        replay.step()
    assert not replay.live, "somebody starves"
    assert replay.num_finished == replay.num_added
    blocks = replay.scheduler.blocks
    assert blocks.num_free_blocks == blocks.num_usable_blocks
