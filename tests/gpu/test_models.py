"""Tiny models on the GPU, in bf16 and fp16, say what Hugging Face says: graphs on and off.

The rule and its tolerance are those of DESIGN section 8, see tests/hf_reference.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_reference import HFReference
from model_zoo import TINY

from octavo.runtime.artifact import read_manifest
from octavo.runtime.block_groups import block_groups, most_blocks
from octavo.runtime.llm import LLM
from octavo.runtime.outputs import RequestOutput
from octavo.runtime.sampling_params import SamplingParams
from tests.gpu.conftest import Compiled

pytestmark = pytest.mark.gpu

NUM_NEW_TOKENS = 24
# The windows of the zoo are 8 tokens wide: one prompt fits, one reaches beyond, one far beyond.
PROMPT_LENGTHS = (1, 5, 13, 40, 70)
DTYPES = ("bfloat16", "float16")
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, logprobs=-1, detokenize=False
)
# Without log-probabilities sampling is a part of the graphs.
IN_THE_GRAPH = SamplingParams(
    temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, detokenize=False
)


@lru_cache(maxsize=1)  # the tests of a model follow each other
def _reference(checkpoint: Path, dtype: torch.dtype) -> HFReference:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 256, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    return HFReference(checkpoint, dtype, prompts, NUM_NEW_TOKENS)


class Model:
    """A compiled tiny model and its reference."""

    def __init__(self, name: str, dtype: str, compiled: Compiled) -> None:
        checkpoint, self.artifact = compiled(name, dtype)
        self.reference = _reference(checkpoint, getattr(torch, dtype))

    def load(self, **options: Any) -> LLM:
        return LLM(
            self.artifact,
            max_logprobs=-1,
            max_num_seqs=16,
            max_num_batched_tokens=256,
            kv_cache_memory_bytes=16 << 20,
            skip_tokenizer_init=True,
            **options,
        )

    def check(self, outputs: list[RequestOutput], mode: str) -> None:
        for prompt, output in zip(self.reference.prompts, outputs, strict=True):
            answer = output.outputs[0]
            assert (len(answer.token_ids), answer.finish_reason) == (NUM_NEW_TOKENS, "length")
            rows = answer.logprobs or []
            logprobs = torch.tensor([[row[t].logprob for t in range(len(row))] for row in rows])
            self.reference.check_continuation(
                prompt, answer.token_ids, logprobs, f"{mode}, prompt of {len(prompt)}"
            )


def _cases() -> Iterator[Any]:
    for dtype in DTYPES:
        for name in TINY:
            yield pytest.param((name, dtype), id=f"{name}-{dtype}")


@pytest.fixture(scope="module", params=_cases())  # of a module: pytest then goes model by model
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    name, dtype = request.param
    return name, dtype


@pytest.fixture
def model(case: tuple[str, str], compiled: Compiled) -> Model:
    return Model(*case, compiled)


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_alone_and_in_a_batch(model: Model, eager: bool) -> None:
    prompts = model.reference.prompts
    llm = model.load(enforce_eager=eager)
    alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in prompts]
    model.check(alone, "alone")
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    model.check(together, "batch")
    without = llm.generate(prompts, IN_THE_GRAPH, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in without] == [o.outputs[0].token_ids for o in together]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_in_chunks(model: Model, eager: bool) -> None:
    llm = model.load(enforce_eager=eager, long_prefill_token_threshold=7)
    model.check(llm.generate(model.reference.prompts, GREEDY, use_tqdm=False), "chunks of 7")


def test_preempted_requests(model: Model) -> None:
    longest = max(map(len, model.reference.prompts)) + NUM_NEW_TOKENS
    groups = block_groups(read_manifest(model.artifact).kv_slots)
    # A window and a short chunk hold few blocks, all of the context holds many.
    chunk = 0 if all(group.is_full for group in groups) else 16
    blocks = most_blocks(groups, longest - 1, chunk or longest, 16) + 2
    llm = model.load(
        max_model_len=longest,
        num_gpu_blocks_override=blocks,
        long_prefill_token_threshold=chunk,
        check_invariants=True,
    )
    model.check(llm.generate(model.reference.prompts, GREEDY, use_tqdm=False), "small pool")
    assert llm.stats().num_preemptions > 0
