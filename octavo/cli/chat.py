"""``octavo chat``: one answer, or a conversation, streamed."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.artifact import require_artifact, require_tokenizer
from octavo.cli.sampling import MakeParams, sampling_options
from octavo.ir.errors import OctavoError

if TYPE_CHECKING:
    from octavo.runtime.llm import LLM
    from octavo.runtime.sampling_params import SamplingParams


@sampling_options(max_tokens=1024)
def chat(
    *,
    directory: Annotated[Path, typer.Argument(help="An artifact directory.", metavar="DIR")],
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="Answer this and exit.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print tokens per second after each answer.")
    ] = False,
    make_params: MakeParams,
) -> None:
    """Talk with the model through its chat template.

    Ctrl-C ends an answer, Ctrl-D the conversation.
    """
    require_artifact(directory)
    if prompt == "":
        raise OctavoError("the prompt is empty; give at least one character")
    params = make_params()
    require_tokenizer(directory)

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
        """Stream the answer to stdout.

        A turn that fails is not remembered. Of one that KeyboardInterrupt ends, what was said is.
        """
        messages = [*self.messages, {"role": "user", "content": prompt}]
        pieces: list[str] = []
        try:
            with closing(self.llm.stream_chat(messages, self.params)) as stream:
                for piece in stream:
                    pieces.append(piece)
                    print(piece, end="", flush=True)
        except BaseException as error:
            if pieces:
                print()  # what is said of the error begins a line
                if isinstance(error, KeyboardInterrupt):
                    self._remember(messages, pieces)
            raise
        print()
        self._remember(messages, pieces)
        if self.show_stats:
            print(_stats_line(self.llm), file=sys.stderr)

    def _remember(self, messages: list[dict[str, str]], pieces: list[str]) -> None:
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]


def _converse(conversation: Conversation) -> None:
    is_terminal = _is_terminal()
    while True:
        try:
            prompt = input("> " if is_terminal else "")
        except EOFError:
            if is_terminal:
                print()  # the shell's prompt begins a line
            return
        if not prompt.strip():
            continue
        try:
            conversation.answer(prompt)
        except OctavoError as error:
            print(f"octavo: error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            if not is_terminal:
                raise  # nobody is there to say something else
            print("octavo: interrupted", file=sys.stderr)


def _is_terminal() -> bool:
    return sys.stdin.isatty()


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
