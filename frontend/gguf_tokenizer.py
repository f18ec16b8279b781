"""The tokenizer that a GGUF file describes, as the files that the runtime reads."""

from __future__ import annotations

import importlib
from typing import Any

import transformers
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from octavo.frontend.gguf_header import GgufHeader
from octavo.ir.errors import OctavoError

# Pre-tokenisers that transformers' table lacks, by tokenizer.ggml.pre (llama.cpp,
# src/llama-vocab.cpp). These split GPT-2's way: the class's default.
_GPT2_SPLIT = {"default", "gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "trillion"}
# These take every digit as its own piece first, then GPT-2's way.
_DIGITS_SPLIT = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}

# Ends of a chat turn; llama.cpp stops at these too, whatever eos_token_id says.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
_CONTROL = 3


def gguf_tokenizer(header: GgufHeader) -> PreTrainedTokenizerFast | None:
    """The tokenizer with special tokens and chat template, None if the file has no vocabulary.

    Raises OctavoError for a kind of vocabulary or pre-tokeniser whose rules are not known here:
    text would be cut up in another way than the model was trained with.
    """
    if "tokenizer.ggml.tokens" not in header.metadata:
        return None
    tables = _tables(header)
    try:
        architecture, description, settings = tables.get_gguf_tokenizer(str(header.path))
        backend, _ = tables.convert_gguf_tokenizer(architecture, description)
    except ValueError as error:
        raise OctavoError(f"{header.path.name}: {str(error).splitlines()[0]}") from error
    if description.get("tokenizer_type") == "gpt2":
        name = str(description.get("pre_tokenizer_type", "default"))
        if name not in tables.GGUF_PRE_TOKENIZER_SPLITS:
            _set_split(header, backend, name)
    settings = {key: value for key, value in settings.items() if value is not None}
    make: Any = PreTrainedTokenizerFast  # its class is not typed
    tokenizer: PreTrainedTokenizerFast = make(tokenizer_object=backend, **settings)
    return tokenizer


def _tables(header: GgufHeader) -> Any:
    """transformers' own tables of GGUF tokenisers; releases before 5.24 may lack some."""
    name = "transformers.integrations.gguf.gguf_tokenizer_mapping"
    try:
        module = importlib.import_module(name)
    except ImportError:
        module = None
    if not hasattr(module, "GGUF_PRE_TOKENIZER_SPLITS"):
        raise OctavoError(
            f"{header.path.name}: transformers {transformers.__version__} does not know how GGUF"
            " vocabularies split text; upgrade it to 5.24 or later, or use a safetensors model"
        )
    return module


def _set_split(header: GgufHeader, backend: Tokenizer, name: str) -> None:
    """Set a pre-tokeniser that transformers' table lacks."""
    if name in _GPT2_SPLIT:
        return
    if name not in _DIGITS_SPLIT:
        raise OctavoError(
            f"{header.path.name}: pre-tokeniser '{name}' is not supported yet; use the model's"
            " safetensors checkpoint, which brings its tokenizer.json"
        )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def gguf_generation_config(header: GgufHeader) -> dict[str, Any]:
    """bos, eos and pad ids; eos lists every token that ends an answer, in a chat too."""
    metadata = header.metadata
    eos = {
        int(metadata[key])
        for key in ("eos_token_id", "eot_token_id", "eom_token_id")
        for key in (f"tokenizer.ggml.{key}",)
        if key in metadata
    }
    template = str(metadata.get("tokenizer.chat_template", ""))
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    types = metadata.get("tokenizer.ggml.token_type", [])
    for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=False)):
        if token_type == _CONTROL and token in _END_OF_TURN and token in template:
            eos.add(token_id)
    ids: dict[str, Any] = {"eos_token_id": sorted(eos)} if eos else {}
    for key, name in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        if (value := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            ids[name] = int(value)
    return ids
