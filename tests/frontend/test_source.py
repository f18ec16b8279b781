"""What the user may give, and the one line that answers anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub.errors as hub_errors
import pytest

from octavo.frontend import hub
from octavo.frontend.source import resolve
from octavo.ir.errors import OctavoError
from tests.frontend.conftest import tiny_config


def test_a_directory(saved_llama: Path) -> None:
    source = resolve(saved_llama)
    assert (source.kind, source.name, source.revision) == ("safetensors", "tiny-llama", None)
    assert source.config.model_type == "llama"
    assert [path.name for path in source.model_files] == ["config.json", "generation_config.json"]


@pytest.mark.parametrize(
    "path", ["./no/such", "/no/such/dir", "a/b/c", "~/no-such-model", "model.gguf", "x/config.json"]
)
def test_a_path_that_does_not_exist(path: str) -> None:
    with pytest.raises(OctavoError, match=r"does not exist; expected a model directory"):
        resolve(path)


def test_a_directory_without_config(tmp_path: Path) -> None:
    with pytest.raises(OctavoError, match=r"has no config.json; is it a model directory\?"):
        resolve(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(OctavoError, match=r"has no config.json; give the file itself: .*m.gguf"):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "config.json",
            r"draw them with --random-weights SEED .*compile_model\(\.\.\., random_weights=SEED\)",
        ),
        ("model.safetensors", "give its directory"),
        ("model.txt", "is not a model"),
    ],
)
def test_a_file_that_is_no_model(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(OctavoError, match=message):
        resolve(tmp_path / name)


def test_a_config_alone_needs_random_weights(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    with pytest.raises(
        OctavoError, match=r"holds no safetensors, expected .* add the weights, or draw them"
    ):
        resolve(tmp_path)


def test_an_artifact_is_no_model(tmp_path: Path) -> None:
    for name in ("manifest.json", "program.py"):
        (tmp_path / name).write_text("")
    with pytest.raises(OctavoError, match="is an artifact already; run it with 'octavo chat'"):
        resolve(tmp_path)


def test_a_path_has_no_revision(saved_llama: Path) -> None:
    with pytest.raises(OctavoError, match="is a path here; --revision applies to models of the"):
        resolve(saved_llama, revision="main")


@pytest.mark.parametrize("text", ["{", '{"version": "1.0"}', "[]"])
def test_a_broken_tokenizer_is_named(saved_llama: Path, text: str) -> None:
    (saved_llama / "tokenizer.json").write_text(text)
    with pytest.raises(OctavoError, match=r"tokenizer.json cannot be loaded: .*download") as caught:
        resolve(saved_llama)
    assert "\n" not in str(caught.value)


_ANSWER: Any = Mock(headers={}, status_code=404)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (hub_errors.GatedRepoError("no", response=_ANSWER), "org/m is gated: accept its"),
        (hub_errors.RepositoryNotFoundError("no", response=_ANSWER), "neither a path here"),
        (hub_errors.RevisionNotFoundError("no", response=_ANSWER), "no revision 'r1'"),
        (hub_errors.LocalEntryNotFoundError("no"), "the hub cannot be reached; check the network"),
        (hub_errors.HfHubHTTPError("busy", response=_ANSWER), "cannot be downloaded: busy"),
        (OSError("connection reset\nby peer"), "cannot be downloaded: connection reset"),
        (RuntimeError(""), "cannot be downloaded: RuntimeError"),
    ],
)
def test_hub_errors(monkeypatch: pytest.MonkeyPatch, error: Exception, message: str) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(OctavoError, match=message) as caught:
        resolve("org/m", revision="r1")
    assert "\n" not in str(caught.value)


def test_offline_and_not_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(OctavoError, match="nor in the hub's cache, and HF_HUB_OFFLINE is set"):
        resolve("org/no-such-model")


def test_offline_and_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, saved_llama: Path
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / "models--org--m"
    (repo / "snapshots").mkdir(parents=True)
    saved_llama.rename(repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    original = hub.snapshot_download

    def cached(*args: Any, **kwargs: Any) -> Any:
        return original(*args, cache_dir=tmp_path / "hub", **kwargs)

    monkeypatch.setattr(hub, "snapshot_download", cached)
    source = resolve("org/m")
    assert (source.kind, source.name, source.revision) == ("safetensors", "org/m", commit)
