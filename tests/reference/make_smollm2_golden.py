"""Write tests/reference/smollm2_golden.json: what Hugging Face itself answers, in fp32 and fp64.

    python tests/reference/make_smollm2_golden.py PATH_TO_GGUF [PROMPT ...]

Named prompts are computed again and the rest of the file is kept; without names, all are.
Model, tokenizer and dequantisation are transformers' own (which wants the package `accelerate`);
nothing of Octavo is imported. For each prompt it stores the prompt's ids, 64 greedy tokens of the
eager fp32 model, and for each of them the log-probability in fp64 and the margin between the two
best logits. ``noise`` is the largest difference between the fp32 and the fp64 log-probabilities of
those tokens: what fp32 itself costs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

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


def main(path: Path, names: list[str]) -> None:
    """Load, answer, compare, write."""
    kept = json.loads(OUTPUT.read_text()) if names else {"noise": 0.0, "cases": []}
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(
        **where,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=GgufConfig(dequantize=True),
    ).eval()
    wanted = names or list(PROMPTS)
    prompts = {name: tokenizer(PROMPTS[name])["input_ids"] for name in wanted}
    tokens = {name: greedy(model, ids) for name, ids in prompts.items()}
    narrow = {name: teacher_forced(model, ids, tokens[name]) for name, ids in prompts.items()}
    model.double()
    cases = [case for case in kept["cases"] if case["name"] not in wanted]
    noise = kept["noise"]
    for name, ids in prompts.items():
        exact = teacher_forced(model, ids, tokens[name])
        best = exact.topk(2).values
        log_probs = chosen(exact, tokens[name])
        own = (chosen(narrow[name], tokens[name]).double() - log_probs).abs().max()
        noise = max(noise, float(own))
        cases.append(
            {
                "name": name,
                "prompt_token_ids": ids,
                "token_ids": tokens[name],
                "logprobs": [round(x, 9) for x in log_probs.tolist()],
                "margins": [round(x, 9) for x in (best[:, 0] - best[:, 1]).tolist()],
            }
        )
        print(f"{name}: {len(ids)} tokens, fp32 off by {own:.2e}")
    cases.sort(key=lambda case: list(PROMPTS).index(case["name"]))
    OUTPUT.write_text(json.dumps({"noise": noise, "cases": cases}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
