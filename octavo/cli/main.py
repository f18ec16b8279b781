"""The ``octavo`` command itself: subcommands, ``--version``, and what an error looks like."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from typer.exceptions import TyperException

import octavo
from octavo.cli.bench import bench
from octavo.cli.bench_schedule import bench_schedule
from octavo.cli.bench_serve import bench_serve
from octavo.cli.chat import chat
from octavo.cli.check import check
from octavo.cli.compile import compile_command
from octavo.cli.evaluate import evaluate
from octavo.cli.generate import generate
from octavo.cli.inspect import inspect
from octavo.cli.serve import serve
from octavo.cli.top import top
from octavo.cli.tune import tune
from octavo.cli.two_words import TwoWordGroup
from octavo.ir.errors import OctavoError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="octavo",
    cls=TwoWordGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example:\n\noctavo compile ./SmolLM2-135M-Instruct -o smollm2\n\n"
    'octavo chat smollm2 -p "What is the capital of France?"',
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"octavo {octavo.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Compile language models into readable artifacts, and run them."""


app.command(
    "compile",
    epilog="Examples:\n\noctavo compile ./SmolLM2-135M-Instruct -o smollm2\n\n"
    "octavo compile model.gguf -o model --dtype bfloat16\n\n"
    "octavo compile config.json -o random --random-weights 0",
)(compile_command)
app.command(
    "evaluate",
    epilog="Examples:\n\noctavo evaluate smollm2-int4 --against ./SmolLM2-135M-Instruct\n\n"
    "octavo evaluate smollm2-int4 --against smollm2 --text book.txt --context 1024 --json",
)(evaluate)
app.command(
    "generate",
    epilog='Examples:\n\noctavo generate smollm2 -p "Once upon a time"\n\n'
    'octavo generate smollm2 -p "One" -p "Two" --max-tokens 32 --temperature 0.8 --seed 1\n\n'
    "octavo generate smollm2 --input prompts.jsonl --output answers.jsonl",
)(generate)
app.command(
    "chat",
    epilog="Examples:\n\noctavo chat smollm2\n\n"
    'octavo chat smollm2 -p "What is the capital of France?" --stats\n\n'
    'octavo chat smollm2 --system "Answer in one word." --temperature 0.7',
)(chat)
app.command(
    "serve",
    epilog="Examples:\n\noctavo serve smollm2\n\n"
    "octavo serve smollm2 --host 0.0.0.0 --api-key-file keys.txt --drain-timeout 120\n\n"
    "curl localhost:8000/v1/completions -H 'Content-Type: application/json' "
    '-d \'{"prompt": "Once"}\'',
)(serve)
app.command("top", epilog="Example:\n\noctavo top localhost:8000")(top)
app.command("check", epilog="Example:\n\noctavo check smollm2")(check)
app.command(
    "inspect",
    epilog="Examples:\n\noctavo inspect smollm2\n\noctavo inspect smollm2 --stage import\n\n"
    "octavo inspect smollm2 --diff 0 1",
)(inspect)
app.command(
    "bench",
    epilog="Examples:\n\noctavo bench smollm2 --batch-size 1,4,8,16 --output results.json\n\n"
    "octavo bench smollm2 --prefill 4x256 --startup\n\n"
    "octavo bench config.json --load-format dummy --requests requests.json",
)(bench)
app.command(
    "bench schedule",
    epilog="Examples:\n\noctavo bench schedule\n\n"
    "octavo bench schedule trace.jsonl --policies fcfs,priority --output figures.json\n\n"
    "octavo bench schedule --overhead",
)(bench_schedule)
app.command(
    "bench serve",
    epilog="Examples:\n\noctavo bench serve smollm2\n\n"
    "octavo bench serve smollm2 --streams 1,64 --repeats 5 --output figures.json",
)(bench_serve)
app.command(
    "tune",
    epilog="Examples:\n\noctavo tune llama\n\noctavo tune llama --seconds 60",
)(tune)


def main() -> None:
    """Run the command line and exit: 0 done, 2 the user's error, 130 interrupted."""
    try:
        status = app(prog_name="octavo", standalone_mode=False)
    except (OctavoError, OSError) as error:
        if os.environ.get("OCTAVO_DEBUG") == "1":
            raise
        sys.exit(_fail(_one_line(error)))
    except TyperException as error:
        sys.exit(_fail(_usage_line(error)))
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    if status == EXIT_INTERRUPTED:
        print("octavo: interrupted", file=sys.stderr)
    sys.exit(status or 0)


def _fail(text: str) -> int:
    print(f"octavo: error: {text}", file=sys.stderr)
    return EXIT_USER_ERROR


def _usage_line(error: TyperException) -> str:
    """What is wrong with the command line, and where its help is."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else _command_typed()
    return f"{error.format_message().rstrip('.')}; see '{command} --help'"


def _command_typed() -> str:
    """For an option with too few values, which Click reports without saying whose it is."""
    names = [command.name for command in app.registered_commands]
    return f"octavo {sys.argv[1]}" if sys.argv[1:2] and sys.argv[1] in names else "octavo"


def _one_line(error: Exception) -> str:
    """The error's text on one line; the system's errors as ``path: reason``."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split()) or type(error).__name__
