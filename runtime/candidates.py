"""Whether the candidates of a kernel module give the same results.

The first candidate is the one that all others are held against.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from octavo.runtime.kernel import Bucket
from octavo.runtime.module_calls import ModuleCall

# Relative distance of a row between two candidates: both round once, and sum in other orders.
_TOLERANCES = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9, torch.float32: 2.0**-11}

Candidate = dict[str, Any]


class GpuFault(Exception):
    """A kernel that broke this process's use of the GPU."""


def problem_of(error: Exception, device: torch.device) -> str:
    """An error as one line. Raises GpuFault when the GPU takes no work any more."""
    text = " ".join(str(error).split())[:200] or type(error).__name__
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            raise GpuFault(text) from error
    return text


@contextmanager
def chosen(bucket: Bucket, candidate: Candidate) -> Iterator[None]:
    """Run a bucket by a candidate inside the ``with``."""
    before = bucket.chosen
    bucket.chosen = dict(candidate)
    try:
        yield
    finally:
        bucket.chosen = before


def compare(call: ModuleCall, bucket: Bucket, device: torch.device) -> list[str | None]:
    """Run a call with each candidate: what is wrong with it, None if it gives what the first does.

    Results are filled with NaN before, so that a candidate that leaves some out is seen; a result
    that is also an operand gets back what was in it.
    """
    operands = {value.data_ptr() for value in call.args if isinstance(value, Tensor)}
    outs = [
        value
        for value in call.keywords.values()
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
    saved = [out.clone() if out.data_ptr() in operands else None for out in outs]
    wanted: list[Tensor] | None = None
    problems: list[str | None] = []
    for candidate in bucket.candidates:
        for out, content in zip(outs, saved, strict=True):
            out.fill_(torch.nan) if content is None else out.copy_(content)
        try:
            with chosen(bucket, candidate):
                got = [tensor.clone() for tensor in _results(call())]
            problem = None if wanted is None else _difference(got, wanted)
            wanted = got if wanted is None else wanted
        except Exception as error:
            problem = problem_of(error, device)
        problems.append(problem)
    return problems


def _results(returned: Any) -> list[Tensor]:
    several = returned if isinstance(returned, tuple | list) else (returned,)
    return [value for value in several if isinstance(value, Tensor)]


def _difference(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> str | None:
    """Compares row by row: one wrong row among many right ones is not to be averaged away."""
    for mine, theirs in zip(got, wanted, strict=True):
        if not theirs.is_floating_point():
            if not torch.equal(mine, theirs):
                return "its integers differ from the first candidate's"
            continue
        written = ~theirs.isnan()  # NaN: not written, as not every size wants every result
        if not torch.equal(~mine.isnan() & written, written):
            return "it leaves out or spoils what the first candidate gives"
        known = torch.where(written, theirs.double(), 0.0).flatten(0, -2)
        gap = torch.where(written, mine.double() - theirs.double(), 0.0).flatten(0, -2)
        scale = known.norm(dim=-1) + known.norm(dim=-1).mean()
        worst = float((gap.norm(dim=-1) / scale.clamp(min=1e-30)).max())
        if not worst <= _TOLERANCES[theirs.dtype]:
            return f"a row differs by {worst:.2g} from the first candidate's"
    return None
