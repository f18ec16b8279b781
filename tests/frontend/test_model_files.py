"""What goes into model/: copies where there are files, a whole tokenizer where there is a GGUF."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig

from octavo.frontend.gguf_header import read_gguf_header
from octavo.frontend.gguf_tokenizer import gguf_generation_config, gguf_tokenizer
from octavo.frontend.model_files import write_model_files
from octavo.frontend.source import resolve
from octavo.ir.errors import OctavoError
from tests.frontend.gguf_files import write_gguf

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
TEXTS = [
    "the 12 cats",
    "x  1",
    "a1b22",
    "  two  spaces ",
    "naïve 猫 🙂\n\tcode()",
    "<|im_start|>the",
]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    """A byte-level BPE that takes digits one at a time, as SmolLM2's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = ["the cats and the  two  dogs 12 34 x  1"] * 9
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def tokenizer_metadata(trained: Tokenizer, **changes: Any) -> dict[str, Any]:
    raw = json.loads(trained.to_str())["model"]
    tokens = sorted(raw["vocab"], key=raw["vocab"].__getitem__)
    values = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in raw["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 0,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.fixture
def gguf_path(tiny_model: Callable[..., Any], trained: Tokenizer, tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    metadata = {**tokenizer_metadata(trained), "tokenizer.chat_template": TEMPLATE}
    write_gguf(path, tiny_model("llama", vocab_size=320), metadata=metadata)
    return path


def test_a_gguf_tokenizer_is_the_trained_one(
    gguf_path: Path, trained: Tokenizer, tmp_path: Path
) -> None:
    write_model_files(resolve(gguf_path), tmp_path / "model")
    written = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    for text in TEXTS:
        ids = written.encode(text).ids
        assert ids == trained.encode(text).ids, text
        assert written.decode(ids, skip_special_tokens=False) == text
    assert written.encode("<|im_end|>").ids == [2]
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|endoftext|>")
    assert (tmp_path / "model" / "chat_template.jinja").read_text() == TEMPLATE


def test_gguf_files_are_the_same_bytes_each_time(gguf_path: Path, tmp_path: Path) -> None:
    contents = []
    for name in ("a", "b"):
        write_model_files(resolve(gguf_path), tmp_path / name)
        contents.append({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()})
    assert contents[0] == contents[1]
    assert set(contents[0]) == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_a_gguf_config_is_read_back(gguf_path: Path, tmp_path: Path) -> None:
    source = resolve(gguf_path)
    write_model_files(source, tmp_path / "model")
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLM"]
    assert str(tmp_path) not in json.dumps(raw)
    again = AutoConfig.from_pretrained(tmp_path / "model")
    assert again.rope_parameters == source.config.rope_parameters
    assert again.hidden_size == 32


def test_the_end_of_a_turn_ends_an_answer(gguf_path: Path) -> None:
    """eos_token_id says 0; the template ends turns with <|im_end|>, 2."""
    assert gguf_generation_config(read_gguf_header(gguf_path)) == {
        "bos_token_id": 1,
        "eos_token_id": [0, 2],
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "martian"}, "pre-tokeniser 'martian' is not supported yet"),
        ({"model": "rwkv"}, "Cannot build a tokenizer from a GGUF file stating tokenizer 'rwkv'"),
    ],
)
def test_an_unknown_tokenizer_is_refused(
    changes: dict[str, Any],
    message: str,
    tiny_model: Callable[..., Any],
    trained: Tokenizer,
    tmp_path: Path,
) -> None:
    path = tmp_path / "m.gguf"
    metadata = tokenizer_metadata(trained, **changes)
    write_gguf(path, tiny_model("llama", vocab_size=320), metadata=metadata)
    with pytest.raises(OctavoError, match=message):
        gguf_tokenizer(read_gguf_header(path))


def test_a_gguf_without_a_vocabulary_has_no_tokenizer(
    tiny_model: Callable[..., Any], tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    write_model_files(resolve(tmp_path / "m.gguf"), tmp_path / "model")
    assert not (tmp_path / "model" / "tokenizer.json").exists()


def test_files_are_copied_byte_for_byte(
    saved_llama: Path, trained: Tokenizer, tmp_path: Path
) -> None:
    kept = {
        "tokenizer.json": trained.to_str().encode() + b" \r\n",
        "tokenizer_config.json": b"{}",
        "special_tokens_map.json": b"{ }",
        "chat_template.jinja": "{{ '猫' }}".encode(),
    }
    for name, data in {**kept, "notes.txt": b"not for the artifact"}.items():
        (saved_llama / name).write_bytes(data)
    write_model_files(resolve(saved_llama), tmp_path / "model")
    written = {p.name: p.read_bytes() for p in (tmp_path / "model").iterdir()}
    assert written.pop("config.json") == (saved_llama / "config.json").read_bytes()
    written.pop("generation_config.json")
    assert written == kept


def test_a_bare_config_of_any_name_becomes_config_json(saved_llama: Path, tmp_path: Path) -> None:
    path = (saved_llama / "config.json").rename(tmp_path / "small.json")
    write_model_files(resolve(path, random_weights=0), tmp_path / "model")
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["config.json"]


def test_a_slow_tokenizer_is_converted(
    tiny_model: Callable[..., Any], trained: Tokenizer, tmp_path: Path
) -> None:
    """vocab.json and merges.txt, as GPT-2 was published; digits as GPT-2 cuts them."""
    tiny_model("gpt2").save_pretrained(tmp_path / "m")
    trained.model.save(str(tmp_path / "m"))
    write_model_files(resolve(tmp_path / "m"), tmp_path / "model")
    written = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert written.encode("the cats").ids == trained.encode("the cats").ids
    assert (tmp_path / "model" / "vocab.json").exists()


def test_a_broken_slow_tokenizer_is_refused(saved_llama: Path, tmp_path: Path) -> None:
    (saved_llama / "tokenizer.model").write_bytes(b"not sentencepiece")
    with pytest.raises(
        OctavoError, match=r"its tokenizer cannot be converted to tokenizer.json: ."
    ):
        write_model_files(resolve(saved_llama), tmp_path / "model")


def test_smollm2_speaks_its_template(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Ids as SmolLM2-135M-Instruct's own tokenizer.json gives them."""
    write_model_files(resolve(smollm2_gguf), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    ids = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    assert tokenizer.encode(text).ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("x  12").ids == [104, 256, 33, 34]  # digits stand alone
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2]
    assert "You are a helpful AI assistant" in (tmp_path / "chat_template.jinja").read_text()
