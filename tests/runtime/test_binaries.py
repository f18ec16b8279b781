"""Where a kernel's binary comes from, on a machine that is told it had a GPU."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from octavo.runtime import binaries
from octavo.runtime.artifact import Artifact
from octavo.runtime.binaries import BoundKernels, ShippedBinaries, bind_kernels, device_arch
from octavo.runtime.cross_compile import write_binaries
from octavo.runtime.cuda_driver import CudaDriver
from octavo.runtime.errors import ArtifactError
from octavo.runtime.kernel_binary import Binary, Specialisation
from octavo.runtime.program_loader import import_program
from octavo.runtime.record_program import record_program
from tests.runtime.fake_cuda import FakeCuda
from tests.runtime.kernel_artifact import binary_of, finish, ship, write_kernel_artifact


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An artifact without binaries."""
    root = tmp_path / "artifact"
    write_kernel_artifact(root)
    return root


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCuda:
    """A GPU of sm_90, an empty cache, and a compiler that makes empty binaries."""
    fake = FakeCuda()
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(CudaDriver, "shared", lambda: CudaDriver(fake))
    monkeypatch.setattr(binaries, "make_context_current", lambda index: None)
    monkeypatch.setattr(binaries, "compile_here_or_there", compiled)
    # A build of PyTorch without CUDA has no streams.
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    return fake


def compiled(wanted: list[Specialisation]) -> Iterator[tuple[Specialisation, Binary]]:
    for each in wanted:
        yield each, binary_of(each, b"here")


def bind(root: Path, *, is_pinned: bool = False) -> tuple[BoundKernels, ModuleType]:
    artifact = Artifact.open(root)
    program = import_program(root, artifact.manifest)
    device = torch.device("cuda")
    bound = bind_kernels(artifact, program, device, is_pinned=is_pinned)
    return bound, program.double


def test_the_program_is_recorded_over_all_sizes(folder: Path) -> None:
    launches = record_program(folder, Artifact.open(folder).manifest)
    assert sorted(launch.constants["BLOCK"] for launch in launches) == [32, 256]


def test_shipped_binaries_are_loaded(folder: Path, cuda: FakeCuda) -> None:
    assert len(ship(folder)) == 2
    bound, _ = bind(folder)
    assert bound.num_compiled == 0
    assert cuda.images == [b"shipped", b"shipped"]


def test_missing_ones_are_compiled_once(
    folder: Path, cuda: FakeCuda, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING):
        assert bind(folder)[0].num_compiled == 2
        assert bind(folder)[0].num_compiled == 0
    [record] = caplog.records
    assert record.getMessage() == (
        "compiling 2 kernels for sm_90, since the artifact has no binaries of them for sm_90; "
        f"kept in {tmp_path / 'cache' / 'kernels' / 'sm_90'}"
    )
    assert cuda.images == [b"here"] * 4


def test_a_pinned_artifact_s_binaries_are_not_used(folder: Path, cuda: FakeCuda) -> None:
    ship(folder)
    bound, _ = bind(folder, is_pinned=True)
    assert bound.num_compiled == 2
    assert cuda.images == [b"here", b"here"]


def test_a_binary_that_the_driver_refuses_is_made_anew(
    folder: Path, cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    ship(folder)
    cuda.fails["cuModuleLoadData"] = [222]
    with caplog.at_level(logging.WARNING):
        assert bind(folder)[0].num_compiled == 1
    assert "compiling 1 kernel for sm_90, since the driver refused" in caplog.text
    assert cuda.images == [b"shipped", b"shipped", b"here"]


@pytest.mark.usefixtures("cuda")
def test_a_binary_that_changed_since_it_was_checked(folder: Path) -> None:
    ship(folder)
    artifact = Artifact.open(folder)
    program = import_program(folder, artifact.manifest)
    for path in folder.glob("kernels/bin/*/*.cubin"):
        path.write_bytes(b"shaped!")
    with pytest.raises(ArtifactError, match=r"cubin has changed since it was checked"):
        bind_kernels(artifact, program, torch.device("cuda"))


def test_a_damaged_file_in_the_cache_is_made_anew(
    folder: Path, cuda: FakeCuda, tmp_path: Path
) -> None:
    bind(folder)
    for path in (tmp_path / "cache").rglob("*.json"):
        path.write_text("{")
    assert bind(folder)[0].num_compiled == 2


def test_constants_that_nobody_foresaw_are_compiled_when_launched(
    folder: Path, cuda: FakeCuda
) -> None:
    bound, module = bind(folder)
    kernel = module.DOUBLE
    [launch] = [each for each in recorded(module) if each.constants["BLOCK"] == 32]
    kernel.loader(kernel, 0, launch)
    assert bound.num_compiled == 2
    kernel.loader(kernel, 0, replace(launch, constants={"BLOCK": 128}))
    assert bound.num_compiled == 3


def recorded(module: ModuleType) -> list:  # type: ignore[type-arg]
    from octavo.runtime.kernel import recording

    with recording() as launches:
        for num in (1, 100):
            x = torch.empty(num, dtype=torch.int64, device="meta")
            module.run(x, out=x)
    return launches


def write_plan(root: Path, name: str, plan: object) -> None:
    (root / "plans").mkdir(exist_ok=True)
    (root / "plans" / name).write_text(json.dumps(plan))
    finish(root)


@pytest.mark.usefixtures("cuda")
def test_an_artifact_that_was_moved_after_its_import(folder: Path, tmp_path: Path) -> None:
    """As one that is compiled and loaded in one process: its folder is renamed at the end."""
    record_program(folder, Artifact.open(folder).manifest)
    bound, module = bind(folder.rename(tmp_path / "moved"))
    assert bound.num_compiled == 2
    for launch in recorded(module):
        module.DOUBLE.loader(module.DOUBLE, 0, launch)
    assert bound.num_compiled == 2


@pytest.mark.usefixtures("cuda")
def test_a_plan_chooses(folder: Path) -> None:
    write_plan(folder, "sm_90.json", {"double": {"*": {"BLOCK": 256}}})
    assert bind(folder)[1].CHOICES.for_rows(1) == {"BLOCK": 32}
    write_plan(folder, "nvidia_h200.json", {"double": {"16": {"BLOCK": 64}}})
    assert bind(folder)[1].CHOICES.for_rows(1) == {"BLOCK": 64}
    (folder / "plans" / "nvidia_h200.json").unlink()
    finish(folder)
    assert bind(folder)[1].CHOICES.for_rows(1) == {"BLOCK": 32}


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"triple": {}}, "no kernel module 'triple'"),
        ({"double": []}, "no kernel module 'double'"),
        ({"double": {"17": {"BLOCK": 32}}}, "no row bucket '17'"),
        ({"double": {"16": {"BLOCK": 33}}}, "is no candidate for 16 rows"),
        ({"double": {"16": 3}}, "double"),
        ([], "expected an object"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(folder: Path, plan: object, message: str) -> None:
    write_plan(folder, "sm_90.json", plan)
    with pytest.raises(ArtifactError, match=rf"plans/sm_90.json: .*{message}"):
        bind(folder)


def test_binaries_of_an_older_minor_are_found(tmp_path: Path) -> None:
    files = {f"kernels/bin/sm_{arch}/a.json": None for arch in (80, 86, 89, 90)}
    shipped = ShippedBinaries(tmp_path, files)  # type: ignore[arg-type]
    assert shipped.archs_for(86) == [86, 80]
    assert shipped.archs_for(90) == [90]
    assert shipped.archs_for(100) == []


def test_no_gpu_and_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArtifactError, match="--target cpu"):
        device_arch(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    with pytest.raises(ArtifactError, match="Tesla T4 is sm_75; kernels need sm_80"):
        device_arch(torch.device("cuda", 0))


def test_really_compiled_and_then_found(folder: Path, cuda: FakeCuda) -> None:
    """The compiler's own binaries, shipped: a load compiles nothing."""
    manifest = Artifact.open(folder).manifest
    write_binaries({90: record_program(folder, manifest, arch=90)}, folder / "kernels" / "bin")
    finish(folder)
    bound, _ = bind(folder)
    assert bound.num_compiled == 0
    assert all(image.startswith(b"\x7fELF") for image in cuda.images)
    assert len(cuda.images) == 2
