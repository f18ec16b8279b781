"""Twelve architectures, in float32 and bfloat16, say what Hugging Face says, however they are run.

The rule and its tolerance are those of DESIGN section 8, see tests/hf_reference.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_reference import HFReference
from model_zoo import MORE, TINY, tiny_model
from torch import Tensor

from octavo.compile import compile_model
from octavo.frontend.source import open_weights, resolve
from octavo.frontend.trace import BoundWeights, Imported, import_model
from octavo.ir.graph import Graph
from octavo.ir.interpret import interpret
from octavo.ir.ops.paged import KVState
from octavo.ir.parser import parse_graph
from octavo.ir.printer import print_graph
from octavo.ir.types import KVType
from octavo.ir.verify import verify
from octavo.ir.weight_cache import WeightSource
from octavo.runtime import load
from octavo.runtime.artifact import read_manifest
from octavo.runtime.block_groups import block_groups, most_blocks
from octavo.runtime.llm import LLM
from octavo.runtime.outputs import RequestOutput
from octavo.runtime.sampling_params import SamplingParams

NUM_NEW_TOKENS = 24
# The windows of the zoo are 8 tokens wide: one prompt fits, one reaches beyond, one far beyond.
PROMPT_LENGTHS = (1, 5, 13, 40)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, logprobs=-1, detokenize=False
)


@dataclass(frozen=True)
class Compiled:
    """A tiny model's artifact, the weights that its stages ask for, and what Hugging Face says."""

    artifact: Path
    dtype: torch.dtype
    weights: WeightSource
    reference: HFReference

    def check(self, outputs: list[RequestOutput], mode: str) -> None:
        for prompt, output in zip(self.reference.prompts, outputs, strict=True):
            answer = output.outputs[0]
            assert (len(answer.token_ids), answer.finish_reason) == (NUM_NEW_TOKENS, "length")
            where = f"{mode}, prompt of {len(prompt)}"
            self.reference.check_continuation(prompt, answer.token_ids, _logprobs(answer), where)


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 256, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def _logprobs(answer: Any) -> Tensor:
    """``[tokens, vocab]`` of an answer that came with all its log-probabilities."""
    return torch.tensor(
        [[row[token].logprob for token in range(len(row))] for row in answer.logprobs]
    )


def _compile(name: str, dtype: str, folder: Path) -> Compiled:
    checkpoint, artifact = folder / "checkpoint", folder / "artifact"
    tiny_model(name, seed=0, dtype=DTYPES[dtype]).save_pretrained(checkpoint)
    imports: list[Imported] = []

    def remember(config: Any, dtype: torch.dtype) -> Imported:
        imports.append(import_model(config, dtype))
        return imports[-1]

    with pytest.MonkeyPatch.context() as patch:
        # Tracing takes longest: the test of the stages takes its buffers from the one trace.
        patch.setattr("octavo.build.import_model", remember)
        compile_model(checkpoint, artifact, dtype=dtype, target="cpu", progress=False)
    [imported] = imports
    # A bound below the config's, as longrope has, leaves no room for the longest.
    fitting = [p for p in _prompts() if len(p) + NUM_NEW_TOKENS <= imported.max_position]
    weights = BoundWeights(open_weights(resolve(checkpoint), imported.model), imported.buffers)
    reference = HFReference(checkpoint, DTYPES[dtype], fitting, NUM_NEW_TOKENS)
    return Compiled(artifact, DTYPES[dtype], weights, reference)


def _cases() -> Iterator[Any]:
    for dtype in DTYPES:
        for name in TINY:
            yield pytest.param((name, dtype), id=f"{name}-{dtype}")
        for name in MORE:
            yield pytest.param((name, dtype), id=f"{name}-{dtype}", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=_cases())
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Compiled once for all tests of this file; pytest keeps tests of one model together."""
    name, dtype = request.param
    return _compile(name, dtype, tmp_path_factory.mktemp(f"{name}-{dtype}"))


def _load(compiled: Compiled, **options: Any) -> LLM:
    return LLM(compiled.artifact, max_logprobs=-1, check_invariants=True, **options)


def _few_blocks(compiled: Compiled, block_size: int) -> dict[str, Any]:
    """Options for a pool that little more than holds the longest sequence. Those of windowed layers
    hold chunks of a prompt and the window: with short chunks that is few blocks too."""
    longest = max(map(len, compiled.reference.prompts)) + NUM_NEW_TOKENS
    groups = block_groups(read_manifest(compiled.artifact).kv_slots)
    chunk = 0 if all(group.is_full for group in groups) else 8
    needed = most_blocks(groups, longest - 1, chunk or longest, block_size)
    return {
        "block_size": block_size,
        "max_model_len": longest,
        "long_prefill_token_threshold": chunk,
        "num_gpu_blocks_override": needed + 2,
    }


def test_the_reference_decides_enough(compiled: Compiled) -> None:
    """Where its margins were all below the noise, any token would do."""
    least = {torch.float32: 0.95, torch.bfloat16: 0.15}
    assert compiled.reference.decisive() >= least[compiled.dtype]


def test_each_prompt_alone(compiled: Compiled) -> None:
    llm = _load(compiled, max_num_seqs=1)
    prompts = compiled.reference.prompts
    compiled.check([llm.generate([p], GREEDY, use_tqdm=False)[0] for p in prompts], "alone")


def test_all_prompts_in_one_batch(compiled: Compiled) -> None:
    llm = _load(compiled)
    compiled.check(llm.generate(compiled.reference.prompts, GREEDY, use_tqdm=False), "batch")
    assert llm.stats().num_steps == NUM_NEW_TOKENS, "the prompts did not run together"


def test_prefill_in_chunks_of_seven(compiled: Compiled) -> None:
    llm = _load(compiled, long_prefill_token_threshold=7)
    compiled.check(llm.generate(compiled.reference.prompts, GREEDY, use_tqdm=False), "chunks of 7")
    assert llm.stats().num_steps > NUM_NEW_TOKENS, "nothing was cut"


def test_a_prefix_that_was_computed_before(compiled: Compiled) -> None:
    llm = _load(compiled, block_size=4)
    prompts = compiled.reference.prompts
    llm.generate(prompts, GREEDY, use_tqdm=False)
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    compiled.check(outputs, "prefix cache")
    found = [(len(prompt) - 1) // 4 * 4 for prompt in prompts]
    assert [output.num_cached_tokens for output in outputs] == found


@pytest.mark.parametrize("block_size", [4, 16])
def test_a_pool_so_small_that_requests_are_preempted(compiled: Compiled, block_size: int) -> None:
    llm = _load(compiled, **_few_blocks(compiled, block_size))
    outputs = llm.generate(compiled.reference.prompts, GREEDY, use_tqdm=False)
    compiled.check(outputs, f"few blocks of {block_size}")
    assert llm.stats().num_preemptions > 0, "the pool was not small enough to prove anything"


def test_blocks_that_went_to_host_memory_and_back(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "MIN_LOAD_TOKENS", 4)
    llm = _load(compiled, **_few_blocks(compiled, 4), kv_offload_gb=0.01)
    outputs = llm.generate(compiled.reference.prompts, GREEDY, use_tqdm=False)
    compiled.check(outputs, "host memory")
    assert llm.stats().num_loaded_blocks > 0, "nothing came back"


def test_every_stage_verifies_round_trips_and_interprets(compiled: Compiled) -> None:
    ids = compiled.reference.prompts[-1]
    folder = compiled.artifact / "ir"
    stages = json.loads((folder / "index.json").read_text())["stages"]
    assert len(stages) > 10
    for stage in stages:
        text = (folder / stage["file"]).read_text("utf-8")
        graph = parse_graph(text)
        verify(graph)
        assert print_graph(graph, fold=True) == text, f"{stage['file']} does not round-trip"
        logits = interpret(graph, _inputs(graph, ids), compiled.weights)[0]
        assert isinstance(logits, Tensor)
        rows = logits.reshape(len(ids), -1)
        compiled.reference.check_rows(ids, rows, stage["file"])


def _inputs(graph: Graph, ids: list[int]) -> dict[str, Tensor | KVState]:
    """One prompt as the inputs of any stage: before and after attention became paged."""
    block_size, count = 4, len(ids)
    grouped = [v.shape[0] for v in graph.inputs if v.name == "slot_mapping" and v.type.rank == 2]
    num_blocks = -(-count // block_size) * math.prod(grouped)
    # Block 0 is the null block, and the blocks of a sequence need not be in order.
    table = torch.arange(num_blocks, 0, -1, dtype=torch.int32).view(*grouped, 1, -1)
    places = torch.arange(count)
    blocks = table[..., 0, places // block_size].long()
    known = {
        "ids": torch.tensor(ids),
        "positions": places,
        "slot_mapping": blocks * block_size + places % block_size,
        "block_table": table,
        "query_start": torch.tensor([0, count], dtype=torch.int32),
        "seq_lens": torch.tensor([count], dtype=torch.int32),
        "logit_rows": places,
    }
    inputs: dict[str, Tensor | KVState] = {}
    for value in graph.inputs:
        if isinstance(value.type, KVType):
            inputs[value.name] = KVState.empty(value.type, num_blocks + 1, block_size)
            continue
        # The import still has the batch of one that Hugging Face wants.
        has_batch = value.type.rank == known[value.name].ndim + 1
        inputs[value.name] = known[value.name][None] if has_batch else known[value.name]
    return inputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral", {"sliding_window": 9}),
        ("gemma2", {"sliding_window": 9}),
        ("gemma2", {"query_pre_attn_scalar": 16}),
        ("cohere", {"logit_scale": 0.45}),
        ("llama", {"rms_norm_eps": 0.1}),
    ],
)
def test_the_yardstick_sees_a_small_fault(
    name: str, change: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    """Not about Octavo: a model that is a little wrong fails the rule that the others pass."""
    model = tiny_model(name, seed=0, dtype=DTYPES[dtype])
    model.save_pretrained(tmp_path)
    prompts = _prompts()
    right = HFReference(tmp_path, DTYPES[dtype], prompts, NUM_NEW_TOKENS)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    wrong = HFReference(tmp_path, DTYPES[dtype], prompts[:1], 1)
    with pytest.raises(AssertionError, match="log-probabilities differ"):
        right.check_rows(prompts[-1], wrong.logprobs(prompts[-1]), f"{name} with {change}")
