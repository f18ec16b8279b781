"""A quantised model says on the GPU what Hugging Face says with the weights that its codes are of.

Prompts of few tokens and of many, and single rows behind them, take every kind of product. The
weights of norms are ones: for a GPU they are folded into the linears before these are quantised.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from torch import Tensor

from octavo.compile import compile_model
from octavo.llm import LLM
from octavo.runtime.sampling_params import SamplingParams
from tests.end_to_end.test_quantized import (
    forget_norms,
    hf_logprobs,
    hf_model,
    quantized_state,
    random_llama,
    scheme_of,
)
from tests.runtime.toy_artifact import byte_tokenizer

pytestmark = pytest.mark.gpu

# Where x is rounded to 8 bits as well, in a step of more than 64 rows: the largest code.
ROUNDS_X = {"fp8": 448.0, "fp8-tensor": 448.0, "fp8-block": 448.0, "int8-w8a8": 127.0}
NAMES = ["int8", "int4-g64", "int4-g32", "int4-asym-g32", "mxfp4", *ROUNDS_X]
PROMPTS = [[5, 17, 40, 3, 99, 61, 8], [7], [(7 * i * i + 3 * i) % 251 for i in range(90)]]


@pytest.fixture
def checkpoint(session_dir: Path) -> Path:
    folder = session_dir / "llama-without-norm-weights"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            with torch.device("cpu"):
                forget_norms(random_llama()).save_pretrained(folder)
            byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def round_inputs(model: Any, largest: float) -> None:
    """Let linears but the head read rows of 8 bits, of which the largest has the largest code."""

    def rounded(_: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        x = inputs[0].float()
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / largest
        codes = x / scale
        codes = codes.round() if largest == 127 else codes.to(torch.float8_e4m3fn).float()
        return (codes * scale).to(inputs[0].dtype)

    for key, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and key != "lm_head":
            module.register_forward_pre_hook(rounded)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "bfloat16") for name in NAMES), ("int4-g32", "float16"), ("fp8", "float16")],
)
def test_a_quantised_model_says_what_its_codes_say(
    name: str, dtype: str, checkpoint: Path, tmp_path: Path
) -> None:
    artifact = tmp_path / "artifact"
    compile_model(checkpoint, artifact, dtype=dtype, target="cuda", quant=name, progress=False)
    with torch.device("cpu"):
        exact = copy.deepcopy(hf_model(checkpoint)).double()
        state = exact.state_dict()
        quantized_state(artifact, scheme_of(artifact), state, "triton")
        exact.load_state_dict(state)
        narrow = copy.deepcopy(exact).to(getattr(torch, dtype))
        rounding = copy.deepcopy(narrow)
        if name in ROUNDS_X:
            round_inputs(rounding, ROUNDS_X[name])

    llm = LLM(artifact, kv_cache_memory_bytes=1 << 24)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=5, ignore_eos=True)
    for ids in PROMPTS:
        # Each in steps of its own: few rows are not rounded to 8 bits.
        [answer] = llm.generate([{"prompt_token_ids": ids}], params)[0].outputs
        text = [*ids, *answer.token_ids]
        with torch.device("cpu"):
            held = rounding if len(ids) > 64 else narrow
            want = hf_logprobs(exact, text)[len(ids) - 1 : -1]
            noise = (hf_logprobs(held, text)[len(ids) - 1 : -1] - want).abs().max()
        limit = 3 * float(noise)
        for row, found in zip(want, answer.logprobs, strict=True):
            for token, logprob in found.items():
                gap = abs(logprob.logprob - float(row[token]))
                assert gap <= limit, f"{len(ids)} tokens: {gap:.4f}, at most {limit:.4f}"
