"""Whatever happens in whatever order: the books are in order, and every answer is the model's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octavo.runtime import block_manager, prefix_hit
from octavo.runtime import request as request_module
from octavo.runtime.block_groups import FULL, BlockGroup, longest_sequence
from octavo.runtime.block_manager import BlockManager
from octavo.runtime.engine import Engine
from octavo.runtime.errors import EngineError
from octavo.runtime.host_tier import HostTier, Load
from octavo.runtime.outputs import RequestOutput
from octavo.runtime.policies import POLICIES
from octavo.runtime.prefix_cache import PrefixCache, block_key
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.scheduler import Scheduler, SchedulerConfig, StepPlan
from tests.runtime.fake_executor import POISON, VOCAB_SIZE, FakeExecutor, expected_answer

EOS = 3
# Prompts are prefixes of these and then something of their own: many share blocks.
STEMS = [[(i * i * (s + 1)) % 47 + 1 for i in range(24)] for s in range(3)]
FAULTS = ["launch_fault", "result_fault"]
INTERRUPTS = ["early_interrupt", "interrupt"]
TROUBLES = [None, *FAULTS, *INTERRUPTS]
# One group that keeps everything, as most models have; local and global layers; windows alone.
GROUPS = [
    (FULL,),
    (FULL, BlockGroup(window=5)),
    (FULL, BlockGroup(window=4), BlockGroup(window=9)),
    (BlockGroup(window=3),),
    (BlockGroup(window=7), BlockGroup(chunk=6)),
]
# A microsecond is over before the next step.
LIMITS = st.sampled_from([None, None, None, 0.001, 1e6])


class EngineMachine(RuleBasedStateMachine):
    """An engine over the fake device, under adds, aborts, steps and every kind of fault."""

    engine: Engine
    executor: FakeExecutor

    @initialize(
        num_blocks=st.integers(8, 30),
        block_size=st.sampled_from([1, 2, 4]),
        groups=st.sampled_from([GROUPS[0], *GROUPS]),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(1, 30),
        chunk=st.sampled_from([0, 3]),
        watermark=st.sampled_from([0.0, 0.2]),
        is_cached=st.sampled_from([True, True, True, False]),
        num_host_slots=st.sampled_from([0, 1, 8, 40, 200]),
        min_load=st.sampled_from([1, 1, 5]),
        is_async=st.booleans(),
        policy=st.sampled_from(POLICIES),
        ageing_seconds=st.sampled_from([1e-4, 60.0]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        groups: tuple[BlockGroup, ...],
        max_num_seqs: int,
        budget: int,
        chunk: int,
        watermark: float,
        is_cached: bool,
        num_host_slots: int,
        min_load: int,
        is_async: bool,
        policy: str,
        ageing_seconds: float,
    ) -> None:
        config = SchedulerConfig(max_num_seqs, budget, chunk, watermark, policy, ageing_seconds)
        usable, limit = num_blocks - 1, (num_blocks - 1) * block_size
        step = config.max_chunk_tokens
        self.max_len = longest_sequence(groups, usable, step, block_size, limit) + 1
        self.executor = FakeExecutor(block_size, groups)
        tier = HostTier(num_host_slots, min_load) if is_cached and num_host_slots else None
        self.engine = Engine(
            self.executor,
            BlockManager(
                num_blocks,
                block_size,
                groups=groups,
                enable_prefix_caching=is_cached,
                host_tier=tier,
            ),
            config,
            max_model_len=self.max_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS],
            async_scheduling=is_async,
            check_invariants=True,
            # Orders must not depend on how busy the machine is, or they could not be drawn again.
            clock=(2e-5 * tick for tick in itertools.count()).__next__,
        )
        self.expected: dict[str, list[int]] = {}
        self.poisoned: set[str] = set()
        self.early_ends: dict[str, set[str | None]] = {}
        self.num_added = 0

    @rule(
        stem=st.sampled_from(STEMS),
        kept=st.integers(0, 24),
        own=st.lists(st.integers(1, 49), min_size=1, max_size=6),
        is_poisoned=st.sampled_from([False] * 9 + [True]),
        max_tokens=st.integers(1, 12),
        salt=st.sampled_from([None, None, None, "a"]),
        priority=st.integers(-2, 2),
        client=st.sampled_from(["", "a", "b"]),
        deadline_ms=LIMITS,
        queue_timeout_ms=LIMITS,
    )
    def add(
        self,
        stem: list[int],
        kept: int,
        own: list[int],
        is_poisoned: bool,
        max_tokens: int,
        salt: str | None,
        priority: int,
        client: str,
        deadline_ms: float | None,
        queue_timeout_ms: float | None,
    ) -> None:
        prompt = [*stem[:kept], *([POISON] if is_poisoned else []), *own]
        if len(prompt) >= self.max_len:
            return
        name = str(self.num_added)
        self.num_added += 1
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False)
        self.engine.add_request(
            name,
            prompt,
            params,
            kind="final",
            cache_salt=salt,
            priority=priority if self.engine.scheduler.policy.heeds_priority else 0,
            deadline_ms=deadline_ms,
            queue_timeout_ms=queue_timeout_ms,
            client=client,
        )
        reasons = {"deadline": deadline_ms, "queue_timeout": queue_timeout_ms}
        self.early_ends[name] = {"abort", *(r for r, limit in reasons.items() if limit)}
        count = min(max_tokens, self.max_len - len(prompt))
        self.expected[name] = expected_answer(prompt, count, [EOS], self.executor.groups)
        if is_poisoned:
            self.poisoned.add(name)

    @rule(
        stem=st.sampled_from(STEMS),
        factor=st.integers(1, 46),
        out=st.sampled_from(TROUBLES),
        back=st.sampled_from(TROUBLES),
    )
    def come_back(self, stem: list[int], factor: int, out: str | None, back: str | None) -> None:
        """A prompt, one that needs every block and so evicts all that is cached, and the first
        again. What may go wrong does when blocks go out, or when they come back."""
        again = stem[: self.max_len - 2]
        flood = [factor * i % 47 + 1 for i in range(self.max_len - 1)]
        self.add(again, len(again) - 1, again[-1:], False, 1, None, 0, "", None, None)
        self.steps(10)
        self.add([], 0, flood, False, 1, None, 0, "", None, None)
        self.step_in_trouble(out)
        self.steps(10)
        self.add(again, len(again) - 1, again[-1:], False, 1, None, 0, "", None, None)
        self.step_in_trouble(back)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.expected)))
        output = self.engine.abort_request(name)
        assert output is not None
        self.ended(output)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @rule(kind=st.sampled_from(TROUBLES))
    def step_in_trouble(self, kind: str | None) -> None:
        trouble = KeyboardInterrupt() if kind in INTERRUPTS else RuntimeError("out of luck")
        if kind is not None:
            setattr(self.executor, kind, trouble)
        for _ in range(2 if kind in FAULTS else 1):  # where steps overlap, it shows in the second
            try:
                self.step()
            except EngineError:
                for name in [name for name in self.expected if not self.engine.is_live(name)]:
                    del self.expected[name]
            except KeyboardInterrupt:
                pass
        for each in (*FAULTS, *INTERRUPTS):
            setattr(self.executor, each, None)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.scheduler.blocks.reset_prefix_cache()

    @invariant()
    def books_are_in_order(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def step(self) -> None:
        for output in self.engine.step():
            self.ended(output)

    def ended(self, output: RequestOutput) -> None:
        expected = self.expected.pop(output.request_id)
        completion = output.outputs[0]
        is_poisoned = output.request_id in self.poisoned
        if completion.finish_reason in self.early_ends[output.request_id]:
            assert completion.token_ids == expected[: len(completion.token_ids)]
        else:
            assert (completion.finish_reason == "error") == is_poisoned
            assert completion.token_ids == ([] if is_poisoned else expected)

    def teardown(self) -> None:
        """Everybody comes to an end, and everything is free again."""
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_unfinished_requests():
                break
            self.step()
        assert not self.expected, "somebody starves"
        blocks = self.engine.scheduler.blocks
        assert blocks.num_free_blocks == blocks.num_usable_blocks


# Without shrinking, which takes minutes here: a failure prints its events as they came.
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
MACHINE = settings(max_examples=60, stateful_step_count=40, deadline=None, phases=PHASES)
TestEngine = EngineMachine.TestCase
TestEngine.settings = MACHINE


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thousands_of_orders() -> None:
    run_state_machine_as_test(EngineMachine, settings=settings(MACHINE, max_examples=2000))


# The machine is not blind: it sees each of these faults.


def keep_the_key(cache: PrefixCache, block_id: int) -> None:
    """An evicted block is still found."""


def publish_at_launch(scheduler: Scheduler, plan: StepPlan) -> None:
    """Blocks are shared before anybody knows whether their step succeeds."""
    BEGIN(scheduler, plan)
    for s in plan.sequences:
        scheduler.sharing.publish(s.request, s.start + s.num_tokens, s.tables)


def keep_one(blocks: BlockManager, name: str) -> None:
    """A block is lost whenever a request ends."""
    FREE(blocks, name)
    if blocks.pool._free:
        blocks.pool._free.popitem()


def tokens_only(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """What stands before a block does not matter."""
    return BLOCK_KEY(b"", token_ids)


def found_at_launch(tier: HostTier, names: Iterable[str]) -> None:
    """What a step saves is found before anybody knows whether the step succeeds."""
    saves = list(tier.drafted)
    LAUNCHED(tier, names)
    tier.commit(saves)


def lost_loads(tier: HostTier) -> None:
    """A plan that is not launched takes its loads with it."""
    BEGIN_PLAN(tier)
    for name in list(tier.loading):
        tier.withdraw(name)


def stays_on_the_host(tier: HostTier, name: str) -> Sequence[Load]:
    """What is found in host memory is not loaded."""
    return ()


def drop_one_too_many(
    blocks: BlockManager, name: str, num_computed: int, until: int, keep_from: int
) -> bool:
    """A block is given back that a window still shows."""
    return DROP_BEHIND(blocks, name, num_computed + blocks.block_size, until, keep_from)


def forget_the_window(*arguments: Any) -> int:
    """A hit counts although blocks of its window are gone."""
    length: int = arguments[2]
    return length


def same_key(key: bytes, group: int) -> bytes:
    """What one group has computed is found for another."""
    return key


BEGIN, PUBLISH, FREE, BLOCK_KEY = (
    Scheduler.begin,
    BlockManager.publish,
    BlockManager.free,
    block_key,
)
LAUNCHED, BEGIN_PLAN = HostTier.launched, HostTier.begin_plan
DROP_BEHIND = BlockManager.drop_behind


@pytest.mark.parametrize(
    ("where", "name", "fault"),
    [
        pytest.param(PrefixCache, "drop", keep_the_key, id="keep-key"),
        pytest.param(BlockManager, "free", keep_one, id="leak"),
        pytest.param(HostTier, "due", stays_on_the_host, id="not-loaded"),
        pytest.param(HostTier, "launched", found_at_launch, id="slot"),
        pytest.param(HostTier, "begin_plan", lost_loads, id="load"),
        pytest.param(Scheduler, "begin", publish_at_launch, id="early"),
        pytest.param(request_module, "block_key", tokens_only, id="key"),
        pytest.param(BlockManager, "drop_behind", drop_one_too_many, id="behind"),
        pytest.param(prefix_hit, "_windowed_length", forget_the_window, id="window"),
        pytest.param(block_manager, "group_key", same_key, id="group"),
    ],
)
def test_a_fault_is_seen(
    where: Any, name: str, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, fault)
    orders = settings(MACHINE, max_examples=1000, derandomize=True, database=None)
    # What the executor finds wrong ends the engine.
    with pytest.raises((AssertionError, KeyError, EngineError)):
        run_state_machine_as_test(EngineMachine, settings=orders)
