"""AsyncLLM over the toy model, whose tokens tell every fault of the cache."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.llm import AsyncLLM as CompilingAsyncLLM
from octavo.runtime.async_llm import AsyncLLM
from octavo.runtime.errors import (
    EngineDeadError,
    EngineError,
    EngineStopped,
    InvalidRequest,
    QueueFull,
)
from octavo.runtime.llm import LLM
from octavo.runtime.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.runtime.request_stream import join_outputs
from octavo.runtime.sampling_params import SamplingParams

PROMPTS = ["a", "Grüße, 世界 🙂", "x" * 70, [5, 6, 7]]
LONG = SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.0)


@asynccontextmanager
async def started(folder: Path, **options: Any) -> AsyncIterator[AsyncLLM]:
    engine = AsyncLLM(folder, **options)
    try:
        yield engine
    finally:
        engine.shutdown()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 60)

    asyncio.run(limited())


async def last_output(outputs: AsyncIterable[RequestOutput]) -> RequestOutput:
    return [output async for output in outputs][-1]


async def last_of(
    engine: AsyncLLM, prompt: Any, params: SamplingParams, **how: Any
) -> CompletionOutput:
    return (await last_output(engine.generate(prompt, params, **how))).outputs[0]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


def params_of(index: int) -> SamplingParams:
    return SamplingParams(max_tokens=20 + index, seed=index, ignore_eos=True, logprobs=1)


def block_steps(engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no step end until the event is set."""
    released, step = threading.Event(), engine._engine.step
    monkeypatch.setattr(engine._engine, "step", lambda: (released.wait(30), step())[1])
    return released


@pytest.mark.parametrize("overlap", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", ["cumulative", "delta", "final"])
def test_all_at_once_gives_what_llm_gives_one_by_one(
    shared_toy: Path, kind: Any, overlap: bool
) -> None:
    alone = LLM(shared_toy)
    expected = [alone.generate([p], params_of(i))[0].outputs[0] for i, p in enumerate(PROMPTS)]

    async def gathered(engine: AsyncLLM, index: int) -> tuple[str, list[int], Any]:
        text, token_ids, logprobs = "", [], []
        stream = engine.generate(PROMPTS[index], params_of(index), output_kind=kind)
        async for output in stream:
            completion = output.outputs[0]
            if kind == "delta":
                text += completion.text
                token_ids += completion.token_ids
                logprobs += completion.logprobs
            else:
                text, token_ids = completion.text, completion.token_ids
                logprobs = completion.logprobs
        assert output.finished
        return text, token_ids, logprobs

    async def test() -> None:
        async with started(shared_toy, async_scheduling=overlap, max_num_seqs=3) as engine:
            found = await asyncio.gather(*(gathered(engine, i) for i in range(len(PROMPTS))))
            assert found == [(e.text, e.token_ids, e.logprobs) for e in expected]
            assert engine.num_requests == 0
            assert engine.stats().num_free_blocks == engine.stats().num_total_blocks

    run(test)


def test_a_conversation_is_tokenised_like_llm_chat(shared_toy: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    [expected] = LLM(shared_toy).chat(messages, params_of(0))

    async def test() -> None:
        async with started(shared_toy) as engine:
            prompt = await engine.prepare_chat(messages)
            output = await last_output(engine.generate(prompt, params_of(0)))
            assert output.prompt_token_ids == expected.prompt_token_ids
            assert output.outputs[0].text == expected.outputs[0].text

    run(test)


@pytest.mark.parametrize("way", ["aclose", "cancel", "abort"])
def test_an_early_end_frees_the_blocks_within_a_step(
    shared_toy: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with started(shared_toy) as engine:
            step, num_steps = engine._engine.step, 0

            def counted() -> Any:
                nonlocal num_steps
                num_steps += 1
                return step()

            monkeypatch.setattr(engine._engine, "step", counted)
            reasons: list[str | None] = []
            has_begun = asyncio.Event()

            async def consume() -> None:
                async for output in engine.generate("abc", LONG, "mine"):
                    has_begun.set()
                    reasons.append(output.outputs[0].finish_reason)

            task = asyncio.create_task(consume())
            await has_begun.wait()
            if way == "abort":
                engine.abort("mine")
                before = num_steps
                await task
                assert reasons[-1] == "abort"
            elif way == "cancel":
                task.cancel()
                before = num_steps
            else:
                stream = engine.generate("abc", LONG, "other")
                await anext(stream)
                task.cancel()
                await stream.aclose()
                before = num_steps
            await until(lambda: engine.num_requests == 0)
            assert num_steps <= before + 1
            stats = engine.stats()
            assert stats.num_free_blocks == stats.num_total_blocks
            assert stats.num_running == stats.num_waiting == 0

    run(test)


def test_a_cancelled_submission_leaves_nothing(
    shared_toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with started(shared_toy) as engine:
            released = block_steps(engine, monkeypatch)
            first = asyncio.create_task(last_of(engine, "a", params_of(0)))
            await until(lambda: engine.stats().num_waiting == 1)
            second = asyncio.create_task(last_of(engine, "b", LONG))
            await until(lambda: engine.num_requests == 2)
            second.cancel()
            released.set()
            await first
            await until(lambda: engine.num_requests == 0)
            assert engine.stats().num_free_blocks == engine.stats().num_total_blocks

    run(test)


def test_the_queue_is_bounded(shared_toy: Path) -> None:
    async def test() -> None:
        async with started(shared_toy, max_num_seqs=2, max_queued_requests=3) as engine:
            streams = [await engine.add_request(None, "a", LONG) for _ in range(5)]
            with pytest.raises(QueueFull, match=r"5 requests run or wait.*max_queued_requests=3"):
                await engine.add_request(None, "a", LONG)
            streams[0].close()
            await until(lambda: engine.num_requests == 4)
            async with await engine.add_request(None, "a", LONG) as taken:
                assert not (await anext(taken)).finished
            for stream in streams:
                stream.close()

    run(test)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ("", SamplingParams(), "the prompt is empty"),
        (["a", "b"], SamplingParams(), "one prompt is wanted here, got 2"),
        ([260], SamplingParams(), "token id 260"),
        ("a", SamplingParams(logprobs=99), "max_logprobs"),
    ],
)
def test_a_bad_request_is_refused_and_the_engine_lives(
    shared_toy: Path, prompt: Any, params: SamplingParams, words: str
) -> None:
    async def test() -> None:
        async with started(shared_toy) as engine:
            with pytest.raises(InvalidRequest, match=words):
                await last_of(engine, prompt, params)
            assert engine.num_requests == 0
            assert len((await last_of(engine, "a", params_of(0))).token_ids) == 20

    run(test)


def test_what_the_engine_refuses_is_refused_when_it_is_added(shared_toy: Path) -> None:
    async def test() -> None:
        async with started(shared_toy) as engine:
            with pytest.raises(TypeError, match="nonsense"):
                await engine.add_request(None, "a", LONG, nonsense=1)
            assert engine.num_requests == 0

    run(test)


def test_an_id_in_use_is_refused(shared_toy: Path) -> None:
    async def test() -> None:
        async with started(shared_toy) as engine, await engine.add_request("x", "a", LONG):
            with pytest.raises(InvalidRequest, match="'x' is in use"):
                await engine.add_request("x", "b", LONG)

    run(test)


def test_a_failing_step_ends_its_requests_and_the_engine_lives(
    shared_toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with started(shared_toy, max_num_seqs=2) as engine:
            executor, launch = engine._engine.executor, engine._engine.executor.launch
            failing = threading.Event()

            def fails_once(*arguments: Any) -> Any:
                if failing.is_set():
                    failing.clear()
                    raise ValueError("a bad step")
                return launch(*arguments)

            monkeypatch.setattr(executor, "launch", fails_once)
            streams = [await engine.add_request(None, "ab", LONG) for _ in range(3)]
            for stream in streams[:2]:
                await anext(stream)
            failing.set()
            for stream in streams[:2]:
                with pytest.raises(EngineError, match="a bad step"):
                    async for _ in stream:
                        pass
            # The third waited, was in no failing step, and runs now.
            assert not (await anext(streams[2])).finished
            streams[2].close()
            await engine.check_health()
            assert engine.is_ready
            assert len((await last_of(engine, "a", params_of(0))).token_ids) == 20

    run(test)


@pytest.mark.parametrize("cause", ["a fault of the scheduler", "a lost device"])
def test_what_cannot_go_on_is_reported_dead(
    shared_toy: Path, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with started(shared_toy) as engine:
            running = await engine.add_request(None, "a", LONG)
            await anext(running)

            def fails() -> Any:
                raise (EngineError if cause == "a lost device" else KeyError)(cause)

            monkeypatch.setattr(engine, "_is_device_alive", lambda: False)
            monkeypatch.setattr(engine._engine, "step", fails)
            with pytest.raises(EngineDeadError, match=cause):
                async for _ in running:
                    pass
            assert not engine.is_ready
            with pytest.raises(EngineDeadError, match=cause):
                await engine.check_health()
            with pytest.raises(EngineDeadError, match="start its process again"):
                await engine.add_request(None, "a", LONG)
            assert engine.num_requests == 0

    run(test)


def test_draining_finishes_what_was_taken_and_takes_no_more(shared_toy: Path) -> None:
    async def test() -> None:
        async with started(shared_toy, max_num_seqs=2) as engine:
            tasks = [
                asyncio.create_task(last_of(engine, p, params_of(i))) for i, p in enumerate(PROMPTS)
            ]
            await until(lambda: engine.num_requests == len(PROMPTS))
            assert not await engine.drain(timeout=0)
            assert not engine.is_ready
            with pytest.raises(EngineStopped, match="takes no more"):
                await engine.add_request(None, "a", LONG)
            assert await engine.drain()
            done = [await task for task in tasks]
            assert [len(each.token_ids) for each in done] == [20, 21, 22, 23]
            assert await engine.drain()
            await engine.check_health()

    run(test)


def test_shutdown_ends_what_runs_and_what_is_being_added(
    shared_toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with started(shared_toy) as engine:
            stream = await engine.add_request(None, "a", LONG)
            await anext(stream)
            late = asyncio.create_task(engine.add_request(None, "b", LONG))
            await until(lambda: engine.num_requests == 2)
            engine.shutdown()
            engine.shutdown()
            assert (await last_output(stream)).outputs[0].finish_reason == "abort"
            try:
                assert (await last_output(await late)).outputs[0].finish_reason == "abort"
            except EngineStopped:
                pass
            with pytest.raises(EngineStopped):
                await engine.add_request(None, "c", LONG)

    run(test)


def test_a_closed_event_loop_leaves_no_request_behind(shared_toy: Path) -> None:
    engine = AsyncLLM(shared_toy)
    loop = asyncio.new_event_loop()
    try:
        stream = loop.run_until_complete(engine.add_request(None, "a", LONG))
        loop.run_until_complete(anext(stream))
        loop.close()
        limit = time.monotonic() + 30
        while engine.num_requests and time.monotonic() < limit:
            time.sleep(0.01)
        assert engine.num_requests == 0
        assert engine.stats().num_free_blocks == engine.stats().num_total_blocks
    finally:
        engine.shutdown()


def test_tokenising_holds_up_neither_the_steps_nor_the_event_loop(shared_toy: Path) -> None:
    text = "some text that takes long to tokenise " * 8000

    async def test() -> None:
        async with started(shared_toy) as engine:
            tokenizer = engine.get_tokenizer()
            await engine.offload(tokenizer.encode, "warm")
            start = time.monotonic()
            seconds = asyncio.create_task(engine.offload(tokenizer.encode, text))
            longest, last = 0.0, time.monotonic()
            while not seconds.done():
                await asyncio.sleep(0.001)
                now = time.monotonic()
                longest, last = max(longest, now - last), now
            total = time.monotonic() - start
            assert total > 0.1, "the text is too short to tell"
            assert longest < total / 2

    run(test)


def test_a_slow_consumer_gets_deltas_joined() -> None:
    def delta(text: str, index: int, token: int, finish: str | None = None) -> RequestOutput:
        logprobs = [{token: Logprob(-1.0, 1, text)}]
        completion = CompletionOutput(index, text, [token], -1.0, logprobs, finish)
        return RequestOutput("id", "p", [1], [completion], finish is not None)

    said_once = replace(delta("b", 1, 6), prompt=None)
    first = join_outputs(delta("a", 0, 5), said_once, "delta")
    assert first.prompt == "p"
    joined = join_outputs(first, delta("c", 0, 7, "stop"), "delta")
    assert [(c.index, c.text, c.token_ids) for c in joined.outputs] == [
        (0, "ac", [5, 7]),
        (1, "b", [6]),
    ]
    assert joined.outputs[0].logprobs == [
        {5: Logprob(-1.0, 1, "a")},
        {7: Logprob(-1.0, 1, "c")},
    ]
    assert (joined.outputs[0].finish_reason, joined.finished) == ("stop", True)
    newest = join_outputs(delta("a", 0, 5), delta("ab", 0, 6), "cumulative")
    assert [c.text for c in newest.outputs] == ["ab"]


def test_the_front_doors_async_llm_compiles_like_its_llm() -> None:
    import octavo

    assert octavo.AsyncLLM is CompilingAsyncLLM
    assert CompilingAsyncLLM.llm_class is octavo.LLM
