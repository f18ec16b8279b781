"""``octavo generate``: continue one prompt or many."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.artifact import require_artifact, require_tokenizer
from octavo.cli.batch import generate_batch, refuse_other_options
from octavo.cli.sampling import MakeParams, sampling_options
from octavo.ir.errors import OctavoError


@sampling_options(max_tokens=256)
def generate(
    *,
    directory: Annotated[Path, typer.Argument(help="An artifact directory.", metavar="DIR")],
    context: typer.Context,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="The prompt; may be given several times."),
    ] = None,
    input: Annotated[
        Path | None, typer.Option(help="Answer the requests of this file: OpenAI's batch format.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where to: answers that are there are not made again.")
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="With --input: what its lines call the model. Default: DIR's name."),
    ] = None,
    result_cache_size: Annotated[
        int,
        typer.Option(
            help="With --input: answers to keep for equal lines, if greedy or seeded.", min=0
        ),
    ] = 0,
    make_params: MakeParams,
) -> None:
    """Continue the prompts as they stand, without a chat template, and print the new text.

    Or answer a file of requests; run again after an interruption, it goes on where it was.
    """
    if input is not None or output is not None:
        if input is None or output is None:
            raise OctavoError("--input and --output go together")
        refuse_other_options(context)
        generate_batch(directory, input, output, served_model_name or [], result_cache_size)
        return
    if result_cache_size:
        raise OctavoError("--result-cache-size has no effect without --input; leave it out")
    if not prompt:
        raise OctavoError("there is nothing to continue; give --prompt, or --input and --output")
    require_artifact(directory)
    params = make_params()
    require_tokenizer(directory)

    from octavo.runtime.llm import LLM

    outputs = LLM(directory).generate(prompt, params, use_tqdm=sys.stderr.isatty())
    for number, (text, result) in enumerate(zip(prompt, outputs, strict=True), start=1):
        if len(prompt) > 1:
            print(f"--- {number}: {' '.join(text.split())[:80]}")
        print(result.outputs[0].text)
