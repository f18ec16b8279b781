"""Targets are chosen by name, and refused with what to do instead."""

from __future__ import annotations

import pytest

from octavo.codegen.target import resolve_target
from octavo.ir.errors import OctavoError


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_cpu(name: str) -> None:
    assert resolve_target(name).name == "cpu"


@pytest.mark.parametrize("name", ["cuda", "cuda:sm_80", "cuda:sm_90", "hip:gfx942"])
def test_foreseen_targets_are_refused_by_name(name: str) -> None:
    with pytest.raises(
        OctavoError, match=f"kernels for {name} are not there yet; use --target cpu"
    ):
        resolve_target(name)


def test_unknown_target() -> None:
    with pytest.raises(OctavoError, match="unknown target 'tpu'; choose from auto, cpu"):
        resolve_target("tpu")


def test_dtypes() -> None:
    resolve_target("cpu").check_dtype("bf16")
    with pytest.raises(OctavoError, match="no kernels for f16; choose --dtype from f32, bf16"):
        resolve_target("cpu").check_dtype("f16")
