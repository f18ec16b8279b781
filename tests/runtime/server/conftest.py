"""Servers over the toy and the echo artifact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.server.echo_artifact import write_echo_artifact
from tests.runtime.server.running_server import InThread, in_thread


@pytest.fixture(scope="session")
def echo_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared") / "echo"
    write_echo_artifact(folder)
    return folder


@pytest.fixture(scope="module")
def toy_server(shared_toy: Path) -> Iterator[InThread]:
    with in_thread(shared_toy) as server:
        yield server


@pytest.fixture(scope="module")
def echo_server(echo_artifact: Path) -> Iterator[InThread]:
    with in_thread(echo_artifact) as server:
        yield server
