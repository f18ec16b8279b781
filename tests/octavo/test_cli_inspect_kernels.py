"""``octavo inspect --kernels``: the kernels' choices, costs and binaries."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.cli.main import app
from octavo.ir.errors import OctavoError
from octavo.runtime.artifact import Artifact
from octavo.runtime.cross_compile import specialisations
from octavo.runtime.record_program import record_program
from tests.runtime.kernel_artifact import binary_of, finish, write_kernel_artifact

COST = """

from octavo.runtime.kernel import Cost

OP = "double"


def cost(rows):
    return Cost(bytes=16 * rows, flops=rows)
"""


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    root = tmp_path / "artifact"
    write_kernel_artifact(root)
    with (root / "kernels/src/double.py").open("a") as file:
        file.write(COST)
    (root / "ir").mkdir()
    (root / "ir/index.json").write_text('{"stages": []}')
    (root / "plans").mkdir()
    (root / "plans/sm_90.json").write_text(json.dumps({"double": {"16": {"BLOCK": 64}}}))
    finish(root)
    return root


def shown(*args: object) -> list[list[str]]:
    """The words of each line that is printed."""
    result = CliRunner().invoke(app, ["inspect", *map(str, args)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return [line.split() for line in result.output.splitlines()]


def test_ways_by_rows_with_their_costs(artifact: Path) -> None:
    lines = shown(artifact, "--kernels")
    assert ["double", "double", "to", "16", "BLOCK=32", "256", "16"] in lines
    assert ["double", "double", "more", "BLOCK=256", "131,072", "8,192"] in lines
    assert lines[0] == "Choices of no plan: the defaults; plans: sm_90".split()
    assert lines[-1] == "There are no binaries: they are compiled when loaded.".split()


def test_what_a_plan_chooses(artifact: Path) -> None:
    lines = shown(artifact, "--kernels", "--plan", "sm_90")
    assert ["double", "double", "to", "16", "BLOCK=64", "256", "16"] in lines


def test_binaries_with_what_tells_them_apart(artifact: Path) -> None:
    launches = record_program(artifact, Artifact.open(artifact).manifest)
    for each in specialisations(launches, 90):
        binary = binary_of(each, b"")
        info = replace(binary.info, stack_bytes=8, shared_bytes=2048)
        replace(binary, info=info).write(artifact / "kernels/bin/sm_90", each.stem)
    finish(artifact)
    lines = shown(artifact, "--kernels")
    assert len(launches) == 2
    for block in (launch.constants["BLOCK"] for launch in launches):
        assert ["double", "double", "sm_90a", f"BLOCK={block}", "32", "8", "2,048"] in lines


def test_what_it_refuses(artifact: Path) -> None:
    for args, message in (
        (["--kernels", "--stage", "0"], "exclude each other"),
        (["--plan", "sm_90"], "--plan goes with --kernels"),
        (["--kernels", "--plan", "sm_80"], "no plan 'sm_80'; there are: sm_90"),
    ):
        result = CliRunner().invoke(app, ["inspect", str(artifact), *args])
        assert isinstance(result.exception, OctavoError)
        assert message in str(result.exception)
