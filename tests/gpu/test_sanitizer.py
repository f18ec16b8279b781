"""The kernels read and write nothing that is not theirs, says NVIDIA's compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = (sys.executable, "-m", "tests.gpu.sanitized_kernels")
FOUND = 9  # exit status


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Each tensor an allocation of its own: in PyTorch's pool its neighbours would be fair game."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "TRITON_INTERPRET": "0",
    }
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def sanitized(*arguments: str) -> subprocess.CompletedProcess[str]:
    memcheck = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", str(FOUND))
    done = run(*memcheck, *SCRIPT, *arguments)
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this device or its sandbox")
    return done


@pytest.fixture
def _compiled_kernels() -> None:
    """In the side cache: under the sanitizer nothing is left to compile."""
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("compute-sanitizer is not on the PATH; it is a part of the CUDA toolkit")
    done = run(*SCRIPT, "--beyond")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.usefixtures("_compiled_kernels")
def test_memcheck_finds_a_planted_fault_and_no_other() -> None:
    done = sanitized()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout
    assert "compiling" not in done.stderr
    planted = sanitized("--beyond")
    assert planted.returncode == FOUND, planted.stdout[-4000:] + planted.stderr[-1000:]
    assert "Invalid __global__ write" in planted.stdout
    assert "beyond" in planted.stdout
