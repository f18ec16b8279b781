"""Kernels compiled for GPUs that are not here: what comes out, and that it comes out the same."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octavo.runtime import cross_compile
from octavo.runtime.cross_compile import compile_all, specialisations, write_binaries
from octavo.runtime.errors import ArtifactError, InvalidRequest
from octavo.runtime.kernel import Launch, recording
from octavo.runtime.kernel_binary import Binary, Specialisation, fits
from tests.rendered_kernel import imported
from tests.runtime.kernel_artifact import binary_of
from tests.runtime.test_kernel import SOURCE


@pytest.fixture(scope="module")
def launches() -> list[Launch]:
    module = imported("scale_add", SOURCE)
    x = torch.empty(64, dtype=torch.bfloat16, device="meta")
    y = torch.empty(64, device="meta")
    with recording() as found:
        for _ in range(2):
            module.SCALE_ADD.launch((1,), x, y, 64, 0.5, SCALE=3.0, BLOCK=64)
    return found


def test_binaries_for_two_architectures(launches: list[Launch], tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    number = write_binaries(
        {80: launches, 90: launches},
        tmp_path,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert (number, seen) == (2, [(1, 2), (2, 2)])
    for arch, assembler_arch, pdl in ((80, "sm_80", False), (90, "sm_90a", True)):
        [wanted] = specialisations(launches, arch)
        binary = Binary.read(tmp_path / f"sm_{arch}", wanted.stem)
        assert binary is not None
        info = binary.info
        assert binary.cubin.startswith(b"\x7fELF")
        assert (info.arch, info.entry, info.num_warps) == (assembler_arch, "scale_add", 4)
        assert info.constants == {"SCALE": 3.0, "BLOCK": 64, "PDL": pdl}
        assert (info.num_parameters, info.num_scratch_parameters) == (6, 2)
        assert (info.stack_bytes, info.shared_bytes) == (0, 0)
        assert info.cubin_sha256 == hashlib.sha256(binary.cubin).hexdigest()
        assert info.registers is not None
        assert info.registers > 0
    write_binaries({80: launches, 90: launches}, tmp_path / "again")
    for path in tmp_path.glob("sm_*/*"):
        again = tmp_path / "again" / path.relative_to(tmp_path)
        assert again.read_bytes() == path.read_bytes()
        assert str(Path.home()).encode() not in path.read_bytes()


@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5", " 2", "²"])
def test_a_number_of_workers_that_is_none_is_refused(
    given: str, launches: list[Launch], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OCTAVO_COMPILE_WORKERS", given)
    with pytest.raises(InvalidRequest, match=r"OCTAVO_COMPILE_WORKERS=.*a number of processes"):
        write_binaries({90: launches}, tmp_path)


@pytest.mark.parametrize(("given", "expected"), [("1", 1), ("2", 2), ("7", 3), ("", 3)])
def test_as_many_workers_as_were_asked_for(
    given: str, expected: int, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than there are kernels, here three; without a number, one for each processor."""
    started: list[object] = []

    class Counted(cross_compile.Worker):
        def __enter__(self) -> Counted:
            started.append(self)
            return self

        def __exit__(self, *exception: object) -> None:
            pass

        def compile(self, wanted: Specialisation) -> Binary:
            return binary_of(wanted, b"")

    monkeypatch.setenv("OCTAVO_COMPILE_WORKERS", given)
    monkeypatch.setattr(cross_compile, "Worker", Counted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(5)), raising=False)
    [wanted] = specialisations(launches, 90)
    kernels = [replace(wanted, arch=arch) for arch in (80, 89, 90)]
    assert sorted(each.arch for each, _ in compile_all(kernels)) == [80, 89, 90]
    assert len(started) == expected


def test_an_error_names_kernel_constants_and_architecture(launches: list[Launch]) -> None:
    [wanted] = specialisations(launches, 90)
    wrong = replace(wanted, constants={**wanted.constants, "BLOCK": 65})
    with pytest.raises(ArtifactError, match=r"scale_add\(SCALE=3.0, BLOCK=65, .*\) for sm_90 does"):
        list(compile_all([wrong]))


def test_a_name_covers_all_that_a_binary_depends_on(launches: list[Launch]) -> None:
    [wanted] = specialisations(launches, 90)
    changes = (
        {"source": wanted.source + "#"},
        {"signature": wanted.signature + " "},
        {"constants": {**wanted.constants, "SCALE": 3}},
        {"options": {**wanted.options, "num_warps": 8}},
        {"arch": 89},
    )
    stems = {wanted.stem, *(replace(wanted, **change).stem for change in changes)}  # type: ignore[arg-type]
    assert len(stems) == 1 + len(changes)
    assert Specialisation.from_dict(json.loads(json.dumps(wanted.to_dict()))) == wanted


@pytest.mark.parametrize(
    ("arch", "device_arch", "is_fit"),
    [
        (80, 80, True), (80, 86, True), (80, 89, True), (86, 80, False), (89, 90, False),
        (90, 90, True), (90, 100, False), (100, 103, False), (120, 120, True), (120, 121, False),
    ],
)  # fmt: skip
def test_which_binaries_run_where(arch: int, device_arch: int, is_fit: bool) -> None:
    assert fits(arch, device_arch) is is_fit
