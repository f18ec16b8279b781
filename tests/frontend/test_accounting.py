"""Accounting: every tensor is used once, tied or explained, or the error names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.frontend.accounting import Accounting, account
from octavo.frontend.source import open_weights, resolve
from octavo.ir.errors import OctavoError

Edit = Callable[[dict[str, torch.Tensor]], Any]
DOWN = "model.layers.0.mlp.down_proj.weight"


def account_after(directory: Path, on_meta: Callable[..., Any], edit: Edit) -> Accounting:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
    source = resolve(directory)
    model = on_meta(source.config)
    return account(model, open_weights(source, model))


def test_a_whole_checkpoint_is_used_whole(saved_llama: Path, on_meta: Callable[..., Any]) -> None:
    accounting = account_after(saved_llama, on_meta, lambda tensors: None)
    stored = load_file(saved_llama / "model.safetensors")
    assert set(accounting.used) == set(stored)
    assert accounting.num_bytes == sum(t.numel() * 4 for t in stored.values())
    assert (accounting.tied, accounting.explained) == ({}, {})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(DOWN), rf"1 tensor missing \({DOWN}\); check"),
        (
            lambda t: [t.pop(k) for k in list(t) if "mlp" in k],
            r"6 tensors missing \(\S+gate_proj.weight, \S+, \S+, \.\.\.\)",
        ),
        (lambda t: t.update(q=torch.ones(1)), r"1 tensor not of this model \(q\)"),
        (
            lambda t: t.update({DOWN: torch.ones(3, 5)}),
            rf"1 tensor of another shape \({DOWN}: expected \[32, 48\], got \[3, 5\]\)",
        ),
        (
            lambda t: t.update({DOWN: torch.ones(32, 48, dtype=torch.int8)}),
            rf"{DOWN} is stored as int8, expected a float tensor; config.json has no",
        ),
        (
            lambda t: (t.pop(DOWN), t.update(q=torch.ones(1))),
            r"LlamaForCausalLM: 1 tensor missing .*; 1 tensor not of this model .*; check",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    saved_llama: Path, on_meta: Callable[..., Any], edit: Edit, message: str
) -> None:
    with pytest.raises(OctavoError, match=message) as caught:
        account_after(saved_llama, on_meta, edit)
    assert "\n" not in str(caught.value)


def test_old_rotary_buffers_are_explained(saved_llama: Path, on_meta: Callable[..., Any]) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    accounting = account_after(saved_llama, on_meta, lambda t: t.update({name: torch.ones(4)}))
    assert list(accounting.explained) == [name]


def test_gpt2_mask_buffers_are_explained(
    tiny_model: Callable[..., Any], on_meta: Callable[..., Any], tmp_path: Path
) -> None:
    tiny_model("gpt2").save_pretrained(tmp_path)
    name = "transformer.h.0.attn.bias"
    accounting = account_after(
        tmp_path, on_meta, lambda t: t.update({name: torch.ones(1, 1, 4, 4)})
    )
    assert list(accounting.explained) == [name]


@pytest.fixture
def tied(tiny_model: Callable[..., Any], tmp_path: Path) -> Path:
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "tied")
    return tmp_path / "tied"


EMBED = "model.embed_tokens.weight"


def test_a_tied_head_may_be_absent(tied: Path, on_meta: Callable[..., Any]) -> None:
    accounting = account_after(tied, on_meta, lambda tensors: None)
    assert accounting.tied == {"lm_head.weight": EMBED}


def test_a_tied_head_may_stand_for_the_embedding(tied: Path, on_meta: Callable[..., Any]) -> None:
    embedding = load_file(tied / "model.safetensors")[EMBED]
    accounting = account_after(
        tied, on_meta, lambda tensors: tensors.update({"lm_head.weight": tensors.pop(EMBED)})
    )
    assert accounting.tied == {EMBED: "lm_head.weight"}
    source = resolve(tied)
    assert torch.equal(open_weights(source, on_meta(source.config)).load(EMBED), embedding)


def test_a_tied_head_may_be_stored_equal(tied: Path, on_meta: Callable[..., Any]) -> None:
    accounting = account_after(
        tied, on_meta, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBED].clone()})
    )
    assert {"lm_head.weight", EMBED} <= set(accounting.used)


def test_a_tied_head_that_differs_is_refused(tied: Path, on_meta: Callable[..., Any]) -> None:
    with pytest.raises(OctavoError, match="stored with different values, but the config ties them"):
        account_after(
            tied, on_meta, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBED] + 1})
        )


def test_one_tensor_under_two_names_is_refused(
    saved_llama: Path, on_meta: Callable[..., Any]
) -> None:
    with pytest.raises(OctavoError, match=r"'model.norm.weight' and 'norm.weight' are both"):
        account_after(
            saved_llama,
            on_meta,
            lambda tensors: tensors.update({"norm.weight": tensors["model.norm.weight"].clone()}),
        )


def test_a_missing_expert_is_found(
    tiny_model: Callable[..., Any], on_meta: Callable[..., Any], tmp_path: Path
) -> None:
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    lost = "model.layers.0.mlp.experts.3.down_proj.weight"
    with pytest.raises(OctavoError, match=r"experts.down_proj: expected \[4, 32, 24\], got \[3"):
        account_after(tmp_path, on_meta, lambda tensors: tensors.pop(lost))
