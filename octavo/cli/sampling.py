"""The options of sampling, shared by ``generate`` and ``chat``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from octavo.runtime.sampling_params import SamplingParams

MaxTokens = Annotated[int, typer.Option(help="Stop after this many new tokens.")]
MinTokens = Annotated[int | None, typer.Option(help="Do not stop before this many new tokens.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token.")]
TopK = Annotated[int | None, typer.Option(help="Sample among the K likeliest tokens.")]
TopP = Annotated[
    float | None, typer.Option(help="Sample among the likeliest tokens of this total probability.")
]
MinP = Annotated[
    float | None,
    typer.Option(help="Drop tokens less likely than this fraction of the likeliest one."),
]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
Stop = Annotated[
    list[str] | None, typer.Option(help="Stop before this text; may be given several times.")
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on past the model's end of sequence.")
]


def sampling_params(**options: Any) -> SamplingParams:
    """SamplingParams of the options that were given; the others keep its own defaults."""
    from octavo.runtime.sampling_params import SamplingParams

    return SamplingParams(**{name: value for name, value in options.items() if value is not None})
