"""``octavo generate --input``: a file of requests in OpenAI's batch format."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import typer

from octavo.cli.artifact import require_artifact
from octavo.cli.serve import require_packages
from octavo.ir.errors import OctavoError

_OWN_OPTIONS = ("directory", "input", "output", "served_model_name", "result_cache_size")


def refuse_other_options(context: typer.Context) -> None:
    """The lines of the input say how they are sampled: refuse an option that would not count."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in _OWN_OPTIONS and source is not None and source.name == "COMMANDLINE":
            option = "--" + name.replace("_", "-")
            raise OctavoError(f"{option} has no effect with --input: put it into the lines' bodies")


def generate_batch(
    directory: Path,
    input_path: Path,
    output_path: Path,
    model_names: list[str],
    result_cache_size: int,
) -> None:
    """Answer the lines of a file that the output file does not answer yet."""
    require_packages()
    require_artifact(directory)

    from octavo.runtime.server.batch_file import recover_answers
    from octavo.runtime.server.batch_run import unanswered

    if input_path.resolve() == output_path.resolve():
        raise OctavoError(f"{output_path}: the output would overwrite the input")
    unanswered(input_path, set())  # all lines make sense, before anything of the output is touched
    finished = recover_answers(output_path)
    requests = unanswered(input_path, finished)
    if finished:
        print(f"octavo: {len(finished)} lines are answered already", file=sys.stderr)
    if not requests:
        return

    from octavo.runtime.async_llm import AsyncLLM
    from octavo.runtime.progress import progress_bar
    from octavo.runtime.server.app import ServerOptions
    from octavo.runtime.server.batch_run import run_batch

    # The file is the user's own, and so are the templates in it.
    names = tuple(model_names or [directory.resolve().name])
    options = ServerOptions(names, trusts_chat_templates=True)
    engine = AsyncLLM(directory, result_cache_size=result_cache_size)
    try:
        with progress_bar("Generating", len(requests)) as advance:
            num_errors = asyncio.run(run_batch(engine, options, requests, output_path, advance))
    finally:
        engine.shutdown()
    print(f"octavo: {len(requests)} lines answered, {num_errors} with an error", file=sys.stderr)
