"""``octavo generate``: continue one prompt or many."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli import sampling
from octavo.cli.artifact import require_artifact, require_tokenizer


def generate(
    directory: Annotated[Path, typer.Argument(help="An artifact directory.", metavar="DIR")],
    prompt: Annotated[
        list[str], typer.Option("--prompt", "-p", help="The prompt; may be given several times.")
    ],
    max_tokens: sampling.MaxTokens = 256,
    min_tokens: sampling.MinTokens = None,
    temperature: sampling.Temperature = 0.0,
    top_k: sampling.TopK = None,
    top_p: sampling.TopP = None,
    min_p: sampling.MinP = None,
    seed: sampling.Seed = None,
    stop: sampling.Stop = None,
    ignore_eos: sampling.IgnoreEos = False,
) -> None:
    """Continue the prompts as they stand, without a chat template, and print the new text."""
    require_artifact(directory)
    params = sampling.sampling_params(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop or None,
        ignore_eos=ignore_eos,
    )
    require_tokenizer(directory)

    from octavo.runtime.llm import LLM

    outputs = LLM(directory).generate(prompt, params, use_tqdm=sys.stderr.isatty())
    for number, (text, output) in enumerate(zip(prompt, outputs, strict=True), start=1):
        if len(prompt) > 1:
            print(f"--- {number}: {' '.join(text.split())[:80]}")
        print(output.outputs[0].text)
