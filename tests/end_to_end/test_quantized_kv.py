"""Models with a KV cache of codes say what Hugging Face says whose cache rounds in the same way.

The reference rounds by a few lines of its own, in float64. The rule is that of hf_reference.py with
more noise: a number between two codes may become either, and what that does is measured on the
reference, by moving all keys and values by as much as float32 may have them off.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_reference import HFReference, logprobs_of
from model_zoo import tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from octavo.compile import compile_model
from octavo.ir.errors import OctavoError
from octavo.runtime import load
from octavo.runtime.artifact import Artifact
from octavo.runtime.block_groups import block_groups, most_blocks
from octavo.runtime.errors import InvalidRequest
from octavo.runtime.llm import LLM
from octavo.runtime.outputs import RequestOutput
from octavo.runtime.sampling_params import SamplingParams
from tests.tolerances import REWRITE

QUANTIZED = Path(__file__).parents[1] / "frontend" / "data" / "quantized"
NUM_NEW_TOKENS = 24
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, logprobs=-1, detokenize=False
)
PROMPT_LENGTHS = (1, 5, 13, 40)
# Grouped heads and not, sliding windows and softcaps, learned positions, norms of heads; local
# layers that share the memory of global ones.
NAMES = ("llama", "qwen3", "gemma2", "gpt2", "mistral", "gemma3-local")


def fp8(x: Tensor) -> Tensor:
    """e4m3 with a scale of 1: 4 bits of exponent from 2**-6 on, 3 of fraction, 448 at most."""
    exponent = x.abs().clamp(min=2.0**-6).log2().floor()
    step = torch.exp2(exponent - 3)
    return ((x / step).round() * step).clamp(-448, 448)


def int8(x: Tensor) -> Tensor:
    """Whole numbers up to 127, times a scale for each token and head."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


class Rounding(DynamicCache):
    """Gives attention what a cache of codes would: ``round_k`` and ``round_v`` of k and v."""

    def __init__(self, round_k: Callable[..., Tensor], round_v: Callable[..., Tensor]) -> None:
        super().__init__()
        self.rounds = round_k, round_v

    def update(self, key_states: Tensor, value_states: Tensor, *rest: Any, **keywords: Any) -> Any:
        k, v = (f(x) for f, x in zip(self.rounds, (key_states, value_states), strict=True))
        return super().update(k, v, *rest, **keywords)


ROUNDS = {"fp8": fp8, "int8": int8}
LAST_BITS = REWRITE[torch.float32]  # next to the largest of a head
NUM_MOVED = 2


class RoundedReference(HFReference):
    """Hugging Face with a cache that rounds."""

    def __init__(self, directory: Path, round_: Callable[..., Tensor]) -> None:
        self._round = round_
        make = partial(Rounding, round_, round_)
        super().__init__(directory, torch.float32, _prompts(), NUM_NEW_TOKENS, make)

    @cached_property
    def noise(self) -> float:
        """Float32's own, and what the codes do that other last bits give."""
        texts = [p + a for p, a in zip(self.prompts, self.answers, strict=True)]
        moved = [self._moved(text, seed) for text in texts for seed in range(NUM_MOVED)]
        # A third of it: a port is one such run, where float32's noise is a sample of many sums.
        return max(super().noise, max(moved) / 3)

    def _moved(self, text: list[int], seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)

        def round_moved(x: Tensor) -> Tensor:
            drawn = torch.rand(x.shape, generator=generator, dtype=x.dtype) * 2 - 1
            return self._round(x + x.abs().amax(-1, keepdim=True) * LAST_BITS * drawn)

        got = logprobs_of(self._exact, text, partial(Rounding, round_moved, round_moved))
        return float((got - self.logprobs(text)).abs().max())


@dataclass(frozen=True)
class Compiled:
    """A tiny model's artifact, and what Hugging Face says with and without codes."""

    artifact: Path
    reference: HFReference
    plain: HFReference

    def check(self, outputs: list[RequestOutput], mode: str) -> None:
        for prompt, output in zip(self.reference.prompts, outputs, strict=True):
            answer = output.outputs[0]
            rows = torch.tensor(
                [[row[token].logprob for token in range(len(row))] for row in answer.logprobs or ()]
            )
            where = f"{mode}, prompt of {len(prompt)}"
            self.reference.check_continuation(prompt, answer.token_ids, rows, where)


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 256, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


@pytest.fixture(scope="module", params=[(n, kv) for kv in ROUNDS for n in NAMES], ids="-".join)
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    name, kv = request.param
    folder = tmp_path_factory.mktemp(f"{name}-{kv}")
    tiny_model(name, seed=0, dtype=torch.float32).save_pretrained(folder / "checkpoint")
    compile_model(
        folder / "checkpoint",
        folder / "artifact",
        dtype="float32",
        target="cpu",
        progress=False,
        kv_cache_dtype=kv,
    )
    plain = HFReference(folder / "checkpoint", torch.float32, _prompts(), NUM_NEW_TOKENS)
    reference = RoundedReference(folder / "checkpoint", ROUNDS[kv])
    return Compiled(folder / "artifact", reference, plain)


def generate(compiled: Compiled, **options: Any) -> tuple[LLM, list[RequestOutput]]:
    llm = LLM(compiled.artifact, max_logprobs=-1, check_invariants=True, **options)
    return llm, llm.generate(compiled.reference.prompts, GREEDY, use_tqdm=False)


def test_the_yardstick_sees_whether_there_are_codes(compiled: Compiled) -> None:
    """Not about Octavo: what rounding does is more than a port may be off."""
    text = compiled.reference.prompts[-1]
    gap = (compiled.reference.logprobs(text) - compiled.plain.logprobs(text)).abs().max()
    assert float(gap) > compiled.reference.limit


def test_all_prompts_in_one_batch(compiled: Compiled) -> None:
    compiled.check(generate(compiled)[1], "batch")


def test_prefill_in_chunks_of_seven(compiled: Compiled) -> None:
    llm, outputs = generate(compiled, long_prefill_token_threshold=7, max_num_seqs=2)
    compiled.check(outputs, "chunks of 7")
    assert llm.stats().num_steps > NUM_NEW_TOKENS, "nothing was cut"


def test_a_prefix_that_was_computed_before(compiled: Compiled) -> None:
    llm, _ = generate(compiled, block_size=4)
    outputs = llm.generate(compiled.reference.prompts, GREEDY, use_tqdm=False)
    compiled.check(outputs, "prefix cache")
    found = [(len(prompt) - 1) // 4 * 4 for prompt in compiled.reference.prompts]
    assert [output.num_cached_tokens for output in outputs] == found


def test_preempted_and_swapped_to_host_memory(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "MIN_LOAD_TOKENS", 4)
    longest = max(PROMPT_LENGTHS) + NUM_NEW_TOKENS
    groups = block_groups(Artifact.open(compiled.artifact).manifest.kv_slots)
    llm, outputs = generate(
        compiled,
        block_size=4,
        max_model_len=longest,
        long_prefill_token_threshold=8,
        num_gpu_blocks_override=most_blocks(groups, longest, 8, 4) + 2,
        kv_offload_gb=0.01,
    )
    compiled.check(outputs, "host memory")
    assert llm.stats().num_preemptions > 0, "the pool was not small enough to prove anything"
    assert llm.stats().num_loaded_blocks > 0, "nothing came back"


def test_another_cache_is_refused(compiled: Compiled) -> None:
    held = Artifact.open(compiled.artifact).kv_cache_dtype
    other = {"fp8": "int8", "int8": "fp8"}[str(held)]
    with pytest.raises(InvalidRequest, match=f"--kv-cache-dtype {other}"):
        LLM(compiled.artifact, kv_cache_dtype=other)
    LLM(compiled.artifact, kv_cache_dtype=held)


LAYERS, KV_HEADS = 2, 2


def _scales(scale: Tensor) -> dict[str, Tensor]:
    return {
        f"model.layers.{layer}.self_attn.{name}": scale.clone()
        for layer in range(LAYERS)
        for name in ("k_scale", "v_scale")
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scales") / "checkpoint"
    tiny_model("llama", seed=0, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kv", ["fp8", "int8"])
def test_scales_of_heads_from_a_file(kv: str, checkpoint: Path, tmp_path: Path) -> None:
    base = torch.tensor([0.01, 0.03])
    save_file(_scales(base), tmp_path / "scales.safetensors")
    compile_model(
        checkpoint,
        tmp_path / "out",
        dtype="float32",
        target="cpu",
        progress=False,
        kv_cache_dtype=kv,
        kv_scale_per="head",
        kv_scales=tmp_path / "scales.safetensors",
    )

    def rounded(x: Tensor) -> Tensor:
        scale = base.to(x.dtype).view(1, -1, 1, 1)
        values = x / scale
        return (fp8(values) if kv == "fp8" else values.round().clamp(-127, 127)) * scale

    reference = RoundedReference(checkpoint, rounded)
    compiled = Compiled(tmp_path / "out", reference, reference)
    compiled.check(generate(compiled)[1], "scales of heads")


@pytest.mark.parametrize("form", ["k_scale", "k_proj.k_scale", "k_proj.output_scale"])
def test_scales_of_a_quantised_checkpoint(form: str, tmp_path: Path) -> None:
    shutil.copytree(QUANTIZED / "ct-fp8-tensor", tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "model.safetensors"
    added = {
        f"model.layers.0.self_attn.{form}": torch.tensor([0.25]),
        f"model.layers.0.self_attn.{form.replace('k_', 'v_')}": torch.tensor([0.125]),
    }
    save_file({**load_file(path), **added}, path)
    compile_model(
        tmp_path / "checkpoint",
        tmp_path / "out",
        target="cpu",
        progress=False,
        kv_cache_dtype="fp8",
        kv_scales="checkpoint",
    )
    artifact = Artifact.open(tmp_path / "out")
    weights = artifact.load_weights(torch.device("cpu"))
    for side, scale in (("k_scale", 0.25), ("v_scale", 0.125)):
        [found] = [weight for name, weight in weights.items() if name.endswith(side)]
        assert found.tolist() == [scale] * KV_HEADS
    assert artifact.manifest.quant_schemes, "its linears are not quantised"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.self_attn.v_scale": None}, "has no model.layers.1.self_attn.v_scale"),
        ({"model.layers.0.self_attn.k_scale": torch.tensor(0.0)}, "above zero and finite"),
        ({"model.layers.0.self_attn.k_scale": torch.tensor(torch.nan)}, "above zero and finite"),
        ({"model.layers.0.self_attn.k_scale": torch.ones(3)}, "has 3 scales; expected 1 or 2"),
    ],
)
def test_scales_that_cannot_be_are_refused(
    change: dict[str, Tensor | None], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    scales = {k: v for k, v in {**_scales(torch.tensor(0.5)), **change}.items() if v is not None}
    save_file(scales, tmp_path / "scales.safetensors")
    with pytest.raises(OctavoError, match=message):
        compile_model(
            checkpoint,
            tmp_path / "out",
            dtype="float32",
            target="cpu",
            progress=False,
            kv_cache_dtype="fp8",
            kv_scales=tmp_path / "scales.safetensors",
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "fp8", "kv_scales": "checkpoint"}, "KV scales are absent"),
        ({"kv_cache_dtype": "fp8", "kv_scales": "nowhere"}, "no such file"),
        ({"kv_cache_dtype": "int8", "kv_scales": "checkpoint"}, "scales of tokens are made"),
        ({"kv_cache_dtype": "int8", "kv_scale_per": "head"}, "whole numbers; give --kv-scales"),
        ({"kv_scale_per": "head"}, "choose --kv-cache-dtype fp8 or int8"),
        ({"kv_cache_dtype": "fp4"}, "choose from auto, fp8, int8"),
        ({"kv_cache_dtype": "fp8", "target": "cuda:sm_90,sm_80"}, "sm_80 is to be .* int8"),
    ],
)
def test_options_that_cannot_be_are_refused(
    options: dict[str, Any], message: str, checkpoint: Path, tmp_path: Path
) -> None:
    given = {"target": "cpu", "dtype": "auto", **options}
    with pytest.raises(OctavoError, match=message):
        compile_model(checkpoint, tmp_path / "out", progress=False, **given)
