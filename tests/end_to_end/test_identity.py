"""However requests are run, they get the tokens and log-probabilities that Hugging Face says.

Each answer of each way of running is judged by itself, see tests/request_reference.py: a token that
the reference decides can be no other, so that answers are the same but for near-ties.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_reference import HFReference
from model_zoo import tiny_model
from request_reference import RequestReference
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from octavo.compile import compile_model
from octavo.runtime.artifact import read_manifest
from octavo.runtime.block_groups import BlockGroup, block_groups, most_blocks
from octavo.runtime.llm import LLM
from octavo.runtime.outputs import RequestOutput
from octavo.runtime.prompts import Prompt
from octavo.runtime.sampling_params import SamplingParams
from tests.smollm2_golden import Golden

NUM_LOGPROBS = 5
BLOCK_SIZE = 4
LONGEST_PROMPT = 110
MOST_TOKENS = 16
LONGEST = LONGEST_PROMPT + MOST_TOKENS
OPTIONS: dict[str, Any] = {
    "block_size": BLOCK_SIZE,
    "max_model_len": LONGEST,
    "check_invariants": True,
}


@dataclass(frozen=True)
class Asked:
    """A request."""

    prompt: list[int]
    params: SamplingParams


@dataclass(frozen=True)
class Case:
    """An artifact, what is asked of it, and what Hugging Face says.

    ``least_decided`` is the share of tokens that the reference has to decide: among very many
    tokens more of those drawn are so unlikely that their two borders are closer than its noise.
    """

    artifact: Path
    requests: list[Asked]
    reference: RequestReference
    least_decided: float

    @property
    def has_windows(self) -> bool:
        return not all(group.is_full for group in self._groups)

    @property
    def _groups(self) -> tuple[BlockGroup, ...]:
        return block_groups(read_manifest(self.artifact).kv_slots)

    def blocks_of_longest(self, step_tokens: int) -> int:
        """Blocks that the longest request needs, computed in steps of so many tokens."""
        return most_blocks(self._groups, LONGEST, step_tokens, BLOCK_SIZE)

    def load(self, **options: Any) -> LLM:
        return LLM(self.artifact, **{**OPTIONS, **options})

    def check(self, outputs: Sequence[RequestOutput]) -> None:
        num_decided = num_tokens = 0
        for number, (asked, output) in enumerate(zip(self.requests, outputs, strict=True)):
            [answer] = output.outputs
            where = f"request {number}, {asked.params}"
            num_decided += self.reference.check(asked.prompt, asked.params, answer, where)
            num_tokens += len(answer.token_ids)
        share = num_decided / num_tokens
        assert share >= self.least_decided, f"the reference decides too little: {share:.3f}"


def random_requests(count: int, vocab_size: int) -> list[Asked]:
    """Prompts that begin alike for a while; half of them greedy, a third with a seed and filters,
    and the rest greedy with penalties."""
    rng = random.Random(0)
    prefixes = [rng.choices(range(3, vocab_size), k=80) for _ in range(5)]
    requests = []
    for _ in range(count):
        prefix = rng.choice(prefixes)[: rng.choice([0, 3, 4, 16, 37, 64, 80])]
        tail = rng.choices(range(3, vocab_size), k=rng.choice([1, 2, 5, 12, 30]))
        params = SamplingParams(
            max_tokens=rng.randint(4, MOST_TOKENS),
            ignore_eos=True,
            detokenize=False,
            logprobs=NUM_LOGPROBS,
            **_sampling(rng),
        )
        requests.append(Asked(prefix + tail, params))
    return requests


def _sampling(rng: random.Random) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.5:
        return {"temperature": 0.0}
    if kind < 0.67:
        return {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.4}
    filters: list[dict[str, Any]] = [
        {},
        {"top_k": rng.randint(2, 40)},
        {"top_p": rng.uniform(0.3, 0.95)},
        {"min_p": rng.uniform(0.01, 0.2)},
        {"top_k": 30, "top_p": 0.8, "min_p": 0.02, "presence_penalty": 0.5},
    ]
    return {
        "temperature": rng.uniform(0.5, 1.3),
        "seed": rng.randrange(2**40),
        **rng.choice(filters),
    }


def generate(llm: LLM, requests: Sequence[Asked]) -> list[RequestOutput]:
    prompts, params = [each.prompt for each in requests], [each.params for each in requests]
    return llm.generate(prompts, params, use_tqdm=False)


def one_by_one(case: Case) -> list[RequestOutput]:
    llm = case.load(max_num_seqs=1, enable_prefix_caching=False)
    return [generate(llm, [each])[0] for each in case.requests]


def all_at_once(case: Case) -> list[RequestOutput]:
    """Every prompt whole, in one step."""
    llm = case.load(
        max_num_seqs=len(case.requests),
        max_num_batched_tokens=sum(len(each.prompt) for each in case.requests),
        num_gpu_blocks_override=len(case.requests) * (LONGEST // BLOCK_SIZE + 1),
        enable_prefix_caching=False,
    )
    outputs = generate(llm, case.requests)
    most = max(each.params.max_tokens or 0 for each in case.requests)
    assert llm.stats().num_steps == most, "the prompts did not run together"
    return outputs


def with_the_prefix_cache(case: Case) -> list[RequestOutput]:
    llm = case.load(max_num_seqs=7)
    outputs = generate(llm, case.requests)
    stats = llm.stats()
    assert stats.prefix_cache_hits > stats.prefix_cache_queries / 4
    return outputs


def from_the_prefix_cache(case: Case) -> list[RequestOutput]:
    """Asked before: only the last block of each prompt is left to compute."""
    blocks = len(case.requests) * (LONGEST // BLOCK_SIZE + 1)
    llm = case.load(num_gpu_blocks_override=blocks)
    generate(llm, case.requests)
    outputs = generate(llm, case.requests)
    for asked, output in zip(case.requests, outputs, strict=True):
        whole = (len(asked.prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert output.num_cached_tokens == whole
    return outputs


def in_chunks(case: Case, size: int) -> list[RequestOutput]:
    llm = case.load(long_prefill_token_threshold=size, enable_prefix_caching=False)
    outputs = generate(llm, case.requests)
    sequences = llm.stats().counts.scheduled_sequences
    tokens = sum(each.params.max_tokens or 0 for each in case.requests)
    cuts = sum((len(each.prompt) - 1) // size for each in case.requests)
    assert cuts > 0
    assert sequences == tokens + cuts, "not every prompt was cut"
    return outputs


def in_chunks_of_5(case: Case) -> list[RequestOutput]:
    return in_chunks(case, 5)


def in_chunks_of_64(case: Case) -> list[RequestOutput]:
    return in_chunks(case, 64)


def in_a_small_pool(case: Case) -> list[RequestOutput]:
    """Blocks are shared, evicted and taken from those who run."""
    # In short chunks a window holds few blocks, so that whole contexts fill the pool.
    chunk = 16 if case.has_windows else 0
    llm = case.load(
        num_gpu_blocks_override=case.blocks_of_longest(chunk or LONGEST) + 2,
        long_prefill_token_threshold=chunk,
    )
    outputs = generate(llm, case.requests)
    stats = llm.stats()
    assert stats.num_preemptions > 0, "the pool was not small enough to prove anything"
    assert stats.prefix_cache_hits > 0
    return outputs


def each_preempted(case: Case) -> list[RequestOutput]:
    """The pool holds one long request, and one that fills it comes whenever somebody runs who has
    not been preempted yet. Everything is computed again."""
    llm = case.load(
        scheduling_policy="priority",
        ageing_ms=1e9,  # on a slow machine the last to be scheduled would age beyond the filler
        num_gpu_blocks_override=case.blocks_of_longest(LONGEST),
        enable_prefix_caching=False,
    )
    engine = llm.engine
    for number, each in enumerate(case.requests):
        llm.submit(str(number), Prompt(tuple(each.prompt)), each.params, "final")
    filler = Prompt(tuple(3 + place % 50 for place in range(LONGEST - 1)))
    alone = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        running = engine.scheduler.running.values()
        is_due = any(each.num_output_tokens and not each.num_preemptions for each in running)
        if is_due and not engine.is_live("filler"):
            llm.submit("filler", filler, alone, "final", priority=-1)
        outputs |= {output.request_id: output for output in engine.step()}
    found = [outputs[str(number)] for number in range(len(case.requests))]
    for number, output in enumerate(found):
        assert output.metrics is not None
        assert output.metrics.num_preemptions > 0, f"request {number} was never preempted"
    return found


WAYS: list[Callable[[Case], list[RequestOutput]]] = [
    one_by_one,
    all_at_once,
    with_the_prefix_cache,
    from_the_prefix_cache,
    in_chunks_of_5,
    in_chunks_of_64,
    in_a_small_pool,
    each_preempted,
]


def _cases() -> Iterator[Any]:
    for name in ("llama", "gemma2"):  # the second with windows, which are shorter than prompts
        yield pytest.param((name, 20), id=name)
        yield pytest.param((name, 200), id=f"{name}-200", marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def compiled(
    tmp_path_factory: pytest.TempPathFactory, traced: Callable[[str, Any], Any]
) -> Callable[[str], tuple[Path, Path]]:
    """``compiled("llama")``: the zoo's model as a checkpoint, and its artifact."""
    folders: dict[str, tuple[Path, Path]] = {}

    def compile_once(name: str) -> tuple[Path, Path]:
        if name not in folders:
            folder = tmp_path_factory.mktemp(name)
            checkpoint, artifact = folders[name] = folder / "checkpoint", folder / "artifact"
            tiny_model(name, seed=0).save_pretrained(checkpoint)
            with pytest.MonkeyPatch.context() as patch:
                # Tracing takes longest: all tests share one trace.
                patch.setattr("octavo.build.import_model", lambda _, dtype: traced(name, dtype))
                compile_model(checkpoint, artifact, target="cpu", progress=False)
        return folders[name]

    return compile_once


@pytest.fixture(scope="module", params=_cases())
def case(request: pytest.FixtureRequest, compiled: Callable[[str], tuple[Path, Path]]) -> Case:
    name, count = request.param
    checkpoint, artifact = compiled(name)
    requests = random_requests(count, vocab_size=256)
    longest = sorted((each.prompt for each in requests), key=len)[-6:]
    reference = HFReference(checkpoint, torch.float32, longest, MOST_TOKENS)
    return Case(
        artifact,
        requests,
        RequestReference(reference.logprobs, reference.limit),
        least_decided=0.97,
    )


@pytest.mark.parametrize("run", WAYS, ids=lambda run: run.__name__)
def test_tiny_models(case: Case, run: Callable[[Case], list[RequestOutput]]) -> None:
    case.check(run(case))


FAULTS: dict[str, dict[str, Any]] = {
    "another seed": {"seed": 8},
    "another temperature": {"temperature": 0.8},
    "one token more": {"top_k": 7},
    "one token less": {"top_k": 5},
    "no filter": {"top_k": 0},
    "a nucleus": {"top_p": 0.8},
    "a floor": {"min_p": 0.4},
    "another penalty": {"frequency_penalty": 0.5},
    "greedy": {"temperature": 0.0},
}


def test_the_yardstick_sees_a_small_fault(case: Case) -> None:
    """Not about Octavo: who runs other parameters than were asked for fails the rule."""
    right = SamplingParams(
        temperature=1.0, seed=7, top_k=6, max_tokens=50, ignore_eos=True, logprobs=NUM_LOGPROBS
    )
    prompt = case.requests[0].prompt
    asked = [Asked(prompt, replace(right, **fault)) for fault in ({}, *FAULTS.values())]
    good, *bad = generate(LLM(case.artifact), asked)
    case.reference.check(prompt, right, good.outputs[0], "no fault")
    for fault, output in zip(FAULTS, bad, strict=True):
        with pytest.raises(AssertionError, match=f"{fault}, token"):
            case.reference.check(prompt, right, output.outputs[0], fault)


@pytest.fixture(scope="module")
def smollm2_case(smollm2: Path, smollm2_gguf: Path) -> Case:
    model = _hugging_face_gguf(smollm2_gguf)
    known: dict[tuple[int, ...], Tensor] = {}

    @torch.inference_mode()
    def logprobs(ids: Sequence[int]) -> Tensor:
        key = tuple(ids)
        if key not in known:
            logits = model(input_ids=torch.tensor([key]), use_cache=False).logits[0]
            known[key] = logits.log_softmax(-1)
        return known[key]

    requests = random_requests(16, vocab_size=49152)
    limit = Golden.read().limit("float32")
    return Case(smollm2, requests, RequestReference(logprobs, limit), least_decided=0.9)


def _hugging_face_gguf(path: Path) -> Any:
    """By transformers' own reader, dequantised to float32, and exact from there on."""
    config = AutoConfig.for_model(**load_gguf_checkpoint(path)["config"])
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    found = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(found["tensors"], strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # which is tied
    model.tie_weights()
    return model.eval().double()


@pytest.mark.slow
@pytest.mark.parametrize("run", WAYS, ids=lambda run: run.__name__)
def test_smollm2(smollm2_case: Case, run: Callable[[Case], list[RequestOutput]]) -> None:
    smollm2_case.check(run(smollm2_case))
