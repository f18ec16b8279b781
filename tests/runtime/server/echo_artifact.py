"""A toy artifact that answers a chat with the user's own last message: a test writes the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.runtime.toy_artifact import PROGRAM, write_toy_artifact

# The ids below are those of toy_artifact; "user\n" and "assistant\n" are 5 and 10 bytes.
_MIX = '''
EOS, IM_START, IM_END = 257, 258, 259


def mix(tokens, salt):
    """The next token of the user's last message, by far the likeliest; its end is EOS."""
    tokens = tokens.tolist()
    starts = [i for i, token in enumerate(tokens) if token == IM_START]
    logits = salt.clone()
    if len(starts) < 2:
        logits[EOS] = 50.0
        return logits
    message = tokens[starts[-2] + 6 :]
    message = message[: message.index(IM_END)]
    num_said = len(tokens) - (starts[-1] + 11)
    logits[message[num_said] if num_said < len(message) else EOS] = 50.0
    return logits
'''


def write_echo_artifact(folder: Path, **more: Any) -> None:
    """``more`` goes to write_toy_artifact."""
    program = PROGRAM.replace("from .kernels.src.mix import mix\n", _MIX)
    write_toy_artifact(folder, program=program, **more)
