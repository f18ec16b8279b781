"""An artifact small enough to write by hand, whose model notices every fault of the KV cache.

The model keeps each token's id in its key cache and its position in its value cache, reads its
whole context back through the block table, and hashes it into logits. A wrong slot, a stale block
or a lost token gives other tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from octavo.ir.manifest import FileEntry, KVSlot, Manifest

VOCAB_SIZE = 260
BOS, EOS, IM_START, IM_END = range(256, 260)
MAX_POSITION = 512

PROGRAM = """
import torch

from .kernels.src.mix import mix


class Program:
    def __init__(self, weights, kv_caches, *, max_num_tokens, max_num_seqs):
        self.salt = weights["salt"]
        self.keys, self.values = kv_caches[0]
        self.max_num_tokens, self.max_num_seqs = max_num_tokens, max_num_seqs

    def __call__(
        self, ids, positions, slot_mapping, block_table, query_start, seq_lens, logit_rows
    ):
        assert len(ids) <= self.max_num_tokens and len(seq_lens) <= self.max_num_seqs
        self.keys.flatten(0, 1)[slot_mapping] = ids.float()[:, None, None]
        self.values.flatten(0, 1)[slot_mapping] = positions.float()[:, None, None]
        owners = torch.searchsorted(query_start[1:].contiguous(), logit_rows, right=True)
        rows = [self.row(block_table[s], int(positions[r]) + 1) for s, r in zip(owners, logit_rows)]
        return torch.stack(rows) if rows else torch.empty(0, 260)

    def row(self, block_ids, length):
        tokens = self.keys[block_ids].flatten(0, 1)[:length, 0, 0].long()
        places = self.values[block_ids].flatten(0, 1)[:length, 0, 0].long()
        assert torch.equal(places, torch.arange(length)), "the cache is not in order"
        return mix(tokens, self.salt)
"""

KERNEL = '''
import torch


def mix(tokens, salt):
    """Logits out of a hash of the context."""
    state = 17
    for token in tokens.tolist():
        state = (state * 1000003 + token + 1) % 2147483647
    index = torch.arange(260, dtype=torch.int64)
    noise = ((index + 1) * (state % 65521 + 1) * 2654435761 + state) % 4294967296
    return (noise.double() / 4294967296 * 8).float() + salt
'''

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] "
    "+ '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """A byte-level tokenizer without merges: one token a byte, so that characters are split."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    raw.add_special_tokens([AddedToken(text, special=True) for text in special])
    raw.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", BOS)])
    return raw


def files_of(folder: Path) -> dict[str, FileEntry]:
    """Manifest entries of everything in a folder."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): FileEntry(
            path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest(), "file"
        )
        for path in paths
        if path.name != "manifest.json"
    }


def write_manifest(folder: Path, **changes: Any) -> Manifest:
    """Write manifest.json for the files as they are now."""
    fields: dict[str, Any] = {
        "architecture": "ToyForCausalLM",
        "model_type": "toy",
        "target": "cpu",
        "dtype": "f32",
        "vocab_size": VOCAB_SIZE,
        "max_position": MAX_POSITION,
        "kv_slots": (KVSlot(num_kv_heads=1, head_dim=2, v_head_dim=3),),
        "files": files_of(folder),
    }
    manifest = Manifest(**{**fields, **changes})
    (folder / "manifest.json").write_text(manifest.to_json())
    return manifest


def write_toy_artifact(
    folder: Path,
    *,
    tokenizer: Tokenizer | None = None,
    generation_config: Mapping[str, Any] | None = None,
    program: str = PROGRAM,
) -> Manifest:
    """Write the whole artifact; with the byte tokenizer unless another is given."""
    for name in ("kernels/src", "weights", "model"):
        (folder / name).mkdir(parents=True)
    (folder / "program.py").write_text(program)
    (folder / "kernels/src/mix.py").write_text(KERNEL)
    save_file({"salt": torch.zeros(VOCAB_SIZE)}, folder / "weights/weights-00001.safetensors")
    index = {"weight_map": {"salt": "weights-00001.safetensors"}}
    (folder / "weights/index.json").write_text(json.dumps(index))
    (folder / "model/config.json").write_text(json.dumps({"eos_token_id": EOS}))
    if generation_config is not None:
        (folder / "model/generation_config.json").write_text(json.dumps(generation_config))
    (tokenizer or byte_tokenizer()).save(str(folder / "model/tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": CHAT_TEMPLATE}
    (folder / "model/tokenizer_config.json").write_text(json.dumps(config))
    return write_manifest(folder)
