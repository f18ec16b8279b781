"""The recipe beside an artifact: written over only where nobody has touched it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from octavo.calibrate.recipe_file import write_recipe

TEXT = "# chosen\na.b: int8\n"


def test_an_untouched_recipe_is_written_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = tmp_path / "model.v1"
    first = write_recipe(artifact, TEXT)
    assert first == tmp_path / "model.v1.recipe.yaml"
    assert yaml.safe_load(first.read_text()) == {"a.b": "int8"}
    assert write_recipe(artifact, TEXT.replace("int8", "int4")) == first
    assert yaml.safe_load(first.read_text()) == {"a.b": "int4"}
    assert list(tmp_path.iterdir()) == [first]
    assert caplog.messages == []


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace("int8", "int4"),
        lambda text: text + "c: int8\n",
        lambda text: "# mine\n" + text,
        lambda text: text.rstrip("\n"),
        lambda text: "c: int8\n",
        lambda text: "",
    ],
    ids=["changed", "appended", "before", "newline", "other", "empty"],
)
def test_an_edited_recipe_is_left(
    edit: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(edit)
    artifact = tmp_path / "model"
    usual = write_recipe(artifact, TEXT)
    edited = edit(usual.read_text())
    usual.write_text(edited)
    for again in (TEXT, TEXT.replace("a.b", "b.a")):
        caplog.clear()
        assert write_recipe(artifact, again) == tmp_path / "model.recipe-2.yaml"
        assert caplog.messages == [
            f"{usual} has been edited and is left: the new recipe is {tmp_path}/model.recipe-2.yaml"
        ]
    assert usual.read_text() == edited
    assert yaml.safe_load((tmp_path / "model.recipe-2.yaml").read_text()) == {"b.a": "int8"}


def test_what_is_no_text_is_left(tmp_path: Path) -> None:
    (tmp_path / "model.recipe.yaml").mkdir()
    (tmp_path / "model.recipe-2.yaml").write_bytes(b"\xff\xfe")
    assert write_recipe(tmp_path / "model", TEXT) == tmp_path / "model.recipe-3.yaml"
