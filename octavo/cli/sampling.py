"""The options of sampling, shared by ``generate`` and ``chat``: a table, and what adds it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from octavo.runtime.sampling_params import SamplingParams

# By the names of SamplingParams: type, default and help. None keeps SamplingParams' own default.
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "max_tokens": (Annotated[int, typer.Option(help="Stop after this many new tokens.")], None),
    "min_tokens": (
        Annotated[int | None, typer.Option(help="Do not stop before this many new tokens.")],
        None,
    ),
    "temperature": (
        Annotated[float, typer.Option(help="0 always takes the likeliest token.")],
        0.0,
    ),
    "top_k": (
        Annotated[int | None, typer.Option(help="Sample among the K likeliest tokens.")],
        None,
    ),
    "top_p": (
        Annotated[
            float | None,
            typer.Option(help="Sample among the likeliest tokens of this total probability."),
        ],
        None,
    ),
    "min_p": (
        Annotated[
            float | None,
            typer.Option(help="Drop tokens less likely than this fraction of the likeliest one."),
        ],
        None,
    ),
    "repetition_penalty": (
        Annotated[
            float | None,
            typer.Option(help="Above 1: tokens of the prompt and the text are less likely again."),
        ],
        None,
    ),
    "presence_penalty": (
        Annotated[
            float | None,
            typer.Option(help="Above 0: tokens of the text are less likely again."),
        ],
        None,
    ),
    "frequency_penalty": (
        Annotated[
            float | None,
            typer.Option(help="Above 0: tokens of the text are less likely with each time."),
        ],
        None,
    ),
    "seed": (Annotated[int | None, typer.Option(help="The same seed gives the same text.")], None),
    "stop": (
        Annotated[
            list[str] | None,
            typer.Option(help="Stop before this text; may be given several times."),
        ],
        None,
    ),
    "ignore_eos": (
        Annotated[
            bool, typer.Option("--ignore-eos", help="Go on past the model's end of sequence.")
        ],
        False,
    ),
}

MakeParams = Callable[[], "SamplingParams"]


def sampling_options(**defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of sampling, with some ``defaults`` of its own.

    The command's parameter ``make_params`` takes their place in its signature: called, it gives
    the SamplingParams, or raises InvalidRequest.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**given: Any) -> None:
            options = {name: given.pop(name) for name in _OPTIONS}
            command(**given, make_params=functools.partial(_params, options))

        signature = inspect.signature(command, eval_str=True)
        own = [p for name, p in signature.parameters.items() if name != "make_params"]
        shared = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(name, default),
                annotation=annotation,
            )
            for name, (annotation, default) in _OPTIONS.items()
        ]
        run.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*own, *shared)}
        return run

    return decorate


def _params(options: dict[str, Any]) -> SamplingParams:
    from octavo.runtime.sampling_params import SamplingParams

    given = {name: value for name, value in options.items() if value not in (None, [])}
    return SamplingParams(**given)
