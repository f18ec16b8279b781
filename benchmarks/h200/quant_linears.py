"""Linears of quantised weights by themselves, every candidate of every scheme, on one GPU.

    python -m benchmarks.h200.quant_linears --output FILE [--seconds 150] [--compile-only 90]

The shapes are those of a layer of Llama-3.1-8B, with what is fused around them. A candidate is
timed as CUDA graphs over distinct weights, so that none is found in a cache, and its result is
compared with that of a dequantised weight in f32. Kernels are compiled by a process for each
processor while those that are there are measured, what counts most first. What fails is noted, and
the rest goes on; when the time is up, what there is is printed. ``--compile-only`` compiles for an
architecture what would be run, on any machine, and leaves it in the cache of kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.codegen.triton_layouts import TritonLayout
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.types import DTYPES
from octavo.runtime.binary_cache import BinaryCache
from octavo.runtime.compile_kernel import toolchain
from octavo.runtime.cross_compile import compile_all, specialisations
from octavo.runtime.errors import ArtifactError
from octavo.runtime.kernel import Launch, Workspace, recording
from octavo.runtime.kernel_binary import Specialisation
from octavo.runtime.tune import graph_seconds
from tests.linear_kernels import PLAIN
from tests.rendered_kernel import rendered

DEVICE = "cuda"
EPS = 1e-5
NORMED = {"norm_eps": EPS, "takes_sumsq": True}
STREAM = {"has_residual": True, "emit_sumsq": True}
# N, K, and what stands around.
SHAPES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "qkv": (6144, 4096, NORMED),
    "o": (4096, 4096, STREAM),
    "gate_up": (28672, 4096, {**NORMED, "activation": "silu"}),
    "down": (4096, 14336, STREAM),
}
SCHEMES: dict[str, str | None] = {
    "int4": "int4<1x128, bf16>",
    "fp8": "f8e4m3<1x*, f32, x=f8e4m3>",
    "bf16": None,
    "int8": "int8<1x*, f32, x=i8>",
}
ROWS = (1, 8, 256, 8192, 32, 64)  # what counts most first
_ENOUGH_BYTES = 1 << 30  # of distinct weights: many times any L2 cache
_MOST_WEIGHTS = 32
_CHECKED_ROWS = 64
# Of the largest value: x is rounded to 8 bits where a way may do that, else only the result.
_LIMITS = {"tiled": 0.08, "scaled": 0.08}
_LIMIT = 0.02


@dataclass
class Trial:
    """One candidate for a shape, a scheme and a number of rows: microseconds, or what is wrong."""

    shape: str
    scheme: str
    rows: int
    candidate: dict[str, Any]
    us: float | None = None
    error: float | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Linear:
    """A kernel module for a shape and a scheme, and operands for it."""

    shape: str
    scheme: str
    module: ModuleType

    @property
    def constants(self) -> dict[str, Any]:
        found: dict[str, Any] = self.module.CONSTANTS
        return found

    @property
    def layout(self) -> TritonLayout | None:
        text = SCHEMES[self.scheme]
        n, k, _ = SHAPES[self.shape]
        return None if text is None else TritonLayout.of(QuantScheme.parse(text), n, k)

    def weight(self, device: str) -> list[Tensor]:
        """A random weight, in parts."""
        n, k, _ = SHAPES[self.shape]
        layout = self.layout
        if layout is None:
            return [torch.empty(n, k, dtype=torch.bfloat16, device=device).normal_(0, k**-0.5)]
        parts = []
        for name, (dtype, shape) in layout.shapes().items():
            part = torch.empty(shape, dtype=DTYPES[dtype], device=device)
            if device != "meta":
                _fill(part, name, k, layout.scheme)
            parts.append(part)
        return parts

    def buffers(self, rows: int, device: str) -> dict[str, Any]:
        """Results and scratch memory for so many rows."""
        n, k, _ = SHAPES[self.shape]
        width = n // 2 if self.constants["activation"] else n
        made = {"out": ((rows, width), torch.bfloat16)}
        if self.constants["emit_sumsq"]:
            made["sumsq_out"] = ((rows, width // 64), torch.float32)
        if self.constants["norm_eps"] is not None:
            made["normed"] = ((rows, k), torch.bfloat16)
        if "wide" in self.module.run.__annotations__:
            made["wide"] = ((rows, n), torch.bfloat16)
        if self.constants.get("x_codes"):
            made["rounded"] = ((rows, k), DTYPES[self.constants["x_codes"]])
            made["row_scales"] = ((rows, 1), torch.float32)
        return {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in made.items()
        }

    def around(self, x: Tensor, rows: int) -> list[Tensor]:
        """Operands behind the weight."""
        found = []
        n, k, _ = SHAPES[self.shape]
        if self.constants["has_residual"]:
            found.append(torch.zeros(rows, n, dtype=torch.bfloat16, device=x.device))
        if self.constants["takes_sumsq"]:
            found.append(x.float().square().view(rows, k // 64, 64).sum(-1))
        return found

    def expected(self, x: Tensor, weight: list[Tensor]) -> Tensor:
        """What comes of the first rows, by way of the whole weight in f32."""
        layout, wide = self.layout, x[:_CHECKED_ROWS].float()
        if layout is None:
            matrix = weight[0].float()
        else:
            names = list(layout.shapes())
            matrix = layout.unpack(dict(zip(names, weight, strict=True))).dequantize()
        if self.constants["norm_eps"] is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        result = wide @ matrix.t()
        if self.constants["activation"]:
            gate, up = result.chunk(2, dim=-1)
            result = F.silu(gate) * up
        return result


def _fill(part: Tensor, name: str, k: int, scheme: QuantScheme) -> None:
    """Codes of any value but NaN, and scales that give weights of variance about 1 / K."""
    if name == "scales":
        spread = {"f8e4m3": 100.0, "int8": 74.0, "int4": 4.6}[scheme.codes]
        part.fill_(k**-0.5 / spread)
        part.mul_(torch.empty(part.shape, device=part.device).uniform_(0.5, 1.5).to(part.dtype))
    elif part.dtype == torch.float8_e4m3fn:
        part.copy_(torch.randn(part.shape, device=part.device).mul_(100).clamp_(-448, 448))
    else:
        most = torch.iinfo(part.dtype).max
        part.random_(-most, most + 1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all, or compile for what is to be measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="a JSON file for all trials")
    parser.add_argument("--seconds", type=float, default=150.0, help="begin nothing after these")
    parser.add_argument("--compile-only", type=int, metavar="ARCH", help="90 for sm_90")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES)
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    linears = [
        Linear(shape, scheme, _module(shape, scheme))
        for scheme in options.schemes
        for shape in options.shapes
    ]
    cases = [Case(linear, rows) for rows in options.rows for linear in linears]
    if options.compile_only is not None:
        compile_only(cases, options.compile_only)
        return
    trials: list[Trial] = []
    read = 0.0
    compiling = Compiling(cases, 90)
    compiling.start()
    try:
        with torch.inference_mode():
            read = read_bandwidth()
            for case in cases:
                measure(case, compiling, trials, end)
    except Exception:
        traceback.print_exc()
    finally:
        print_table(trials, read or 1.0)
        num_wanted, left = len(compiling.wanted), end - time.monotonic()
        print(f"{compiling.num_done} of {num_wanted} kernels compiled, {left:.0f} s left")
        if options.output is not None:
            content = {"read_bytes_a_second": read, "trials": [asdict(trial) for trial in trials]}
            options.output.write_text(json.dumps(content, indent=1))
        sys.stdout.flush()
        os._exit(int(not trials))  # processes may still be compiling


@dataclass(frozen=True)
class Case:
    """A linear for a number of rows."""

    linear: Linear
    rows: int

    def launches(self) -> list[Launch]:
        """What all candidates launch, learned on the meta device."""
        linear, rows = self.linear, self.rows
        workspace = Workspace.allocate("meta")
        x = torch.empty(rows, linear.constants["k"], dtype=torch.bfloat16, device="meta")
        with recording() as launches:
            for candidate in candidates(linear, rows):
                _chosen(linear, rows, candidate)
                linear.module.run(
                    x,
                    *linear.weight("meta"),
                    *linear.around(x, rows),
                    **linear.buffers(rows, "meta"),
                    workspace=workspace,
                )
        return launches


class Compiling(threading.Thread):
    """Compiles what cases launch, the first first, into the cache of kernels."""

    def __init__(self, cases: Sequence[Case], arch: int) -> None:
        super().__init__(daemon=True)
        self.stems: dict[Case, set[str]] = {}
        self.wanted: dict[str, Specialisation] = {}
        for case in cases:
            found = specialisations(case.launches(), arch)
            self.stems[case] = {each.stem for each in found}
            self.wanted |= {each.stem: each for each in found}
        self._done: set[str] = set()
        self._changed = threading.Condition()
        self._is_over = False

    @property
    def num_done(self) -> int:
        return len(self._done)

    def run(self) -> None:
        cache, missing = BinaryCache(), []
        for stem, each in self.wanted.items():
            if cache.find(each, toolchain=toolchain(each.arch)) is None:
                missing.append(each)
            else:
                self._add(stem)
        try:
            for each, binary in compile_all(missing):
                cache.keep(each, binary)
                self._add(each.stem)
        except ArtifactError as error:
            print(f"does not compile: {str(error)[:300]}", flush=True)
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _add(self, stem: str) -> None:
        with self._changed:
            self._done.add(stem)
            self._changed.notify_all()

    def wait_for(self, case: Case, seconds: float) -> bool:
        """Wait for the kernels of a case; True also if some will never come."""
        stems = self.stems[case]
        with self._changed:
            return self._changed.wait_for(lambda: self._is_over or stems <= self._done, seconds)


def _module(shape: str, scheme: str) -> ModuleType:
    n, k, around = SHAPES[shape]
    constants = {"k": k, "n": n} | PLAIN | around
    text, template = SCHEMES[scheme], "linear"
    if text is not None:
        template = "quant_linear"
        constants["sums_one_row"] = scheme == "int4" and constants["takes_sumsq"]
        constants |= TritonLayout.of(QuantScheme.parse(text), n, k).constants("bf16", "bf16")
    module = rendered("fused_linear", constants, template)
    module.CHOICES.reset(90)
    return module


def candidates(linear: Linear, rows: int) -> Iterator[dict[str, Any]]:
    """The ways to run so many rows: of bf16 the default and cuBLAS alone, and nowhere those that
    are there for a GPU with less shared memory."""
    bucket = linear.module.CHOICES.bucket(rows)
    default = bucket.default(90)
    for candidate in bucket.candidates:
        is_small = candidate["how"] == "skinny" and candidate["BM"] == 8 and rows > 8
        is_wanted = candidate["how"] == "torch" or (linear.scheme != "bf16" and not is_small)
        if candidate == default or is_wanted:
            yield candidate


def _chosen(linear: Linear, rows: int, candidate: dict[str, Any]) -> None:
    choices = linear.module.CHOICES
    choices.choose(choices.bucket(rows).name, candidate)


def compile_only(cases: list[Case], arch: int) -> None:
    """Compile what is not in the cache of kernels; what spills or fails is said."""
    begin, compiling, cache = time.monotonic(), Compiling(cases, arch), BinaryCache()
    compiling.run()
    for each in compiling.wanted.values():
        found = cache.find(each)
        if found is None:
            print(each.module, each.kernel, each.constants, each.options, "does not compile")
        elif found.info.stack_bytes or found.info.shared_bytes > 227 * 1024:
            info = found.info
            state = (
                f"{info.stack_bytes} B of stack, {info.registers} registers, {info.shared_bytes} B"
            )
            print(each.module, each.kernel, each.constants, each.options, state)
    print(f"{len(compiling.wanted)} kernels, {time.monotonic() - begin:.0f} s")


def read_bandwidth() -> float:
    """Bytes a second of a sum over 2 GiB."""
    block = torch.zeros(1 << 29, dtype=torch.float32, device=DEVICE)
    out = torch.empty((), device=DEVICE)
    seconds = graph_seconds(lambda: torch.sum(block, dim=0, out=out))
    return block.nbytes / seconds


def measure(case: Case, compiling: Compiling, trials: list[Trial], end: float) -> None:
    """Try all candidates of one case, until the time is up."""
    linear, rows = case.linear, case.rows
    if not compiling.wait_for(case, max(0.0, end - time.monotonic())):
        return
    weights, workspace = distinct_weights(linear), _workspace()
    x = torch.randn(rows, linear.constants["k"], device=DEVICE).bfloat16()
    around, buffers = linear.around(x, rows), linear.buffers(rows, DEVICE)
    want = linear.expected(x, weights[0])
    used = weights if rows <= 1024 else weights[:4]

    def call(weight: list[Tensor]) -> Tensor:
        result: Tensor = linear.module.run(x, *weight, *around, **buffers, workspace=workspace)
        return result

    for candidate in candidates(linear, rows):
        if time.monotonic() > end:
            return
        trial = Trial(linear.shape, linear.scheme, rows, candidate)
        trials.append(trial)
        _chosen(linear, rows, candidate)
        _try(trial, call, used, want)


@cache
def _workspace() -> Workspace:
    return Workspace.allocate(DEVICE)


@cache
def distinct_weights(linear: Linear) -> list[list[Tensor]]:
    """As many weights as no cache holds."""
    one = linear.weight(DEVICE)
    count = min(_MOST_WEIGHTS, max(4, _ENOUGH_BYTES // sum(part.nbytes for part in one) + 1))
    return [one, *(linear.weight(DEVICE) for _ in range(count - 1))]


def _try(
    trial: Trial, call: Callable[[list[Tensor]], Tensor], weights: list[list[Tensor]], want: Tensor
) -> None:
    try:
        errors = []
        for _ in range(3):  # a race need not show at once
            got = call(weights[0])[:_CHECKED_ROWS].float()
            errors.append(((got - want).abs().max() / want.abs().max()).item())
        trial.error = max(errors)
        if not trial.error <= _LIMITS.get(trial.candidate["how"], _LIMIT):
            trial.problem = f"is off by {trial.error:.3g}"

        def body() -> None:
            for weight in weights:
                call(weight)

        trial.us = graph_seconds(body) / len(weights) * 1e6
    except Exception as error:
        trial.problem = f"{type(error).__name__}: {str(error)[:120]}"


def print_table(trials: list[Trial], read: float) -> None:
    """The best candidate of each case, the default's time, and all problems."""
    print(f"read bandwidth {read / 1e12:.2f} TB/s; us, share of it in %, default's us if slower")
    cases: dict[tuple[str, str, int], list[Trial]] = {}
    for trial in trials:
        cases.setdefault((trial.shape, trial.scheme, trial.rows), []).append(trial)
    for (shape, scheme, rows), found in cases.items():
        timed = [(t.us, t) for t in found if t.us is not None and t.problem is None]
        if not timed:
            print(f"{shape} {scheme} {rows}: none works")
            continue
        us, best = min(timed, key=lambda pair: pair[0])
        n, k, _ = SHAPES[shape]
        text = SCHEMES[scheme]
        size = 2 * n * k if text is None else QuantScheme.parse(text).num_bytes(n, k)
        first = found[0].us
        default = f" ({first:.1f})" if first is not None and first > 1.01 * us else ""
        tile = "/".join(str(value) for value in best.candidate.values())
        tile = tile.replace("skinny", "s")
        share = 100 * size / (us * 1e-6) / read
        print(f"{shape} {scheme} {rows}: {us:.1f} {share:.0f}%{default} {tile}")
    problems = [trial for trial in trials if trial.problem is not None]
    for trial in problems[:12]:
        tile = "/".join(str(value) for value in trial.candidate.values())
        print(f"! {trial.shape} {trial.scheme} {trial.rows} {tile}: {trial.problem}"[:150])
    if len(problems) > 12:
        print(f"! and {len(problems) - 12} more problems")


if __name__ == "__main__":
    main()
