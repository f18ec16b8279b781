"""A tiny llama with a tokenizer of bytes: a whole checkpoint, as the hub has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from model_zoo import TINY
from transformers import AutoModelForCausalLM

from tests.runtime.toy_artifact import BOS, CHAT_TEMPLATE, EOS, VOCAB_SIZE, byte_tokenizer


def write_checkpoint(folder: Path, name: str = "llama", **saving: Any) -> None:
    """A model of the zoo with a tokenizer of bytes; ``saving`` goes to save_pretrained."""
    config = TINY[name]()
    config.vocab_size, config.bos_token_id, config.eos_token_id = VOCAB_SIZE, BOS, EOS
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder, **saving)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
