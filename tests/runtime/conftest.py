"""The toy artifact, once a test and once a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from octavo.runtime.llm import LLM
from tests.runtime.toy_artifact import write_toy_artifact


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A toy artifact that the test may damage."""
    write_toy_artifact(tmp_path / "toy")
    return tmp_path / "toy"


@pytest.fixture(scope="session")
def shared_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy artifact to read only."""
    folder = tmp_path_factory.mktemp("shared") / "toy"
    write_toy_artifact(folder)
    return folder


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def llm(shared_toy: Path, request: pytest.FixtureRequest) -> LLM:
    return LLM(shared_toy, async_scheduling=request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are tiny here: a second thread would only be waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
