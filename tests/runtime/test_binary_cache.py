"""The cache of binaries: who finds what, and that it never stands in the way."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.runtime import cross_compile
from octavo.runtime.artifact import Artifact
from octavo.runtime.binary_cache import BinaryCache
from octavo.runtime.cross_compile import compile_all, write_binaries
from octavo.runtime.kernel import Launch
from octavo.runtime.kernel_binary import Binary, Specialisation
from octavo.runtime.record_program import record_program
from tests.runtime.kernel_artifact import binary_of, write_kernel_artifact

WANTED = Specialisation("double", "double", "text", "x_ptr: *i64", {"BLOCK": 32}, {}, 90)
TOOLCHAIN = ("3.6.0", "12.8")  # as kernel_artifact.binary_of says
BINARY = binary_of(WANTED, b"\x7fELF")


@pytest.fixture
def cache(tmp_path: Path) -> BinaryCache:
    return BinaryCache(tmp_path / "cache")


@pytest.fixture
def launches(tmp_path: Path) -> list[Launch]:
    write_kernel_artifact(tmp_path / "artifact")
    return record_program(tmp_path / "artifact", Artifact.open(tmp_path / "artifact").manifest)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is really compiled from here on, by name; the binaries are made up."""
    names: list[str] = []

    def compile_all(
        wanted: list[Specialisation], **_: object
    ) -> list[tuple[Specialisation, Binary]]:
        names.extend(each.stem for each in wanted)
        return [(each, binary_of(each, b"\x7fELF")) for each in wanted]

    monkeypatch.setattr(cross_compile, "compile_all", compile_all)
    monkeypatch.setattr(cross_compile, "toolchain", lambda arch: TOOLCHAIN)
    return names


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_was_kept_is_found_by_others(cache: BinaryCache) -> None:
    assert cache.find(WANTED) is None
    cache.keep(WANTED, BINARY)
    assert BinaryCache(cache.root).find(WANTED) == BINARY
    assert cache.find(replace(WANTED, arch=80)) is None
    assert cache.find(replace(WANTED, source="text ")) is None


def test_only_the_same_toolchain_counts_where_one_is_named(cache: BinaryCache) -> None:
    cache.keep(WANTED, BINARY)
    assert cache.find(WANTED, toolchain=TOOLCHAIN) == BINARY
    assert cache.find(WANTED, toolchain=("3.9.0", "12.8")) is None
    assert cache.find(WANTED, toolchain=("3.6.0", "13.4")) is None


@pytest.mark.parametrize("suffix", [".json", ".cubin"])
@pytest.mark.parametrize("damage", [b"", b"{", None])
def test_damaged_files_count_as_absent(
    cache: BinaryCache, suffix: str, damage: bytes | None
) -> None:
    digest = "3bdbb4fe8397cd2b842430b39ccff01a8663c751945ef5e9a09e267fb8b1d359"
    cache.keep(WANTED, replace(BINARY, info=replace(BINARY.info, cubin_sha256=digest)))
    path = cache.folder(90) / f"{WANTED.stem}{suffix}"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)
    assert cache.find(WANTED) is None


def test_a_directory_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    cache = BinaryCache(tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING):
        cache.keep(WANTED, BINARY)
        cache.keep(WANTED, BINARY)
    [record] = caplog.records
    assert "cannot be kept" in record.getMessage()
    assert "set OCTAVO_CACHE" in record.getMessage()
    assert cache.find(WANTED) is None


def test_a_second_compile_takes_from_the_first(
    launches: list[Launch], cache: BinaryCache, compiled: list[str], tmp_path: Path
) -> None:
    assert write_binaries({90: launches}, tmp_path / "a", cache=cache) == 2
    assert len(compiled) == 2
    assert write_binaries({90: launches[:1]}, tmp_path / "b", cache=cache) == 1
    assert write_binaries({90: launches, 80: launches}, tmp_path / "c", cache=cache) == 4
    assert len(compiled) == 4, "two more for the other architecture"
    assert content(tmp_path / "a").items() <= content(tmp_path / "c").items()
    write_binaries({90: launches}, tmp_path / "d")
    assert len(compiled) == 6, "without a cache all are compiled"


def test_another_toolchain_compiles_anew_and_replaces(
    launches: list[Launch],
    cache: BinaryCache,
    compiled: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_binaries({90: launches}, tmp_path / "a", cache=cache)
    monkeypatch.setattr(cross_compile, "toolchain", lambda arch: ("3.9.0", "13.4"))
    write_binaries({90: launches}, tmp_path / "b", cache=cache)
    assert len(compiled) == 4


def test_variables_that_change_the_compiler_leave_the_cache_alone(
    launches: list[Launch],
    cache: BinaryCache,
    compiled: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_binaries({90: launches}, tmp_path / "a", cache=cache)
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    write_binaries({90: launches}, tmp_path / "b", cache=cache)
    assert len(compiled) == 4


def test_a_binary_from_the_cache_is_that_of_the_compiler(
    launches: list[Launch], cache: BinaryCache, tmp_path: Path
) -> None:
    for name in ("compiled", "found"):
        write_binaries({90: launches[:1]}, tmp_path / name, cache=cache)
    [(_, fresh)] = compile_all(cross_compile.specialisations(launches[:1], 90))
    assert content(tmp_path / "found") == content(tmp_path / "compiled")
    assert fresh.cubin in content(tmp_path / "found").values()
