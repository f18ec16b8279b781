"""``octavo evaluate``: how much compiling has changed what a model says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.artifact import require_artifact

if TYPE_CHECKING:
    from rich.table import Table

    from octavo.evaluate.evaluate import Evaluation
    from octavo.evaluate.modules import ModuleError

_NUM_WORST = 10


def evaluate(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="An artifact directory.")],
    against: Annotated[
        str,
        typer.Option(help="What `octavo compile` takes, or another artifact directory."),
    ],
    text: Annotated[
        Path | None,
        typer.Option(help="A UTF-8 text file; a passage of some 7,000 tokens without it."),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of each window.")] = 512,
    stride: Annotated[
        int | None, typer.Option(help="Tokens from window to window; the context without it.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="Read no more of the text than this.")
    ] = None,
    modules: Annotated[
        bool, typer.Option("--modules/--no-modules", help="Compare what each module gives, too.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare an artifact with the model it was made of: perplexity, KL divergence, top token.

    The model runs in float32 by Hugging Face's own eager code, with its weights streamed; the
    artifact by its own program. What modules give is compared on 128 tokens, by the interpreter.
    """
    require_artifact(directory)
    from octavo.evaluate.evaluate import evaluate as run
    from octavo.evaluate.windows import WindowOptions
    from octavo.phases import Phases

    options = WindowOptions(context, context if stride is None else stride, max_tokens)
    with Phases(visible=True).shown() as phases, phases("evaluate") as tell:
        found = run(
            directory, against, text=text, options=options, with_modules=modules, progress=tell
        )
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    from rich.console import Console

    console = Console()
    console.print(_loss_table(found))
    if found.modules:
        console.print(_module_table("Residual stream after each layer", found.layers))
        console.print(_module_table("Worst modules", found.worst(_NUM_WORST)))


def _loss_table(found: Evaluation) -> Table:
    from rich.table import Table

    loss = found.loss
    table = Table(title="Loss", title_justify="left", box=None, show_header=False)
    rows = {
        "tokens": f"{loss.num_tokens:,}",
        "perplexity": f"{loss.perplexity:.4f}",
        "of the reference": f"{loss.reference_perplexity:.4f}",
        "increase": f"{loss.perplexity_increase:+.2%}",
        "KL divergence, mean": f"{loss.kl_mean:.3g} nats",
        "KL divergence, 99th percentile": f"{loss.kl_p99:.3g} nats",
        "same top token": f"{loss.top1_agreement:.2%}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _module_table(title: str, modules: list[ModuleError]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None)
    table.add_column("module", overflow="fold")
    table.add_column("relative error", justify="right")
    for module in modules:
        table.add_row(module.path, f"{module.error:.3g}")
    return table
