"""What tests of several folders share: the real model, fetched and compiled once a session."""

from __future__ import annotations

import gc
import importlib.util
import os
import pickle
import subprocess
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

# Kernels are tested without a GPU; Triton reads this when it is first imported.
os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # More threads than processors make everything slower; PyTorch reads this likewise.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from filelock import FileLock

if os.environ["TRITON_INTERPRET"] == "1" and importlib.util.find_spec("triton") is not None:
    from tests import quick_interpreter, triton_interpreter

    triton_interpreter.install()
    quick_interpreter.install()

# Test processes compile side by side: together they start one worker for each processor.
_NUM_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
os.environ.setdefault(
    "OCTAVO_COMPILE_WORKERS", str(max(1, (os.cpu_count() or 1) // _NUM_PROCESSES))
)

ROOT = Path(__file__).resolve().parent.parent
GGUF = ROOT / ".cache" / "demo.gguf"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What all the imports make lives on: garbage is not looked for there, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def session_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all workers of this test session see."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if base.name.startswith("popen-") else base


@pytest.fixture(scope="session", autouse=True)
def _own_cache(session_dir: Path) -> None:
    """Keep the user's cache out of the tests, unless OCTAVO_CACHE says which to use."""
    os.environ.setdefault("OCTAVO_CACHE", str(session_dir / "octavo_cache"))


@pytest.fixture(scope="session")
def traced(session_dir: Path) -> Callable[[str, Any], Any]:
    """``traced("llama", torch.float32)``: the zoo's model as `import_model` gives it.

    All workers share one trace; each call has a copy of its own.
    """
    from octavo.frontend.trace import Imported, import_model
    from tests.model_zoo import MORE, TINY

    def trace(name: str, dtype: Any) -> Imported:
        path = session_dir / f"{name}-{dtype}.pickle"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                path.write_bytes(pickle.dumps(import_model({**TINY, **MORE}[name](), dtype)))
        imported: Imported = pickle.loads(path.read_bytes())
        return imported

    return trace


@pytest.fixture(scope="session")
def smollm2_gguf(session_dir: Path) -> Path:
    """SmolLM2-135M-Instruct as a GGUF, Q4_1: that which OCTAVO_SMOLLM2_GGUF names, or fetched as
    `make demo` fetches it."""
    if given := os.environ.get("OCTAVO_SMOLLM2_GGUF"):
        assert Path(given).is_file(), f"OCTAVO_SMOLLM2_GGUF={given}: there is no such file"
        return Path(given)
    with FileLock(session_dir / "gguf.lock"):
        if not GGUF.exists():
            relative = str(GGUF.relative_to(ROOT))
            done = subprocess.run(
                ["make", relative], cwd=ROOT, capture_output=True, text=True, check=False
            )
            if done.returncode:
                pytest.skip(f"SmolLM2 could not be fetched: {done.stderr[-200:]}")
    return GGUF


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, session_dir: Path) -> Path:
    """SmolLM2 as numbers, compiled for the cpu target in float32: an artifact directory."""
    from octavo.compile import compile_model

    artifact = session_dir / "smollm2"
    with FileLock(session_dir / "smollm2.lock"):
        if not artifact.exists():
            options = {"dtype": "float32", "target": "cpu", "dequantize": True}
            compile_model(smollm2_gguf, artifact, progress=False, **options)
    return artifact
