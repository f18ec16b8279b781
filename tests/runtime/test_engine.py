"""The engine over a fake device: what an interrupt leaves, and what the checker says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.runtime.block_manager import BlockManager
from octavo.runtime.engine import Engine
from octavo.runtime.errors import EngineError, InvariantError
from octavo.runtime.outputs import RequestOutput
from octavo.runtime.request import RequestStatus
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.scheduler import Scheduler, SchedulerConfig
from tests.runtime.fake_executor import VOCAB_SIZE, FakeExecutor, expected_answer


def make(*, overlap: bool = False, check: bool = False) -> tuple[Engine, FakeExecutor]:
    executor = FakeExecutor(block_size=4)
    engine = Engine(
        executor,
        BlockManager(20, 4, enable_prefix_caching=True),
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
        max_model_len=70,
        vocab_size=VOCAB_SIZE,
        async_scheduling=overlap,
        check_invariants=check,
    )
    return engine, executor


def add(engine: Engine, name: str, prompt: list[int], max_tokens: int = 6) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, detokenize=False)
    engine.add_request(name, prompt, params, kind="final")


def finish(engine: Engine) -> dict[str, RequestOutput]:
    outputs = []
    while engine.has_unfinished_requests():
        outputs.extend(engine.step())
    return {output.request_id: output for output in outputs}


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_an_interrupted_launch_changes_no_answer(overlap: bool, num_steps: int) -> None:
    """It has overwritten the sampled tokens, which the step that is planned anew would read."""
    engine, executor = make(overlap=overlap)
    add(engine, "a", [1, 2, 3])
    for _ in range(num_steps):
        engine.step()
    add(engine, "b", [9, 8])
    executor.interrupt = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    outputs = finish(engine)
    assert outputs["a"].outputs[0].token_ids == expected_answer([1, 2, 3], 6, [])
    assert outputs["b"].outputs[0].token_ids == expected_answer([9, 8], 6, [])


def lose_a_block(scheduler: Scheduler) -> None:
    scheduler.blocks.pool._free.popitem()


def hold_and_wait(scheduler: Scheduler) -> None:
    scheduler.blocks.allocate("ghost", 4)


def run_ahead(scheduler: Scheduler) -> None:
    scheduler.running["a"].num_computed_tokens += 5


def run_and_be_finished(scheduler: Scheduler) -> None:
    scheduler.running["a"].status = RequestStatus.FINISHED


def write_what_is_shared(scheduler: Scheduler) -> None:
    blocks = scheduler.blocks
    last = blocks.tables("a")[0][-1]
    blocks.pool.share(last)
    blocks.tables("b")[0].append(last)


def forget_who_runs(scheduler: Scheduler) -> None:
    scheduler.finish(scheduler.running["a"])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lose_a_block, "a block was lost"),
        (hold_and_wait, "those that hold blocks are not those that run"),
        (run_ahead, "a has computed"),
        (run_and_be_finished, "a runs and is finished"),
        (write_what_is_shared, "a is to write block"),
        (forget_who_runs, "other requests than the engine"),
    ],
)
def test_the_checker_names_what_is_wrong(fault: Callable[[Scheduler], None], message: str) -> None:
    engine, _ = make()
    add(engine, "a", [1, 2, 3, 4, 5])
    add(engine, "b", [9, 8])
    engine.step()
    engine.check()
    fault(engine.scheduler)
    with pytest.raises(InvariantError, match=message):
        engine.check()


@pytest.mark.parametrize("check", [False, True])
def test_the_checker_runs_after_each_step_where_it_is_asked_for(check: bool) -> None:
    engine, _ = make(check=check)
    add(engine, "a", [1, 2, 3, 4, 5])
    lose_a_block(engine.scheduler)
    if not check:
        engine.step()
        return
    with pytest.raises(InvariantError, match="a block was lost"):
        engine.step()


@pytest.mark.parametrize("num_prompt_tokens", [3, 4, 16, 17, 31])
@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
def test_equal_requests_compute_their_prompt_once(overlap: bool, num_prompt_tokens: int) -> None:
    """What n samples of a prompt cost: the first computes it, each other its last block's part."""
    engine, executor = make(overlap=overlap)
    prompt = [1 + i % 40 for i in range(num_prompt_tokens)]
    for name in "abcd":
        add(engine, name, prompt, max_tokens=1)
    outputs = finish(engine)
    for output in outputs.values():
        assert output.outputs[0].token_ids == expected_answer(prompt, 1, [])
    tail = (num_prompt_tokens - 1) % 4 + 1
    assert executor.num_tokens_computed == num_prompt_tokens + 3 * tail


@pytest.mark.parametrize("is_aborted", [False, True])
def test_who_ran_out_of_time_in_a_step_that_failed_is_still_shown(is_aborted: bool) -> None:
    engine, executor = make()
    add(engine, "a", [1, 2, 3])
    params = SamplingParams(temperature=0.0, detokenize=False)
    engine.add_request("late", [4, 5], params, deadline_ms=1e-6)
    executor.launch_fault = RuntimeError("out of luck")
    with pytest.raises(EngineError, match="out of luck"):
        engine.step()
    assert not engine.is_live("a")
    assert engine.is_live("late")
    assert engine.has_unfinished_requests()
    if is_aborted:
        outputs = [engine.abort_request("late"), *engine.step()]
    else:
        outputs = [*engine.step()]
    assert [o.outputs[0].finish_reason for o in outputs if o is not None] == ["deadline"]
    assert not engine.has_unfinished_requests()


def test_an_interrupt_before_the_late_are_shown_loses_nothing() -> None:
    engine, _ = make()
    params = SamplingParams(temperature=0.0, detokenize=False)
    for name in ("late", "later"):
        engine.add_request(name, [4, 5], params, deadline_ms=1e-6)
    engine.scheduler.schedule()  # and the interrupt comes here
    aborted = engine.abort_request("late")
    assert aborted is not None
    assert aborted.outputs[0].finish_reason == "abort"
    assert [output.request_id for output in engine.step()] == ["later"]
    assert not engine.has_unfinished_requests()
