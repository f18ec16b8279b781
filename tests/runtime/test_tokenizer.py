"""tokenizer.json and what lies beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from octavo.runtime.artifact import Artifact
from octavo.runtime.errors import ArtifactError, InvalidRequest
from octavo.runtime.tokenizer import Tokenizer
from tests.runtime.toy_artifact import BOS, EOS, byte_tokenizer, write_manifest


def test_special_tokens_are_added_as_transformers_adds_them(shared_toy: Path) -> None:
    ours = Tokenizer.from_directory(shared_toy / "model")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(shared_toy / "model/tokenizer.json"))
    for text in ["Hi", "<s>Hi</s>", "a<|im_end|>b", "你好"]:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == theirs.encode(text, add_special_tokens=add)
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.encode("Hi")[0] == BOS
    assert (ours.bos_token_id, ours.eos_token_id) == (BOS, EOS)
    assert ours.vocab_size == 260


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    raw = byte_tokenizer()
    raw.enable_truncation(4)
    raw.enable_padding(length=10)
    assert len(Tokenizer(raw, {}, {}).encode("abcdefghijkl", add_special_tokens=False)) == 12


def test_tokens_that_only_the_config_lists_are_added() -> None:
    config = {"added_tokens_decoder": {"260": {"content": "<new>", "special": True}}}
    tokenizer = Tokenizer(byte_tokenizer(), config, {})
    assert tokenizer.encode("<new>", add_special_tokens=False) == [260]
    assert tokenizer.decode([260], skip_special_tokens=True) == ""


def test_a_named_token_is_special_even_if_the_file_does_not_say_so() -> None:
    raw = byte_tokenizer()
    raw.add_tokens(["<end>"])
    assert Tokenizer(raw, {"eos_token": "<end>"}, {}).decode([260], skip_special_tokens=True) == ""


def test_the_template_file_has_the_last_word(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    chat = [{"role": "user", "content": "x"}]
    named = [{"name": "default", "template": "config"}, {"name": "rag", "template": "rag"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.from_directory(tmp_path).render_chat(chat) == "config"
    assert Tokenizer.from_directory(tmp_path).render_chat(chat, chat_template="rag") == "rag"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_directory(tmp_path).render_chat(chat) == "file"


def test_files_that_are_not_listed_are_not_read(toy: Path) -> None:
    (toy / "model/chat_template.jinja").write_text("injected")
    tokenizer = Tokenizer.from_artifact(Artifact.open(toy))
    assert tokenizer is not None
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]) != "injected"


def test_an_artifact_without_a_tokenizer_has_none(toy: Path) -> None:
    (toy / "model/tokenizer.json").unlink()
    write_manifest(toy)
    assert Tokenizer.from_artifact(Artifact.open(toy)) is None


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ArtifactError, match="is not a tokenizer"):
        Tokenizer.from_directory(tmp_path)


def test_an_id_without_a_token_has_no_text() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), {}, {})
    assert isinstance(tokenizer._raw, RawTokenizer)
    assert tokenizer.decode([5000]) == ""
    assert tokenizer.convert_ids_to_tokens(5000) is None


def test_the_runtime_does_not_import_transformers() -> None:
    code = (
        "import sys, octavo.runtime.llm; "
        "assert not {'transformers', 'triton', 'networkx'} & set(sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=root, env={"PYTHONPATH": str(root)}
    )
