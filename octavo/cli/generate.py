"""``octavo generate``: continue one prompt or many."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.artifact import require_artifact, require_tokenizer
from octavo.cli.sampling import MakeParams, sampling_options


@sampling_options(max_tokens=256)
def generate(
    *,
    directory: Annotated[Path, typer.Argument(help="An artifact directory.", metavar="DIR")],
    prompt: Annotated[
        list[str], typer.Option("--prompt", "-p", help="The prompt; may be given several times.")
    ],
    make_params: MakeParams,
) -> None:
    """Continue the prompts as they stand, without a chat template, and print the new text."""
    require_artifact(directory)
    params = make_params()
    require_tokenizer(directory)

    from octavo.runtime.llm import LLM

    outputs = LLM(directory).generate(prompt, params, use_tqdm=sys.stderr.isatty())
    for number, (text, output) in enumerate(zip(prompt, outputs, strict=True), start=1):
        if len(prompt) > 1:
            print(f"--- {number}: {' '.join(text.split())[:80]}")
        print(output.outputs[0].text)
