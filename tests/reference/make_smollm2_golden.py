"""Write tests/reference/smollm2_golden.json: what Hugging Face itself answers, in fp32 and fp64.

    python tests/reference/make_smollm2_golden.py PATH_TO_GGUF [--noise | PROMPT ...]

Named prompts are computed again and the rest of the file is kept; without names, all are. With
``--noise`` only the noise is measured again.
Model, tokenizer and dequantisation are transformers' own (which wants the package `accelerate`);
nothing of Octavo is imported. For each prompt it stores the prompt's ids, 64 greedy tokens of the
eager fp32 model, and for each of them the log-probability in fp64 and the margin between the two
best logits. ``noise`` is, for each dtype, the largest difference between the log-probabilities that
the eager model of that dtype gives those tokens and the fp64 ones: what the dtype itself costs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from smollm2_prompts import PROMPTS
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

NEW_TOKENS = 64
OUTPUT = Path(__file__).with_name("smollm2_golden.json")


@torch.inference_mode()
def greedy(model: PreTrainedModel, ids: list[int]) -> list[int]:
    """64 greedy tokens, end-of-sequence ignored, with Hugging Face's own cache."""
    out, cache, step = [], None, torch.tensor([ids])
    for _ in range(NEW_TOKENS):
        result = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        out.append(int(result.logits[0, -1].argmax()))
        step = torch.tensor([[out[-1]]])
    return out


@torch.inference_mode()
def teacher_forced(model: PreTrainedModel, ids: list[int], new: list[int]) -> torch.Tensor:
    """Logits that predict each new token: [64, vocab], in the model's dtype."""
    logits = model(input_ids=torch.tensor([ids + new]), use_cache=False).logits[0]
    return logits[len(ids) - 1 : -1].clone()


def chosen(logits: torch.Tensor, new: list[int]) -> torch.Tensor:
    """Log-probabilities of the new tokens."""
    return logits.log_softmax(-1).gather(1, torch.tensor(new)[:, None])[:, 0]


def gguf_as(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The eager model of a GGUF file, dequantised."""
    return AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=dtype,
        attn_implementation="eager",
        quantization_config=GgufConfig(dequantize=True),
    ).eval()


def answers(model: PreTrainedModel, prompts: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Greedy tokens of the fp32 model, which becomes fp64 for their log-probabilities."""
    tokens = {name: greedy(model, ids) for name, ids in prompts.items()}
    model.double()
    cases = []
    for name, ids in prompts.items():
        exact = teacher_forced(model, ids, tokens[name])
        best = exact.topk(2).values
        log_probs = chosen(exact, tokens[name])
        cases.append(
            {
                "name": name,
                "prompt_token_ids": ids,
                "token_ids": tokens[name],
                "logprobs": [round(x, 9) for x in log_probs.tolist()],
                "margins": [round(x, 9) for x in (best[:, 0] - best[:, 1]).tolist()],
            }
        )
        print(f"{name}: {len(ids)} tokens")
    return cases


def noise_of(model: PreTrainedModel, cases: list[dict[str, Any]]) -> float:
    """The largest error of a log-probability of the model, in the dtype that it is in."""
    worst = 0.0
    for case in cases:
        logits = teacher_forced(model, case["prompt_token_ids"], case["token_ids"])
        got = chosen(logits.float(), case["token_ids"]).double()
        exact = torch.tensor(case["logprobs"], dtype=torch.float64)
        worst = max(worst, float((got - exact).abs().max()))
    return worst


def main(path: Path, names: list[str]) -> None:
    """Answer, compare, write."""
    measure_only = names == ["--noise"]
    kept = json.loads(OUTPUT.read_text()) if names else {"noise": {}, "cases": []}
    wanted = [] if measure_only else names or list(PROMPTS)
    cases = [case for case in kept["cases"] if case["name"] not in wanted]
    if wanted:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        prompts = {name: tokenizer(PROMPTS[name])["input_ids"] for name in wanted}
        cases += answers(gguf_as(path, torch.float32), prompts)
    cases.sort(key=lambda case: list(PROMPTS).index(case["name"]))
    noise = kept["noise"]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        # Loaded anew: `.to(dtype)` would round rotary frequencies as well.
        found = noise_of(gguf_as(path, dtype), cases)
        noise[name] = max(found, noise.get(name, 0.0))
        print(f"{name} is off by {found:.2e}")
    OUTPUT.write_text(json.dumps({"noise": noise, "cases": cases}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
