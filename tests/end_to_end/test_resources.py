"""What compiling and loading SmolLM2 costs, in fresh processes: time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import OCTAVO, ROOT

from octavo.runtime.artifact import Artifact

pytestmark = pytest.mark.slow

COMPILE_SECONDS = 60
COMPILE_BYTES = 1.5 * 2**30
FIRST_TOKEN_SECONDS = 5
# The weights, PyTorch, and the pages of the KV cache that are used; not the cache's 4 GiB.
FIRST_TOKEN_BYTES = 1.5 * 2**30

FIRST_TOKEN = """
import sys
from octavo import LLM, SamplingParams

llm = LLM(sys.argv[1])
for piece in llm.stream("The capital of France is", SamplingParams(temperature=0, max_tokens=8)):
    print(piece, flush=True)
    break
"""


# A child's peak counts what its parent held when it was forked: so the parent is a small process.
MEASURE = """
import json, resource, subprocess, sys, time

start = time.monotonic()
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
seconds = time.monotonic() - start
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps([done.returncode, seconds, peak, done.stdout]))
"""


@dataclass(frozen=True)
class Cost:
    """Of a process from its start to its end: seconds and the most bytes it held."""

    seconds: float
    peak_bytes: int
    output: str


def run(*command: str) -> Cost:
    """Run a command alone, and measure it."""
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, *command], cwd=ROOT, stdout=subprocess.PIPE, check=True
    )
    status, seconds, peak, output = json.loads(measured.stdout)
    assert status == 0, output
    # Linux counts kilobytes, macOS bytes.
    return Cost(seconds, peak * (1 if sys.platform == "darwin" else 1024), output)


def test_compile(smollm2_gguf: Path, tmp_path: Path) -> None:
    output = tmp_path / "smollm2"
    cost = run(*OCTAVO, "compile", str(smollm2_gguf), "-o", str(output), "--target", "cpu")
    Artifact.open(output)
    assert cost.seconds < COMPILE_SECONDS, cost.output
    assert cost.peak_bytes < COMPILE_BYTES, f"{cost.peak_bytes / 2**30:.2f} GiB"


def test_from_nothing_to_the_first_token(smollm2: Path) -> None:
    run(sys.executable, "-c", FIRST_TOKEN, str(smollm2))  # files into the page cache
    cost = run(sys.executable, "-c", FIRST_TOKEN, str(smollm2))
    assert cost.output.strip(), "no token came"
    assert cost.seconds < FIRST_TOKEN_SECONDS
    assert cost.peak_bytes < FIRST_TOKEN_BYTES, f"{cost.peak_bytes / 2**30:.2f} GiB"
