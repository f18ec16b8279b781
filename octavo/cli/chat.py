"""``octavo chat``: one answer, or a conversation, streamed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli import sampling
from octavo.cli.artifact import require_artifact
from octavo.ir.errors import OctavoError

if TYPE_CHECKING:
    from octavo.runtime.llm import LLM
    from octavo.runtime.sampling_params import SamplingParams


def chat(
    directory: Annotated[Path, typer.Argument(help="An artifact directory.", metavar="DIR")],
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Answer this and exit.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print tokens per second after each answer.")
    ] = False,
    max_tokens: sampling.MaxTokens = 1024,
    min_tokens: sampling.MinTokens = None,
    temperature: sampling.Temperature = 0.0,
    top_k: sampling.TopK = None,
    top_p: sampling.TopP = None,
    min_p: sampling.MinP = None,
    seed: sampling.Seed = None,
    stop: sampling.Stop = None,
    ignore_eos: sampling.IgnoreEos = False,
) -> None:
    """Talk with the model through its chat template. Ctrl-D ends a conversation."""
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

    from octavo.runtime.llm import LLM

    conversation = Conversation(LLM(directory), params, system, stats)
    if prompt is not None:
        conversation.answer(prompt)
        return
    _converse(conversation)


class Conversation:
    """The messages so far, and the model that answers them."""

    def __init__(
        self, llm: LLM, params: SamplingParams, system: str | None, show_stats: bool
    ) -> None:
        self.llm = llm
        self.params = params
        self.show_stats = show_stats
        self.messages: list[dict[str, str]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def answer(self, prompt: str) -> None:
        """Stream the answer to stdout. A turn that fails is not remembered."""
        messages = [*self.messages, {"role": "user", "content": prompt}]
        pieces: list[str] = []
        try:
            for piece in self.llm.stream_chat(messages, self.params):
                pieces.append(piece)
                print(piece, end="", flush=True)
        except BaseException:
            if pieces:
                print()  # what is said of the error begins a line
            raise
        print()
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        if self.show_stats:
            print(_stats_line(self.llm), file=sys.stderr)


def _converse(conversation: Conversation) -> None:
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            print()
            return
        if not prompt.strip():
            continue
        try:
            conversation.answer(prompt)
        except OctavoError as error:
            print(f"octavo: error: {error}", file=sys.stderr)


def _stats_line(llm: LLM) -> str:
    stats = llm.last_stats
    prefill = _rate(stats.prompt_tokens, stats.prefill_seconds)
    # The first token comes out of prefill, so the decode steps are one fewer than the tokens.
    decode = _rate(max(stats.output_tokens - 1, 0), stats.decode_seconds)
    return (
        f"prefill: {stats.prompt_tokens} tokens in {stats.prefill_seconds:.2f} s, {prefill}; "
        f"decode: {stats.output_tokens} tokens in {stats.decode_seconds:.2f} s, {decode}"
    )


def _rate(num_tokens: int, seconds: float) -> str:
    return f"{num_tokens / seconds:.1f} tokens/s" if seconds > 0 else "too few to time"
