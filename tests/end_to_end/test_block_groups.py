"""Local layers keep their window alone, and every answer is Hugging Face's.

The null block holds NaN all the while: whoever reads behind a window shows it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_reference import HFReference
from model_zoo import tiny_model
from torch import Tensor

from octavo.compile import compile_model
from octavo.runtime import load
from octavo.runtime.errors import CapacityError
from octavo.runtime.kv_cache import allocate_kv_caches
from octavo.runtime.llm import LLM
from octavo.runtime.outputs import RequestOutput
from octavo.runtime.sampling_params import SamplingParams
from tests.runtime.test_cuda_executor import with_graphs

NUM_NEW = 60
# The window is 8, a block 4: shorter than the window, across it, far beyond it.
LENGTHS = (5, 13, 61)
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=-1, detokenize=False
)


class Model:
    """A tiny model's artifact, and Hugging Face's model of it."""

    def __init__(self, name: str, folder: Path) -> None:
        tiny_model(name).save_pretrained(folder / "checkpoint")
        self.artifact = folder / "artifact"
        compile_model(
            folder / "checkpoint", self.artifact, dtype="float32", target="cpu", progress=False
        )
        generator = torch.Generator().manual_seed(2)
        prompts = [torch.randint(3, 256, (n,), generator=generator).tolist() for n in LENGTHS]
        self.reference = HFReference(folder / "checkpoint", torch.float32, prompts, NUM_NEW)

    def load(self, **options: Any) -> LLM:
        return LLM(
            self.artifact,
            **{"max_logprobs": -1, "check_invariants": True, "block_size": 4, **options},
        )

    def check(self, prompt: list[int], output: RequestOutput) -> None:
        """That the log-probabilities of what was sampled are the reference's."""
        for answer in output.outputs:
            assert len(answer.token_ids) == NUM_NEW
            want = self.reference.logprobs([*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
            worst = float((_logprobs(answer) - want).abs().max())
            assert worst <= self.reference.limit  # a NaN fails


def _logprobs(answer: Any) -> Tensor:
    return torch.tensor(
        [[row[token].logprob for token in range(len(row))] for row in answer.logprobs],
        dtype=torch.float64,
    )


@pytest.fixture(scope="module", params=["gemma3-local", "mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def nan_in_the_null_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*args: Any) -> list[tuple[Tensor, Tensor]]:
        caches = allocate_kv_caches(*args)
        for pair in caches:
            for cache in pair:
                cache[0] = torch.nan
        return caches

    monkeypatch.setattr(load, "allocate_kv_caches", allocate)


def _held(llm: LLM, prompt: list[int]) -> tuple[list[tuple[int, ...]], RequestOutput]:
    """The blocks of each group after each step of a request, and its output."""
    llm.engine.add_request("a", prompt, GREEDY, kind="final")
    held, outputs = [], []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
        held.append(llm.stats().num_group_blocks)
    return held[:-1], outputs[-1]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_window_holds_the_same_few_blocks_however_long_the_context(
    model: Model, is_async: bool
) -> None:
    prompt = model.reference.prompts[-1]
    llm = model.load(long_prefill_token_threshold=16, async_scheduling=is_async)
    held, output = _held(llm, prompt)
    model.check(prompt, output)
    by_group = list(zip(*held, strict=True))
    # One group that keeps everything and three with a window, or a window alone.
    full, windowed = by_group[:-3], by_group[-3:]
    for blocks in full:
        assert blocks[0] == 16  # the prompt
        assert max(blocks) == 30  # 61 tokens and 59 more: the last is never fed back
    for blocks in windowed:
        # A chunk of 16 tokens and the 7 before it touch 6 or 7 blocks, a token and 7 before it 3.
        assert max(blocks) <= 7 + 4 * is_async  # with a step in flight, whose blocks are not shared
        assert set(blocks[8:]) == {3}


@pytest.mark.parametrize("chunk", [3, 9, 16])
@pytest.mark.parametrize("is_cached", [False, True], ids=["alone", "cached"])
def test_chunks_on_either_side_of_the_window(model: Model, chunk: int, is_cached: bool) -> None:
    llm = model.load(long_prefill_token_threshold=chunk, enable_prefix_caching=is_cached)
    prompts = model.reference.prompts
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
        model.check(prompt, output)


def test_a_prefix_is_found_at_its_end_and_in_its_middle(model: Model) -> None:
    prompt = model.reference.prompts[-1]
    other = [*prompt[:41], *reversed(prompt[:20])]
    llm = model.load()
    found = []
    for each in (prompt, prompt, other):
        [output] = llm.generate([each], GREEDY, use_tqdm=False)
        model.check(each, output)
        found.append(output.num_cached_tokens)
    assert found == [0, 60, 40]


def test_samples_share_their_prompt(model: Model) -> None:
    prompt = model.reference.prompts[-1]
    params = SamplingParams(
        n=2,
        temperature=1.0,
        seed=7,
        max_tokens=NUM_NEW,
        ignore_eos=True,
        logprobs=-1,
        detokenize=False,
    )
    [output] = model.load().generate([prompt], params, use_tqdm=False)
    model.check(prompt, output)
    first, second = output.outputs
    assert first.token_ids != second.token_ids


def test_the_longest_sequence_is_what_the_blocks_of_all_groups_hold(model: Model) -> None:
    llm = model.load(num_gpu_blocks_override=30, long_prefill_token_threshold=16)
    num_groups = len(llm.stats().num_group_blocks)
    # 7 blocks for each window and the other 9, or no bound but the model's own. The last token
    # needs no room.
    assert llm.engine.max_model_len == {1: 256, 4: 9 * 4 + 1}[num_groups]
    if num_groups == 4:
        with pytest.raises(CapacityError, match=r"holds 36 tokens, too few .*\(31 blocks"):
            model.load(
                num_gpu_blocks_override=30, long_prefill_token_threshold=16, max_model_len=38
            )


def test_requests_give_way_and_come_back(model: Model) -> None:
    short, _, long = model.reference.prompts
    num_groups = len(model.load().stats().num_group_blocks)
    # Each comes to hold 3 blocks of a windowed group, and 16 or 30 of the one with everything.
    num_blocks = {1: 8, 4: 30 + 3 * 7 + 2}[num_groups]
    llm = model.load(
        num_gpu_blocks_override=num_blocks,
        max_model_len=len(long) + NUM_NEW,
        long_prefill_token_threshold=16,
    )
    prompts = [short, short, short, long]
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
        model.check(prompt, output)
    assert llm.stats().num_preemptions > 0


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
def test_the_executor_of_the_gpu_gives_each_group_its_tables(model: Model, graphs: bool) -> None:
    """Its inputs at fixed places and its padded sizes, on the CPU's program; a request that ends
    leaves blocks to another in the middle of it all."""
    llm = model.load(max_num_seqs=2, async_scheduling=True, long_prefill_token_threshold=16)
    with_graphs(llm, model.artifact, graphs=graphs)
    prompts = model.reference.prompts
    for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
        model.check(prompt, output)
