"""Bad input to the compiler gets one clear line, exit status 2, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from command_line import Command, assert_refused, nothing_left_behind, octavo
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from octavo.compile import compile_model
from octavo.ir.errors import OctavoError
from octavo.runtime.artifact import Artifact
from tests.end_to_end.tiny_llama import write_checkpoint

WEIGHTS = "model.safetensors"
SHARD = "model-00002-of-"


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that the test may damage."""
    return shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same in several shards."""
    write_checkpoint(tmp_path / "sharded", max_shard_size="100KB")
    return tmp_path / "sharded"


def shard_of(folder: Path) -> Path:
    return next(folder.glob(f"{SHARD}*"))


def refused(octavo_here: Command, model: Path, *words: str) -> None:
    """Compiling ``model`` is refused with those words; nothing appears beside it."""
    output = model.parent / "out"
    with nothing_left_behind(model.parent):
        assert_refused(octavo_here("compile", model, "-o", output, "--target", "cpu"), *words)


# Models that are none.


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "model"
    with nothing_left_behind(tmp_path):
        assert_refused(
            octavo("compile", missing, "-o", tmp_path / "out"), str(missing), "not exist"
        )


def test_a_directory_without_a_config(octavo_here: Command, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    refused(octavo_here, tmp_path / "model", "model has no config.json", "is it a model directory?")


def test_a_config_that_is_not_json(octavo_here: Command, checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"model_type": ')
    refused(octavo_here, checkpoint, "config.json is not JSON")


def test_an_unknown_model_type(octavo_here: Command, checkpoint: Path) -> None:
    edit_config(checkpoint, model_type="llamma")
    refused(octavo_here, checkpoint, "config.json", "llamma", "transformers")


def test_a_config_of_a_wrong_kind(octavo_here: Command, checkpoint: Path) -> None:
    edit_config(checkpoint, hidden_size="big")
    refused(octavo_here, checkpoint, "config.json", "hidden_size", "int", "'big'")


def edit_config(checkpoint: Path, **changes: Any) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# Checkpoints that are not whole.


def test_a_truncated_file(octavo_here: Command, checkpoint: Path) -> None:
    os.truncate(checkpoint / WEIGHTS, (checkpoint / WEIGHTS).stat().st_size - 1000)
    refused(octavo_here, checkpoint, WEIGHTS, "cut short", "download the file again")


def test_a_truncated_shard(octavo_here: Command, sharded: Path) -> None:
    os.truncate(shard_of(sharded), shard_of(sharded).stat().st_size - 1)
    refused(octavo_here, sharded, SHARD, "cut short", "download the file again")


def test_an_empty_shard(octavo_here: Command, sharded: Path) -> None:
    os.truncate(shard_of(sharded), 0)
    refused(octavo_here, sharded, SHARD, "corrupt", "download the file again")


def test_a_missing_shard(octavo_here: Command, sharded: Path) -> None:
    name = shard_of(sharded).name
    shard_of(sharded).unlink()
    refused(octavo_here, sharded, name, "missing", "download")


def test_no_weights(octavo_here: Command, checkpoint: Path) -> None:
    (checkpoint / WEIGHTS).unlink()
    refused(octavo_here, checkpoint, WEIGHTS, "--random-weights")


def edit_weights(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(checkpoint / WEIGHTS)
    change(tensors)
    save_file(tensors, checkpoint / WEIGHTS, metadata={"format": "pt"})


def test_a_tensor_missing(octavo_here: Command, checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda tensors: tensors.pop("model.norm.weight"))
    refused(octavo_here, checkpoint, "1 tensor missing (model.norm.weight)", "config.json")


def test_a_tensor_too_many(octavo_here: Command, checkpoint: Path) -> None:
    name = "model.layers.7.mlp.up_proj.weight"
    edit_weights(checkpoint, lambda t: t.update({name: t["model.norm.weight"].clone()}))
    refused(octavo_here, checkpoint, f"1 tensor not of this model ({name})", "config.json")


def test_a_tensor_of_another_shape(octavo_here: Command, checkpoint: Path) -> None:
    name = "model.norm.weight"
    edit_weights(checkpoint, lambda t: t.update({name: t[name][:63].clone()}))
    refused(octavo_here, checkpoint, f"{name}: expected [64], got [63]", "config.json")


def test_a_tensor_that_is_not_a_number(octavo_here: Command, checkpoint: Path) -> None:
    name = "model.norm.weight"
    edit_weights(checkpoint, lambda tensors: tensors[name].fill_(float("nan")))
    refused(octavo_here, checkpoint, f"{name} holds a NaN", "download or export it again")


def test_a_quantised_tensor(octavo_here: Command, checkpoint: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit_weights(checkpoint, lambda tensors: tensors.update({name: tensors[name].char()}))
    refused(octavo_here, checkpoint, f"{name} is stored as int8", "quantised")


def test_a_broken_tokenizer(octavo_here: Command, checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").write_text('{"version": "1.0"}')
    refused(octavo_here, checkpoint, "tokenizer.json cannot be loaded", "download the file again")


def test_a_vocabulary_beyond_memory(octavo_here: Command, checkpoint: Path) -> None:
    edit_config(checkpoint, vocab_size=10**12)
    arguments = ("compile", checkpoint, "-o", checkpoint.parent / "out", "--random-weights", "0")
    with nothing_left_behind(checkpoint.parent):
        assert_refused(octavo_here(*arguments), "not enough memory for", "[1000000000000, 64]")


def test_positions_beyond_memory(octavo_here: Command, checkpoint: Path) -> None:
    edit_config(checkpoint, max_position_embeddings=10**9)
    refused(octavo_here, checkpoint, "max_position_embeddings is 1000000000", "16777216")


def test_ten_million_positions(octavo_here: Command, checkpoint: Path) -> None:
    """No table of that many rows is made."""
    edit_config(checkpoint, max_position_embeddings=10**7)
    output = checkpoint.parent / "out"
    assert octavo_here("compile", checkpoint, "-o", output, "--target", "cpu").returncode == 0
    assert sum(path.stat().st_size for path in output.rglob("*") if path.is_file()) < 5e6


def test_an_artifact_instead_of_a_model(
    octavo_here: Command, tiny_artifact: Path, tmp_path: Path
) -> None:
    with nothing_left_behind(tmp_path):
        done = octavo_here("compile", tiny_artifact, "-o", tmp_path / "out")
        assert_refused(done, "is an artifact already", "octavo chat")


def test_a_revision_of_a_path(octavo_here: Command, checkpoint: Path) -> None:
    output = checkpoint.parent / "out"
    with nothing_left_behind(checkpoint.parent):
        done = octavo_here("compile", checkpoint, "-o", output, "--revision", "main")
        assert_refused(done, "is a path here", "--revision")


def test_two_threads_at_once(tiny_checkpoint: Path, tiny_artifact: Path, tmp_path: Path) -> None:
    """Both compile what one alone compiles."""

    def compiled(name: str) -> str:
        output = tmp_path / name
        return compile_model(tiny_checkpoint, output, target="cpu", progress=False).artifact_id

    with ThreadPoolExecutor(2) as pool:
        ids = list(pool.map(compiled, ("one", "two")))
    assert ids == [Artifact.open(tiny_artifact).manifest.artifact_id] * 2


# Architectures that would not come out right. A wrong answer is never given.

_SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "n_layer": 2,
    "n_head": 4,
}
REFUSED = {
    "bert": (_SMALL, "encoder-only"),
    "bloom": (_SMALL, "position_ids"),
    "falcon": (_SMALL, "attention interface"),
    "gpt_neo": (
        {**_SMALL, "num_layers": 2, "attention_types": [[["global", "local"], 1]]},
        "attention interface",
    ),
    "mamba": (_SMALL, "carry a state"),
    "mixtral": (
        {**_SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 4},
        "mixture-of-experts",
    ),
    "mpt": ({"vocab_size": 256, "d_model": 64, "n_layers": 2, "n_heads": 4}, "position_ids"),
    "qwen3_moe": (
        {**_SMALL, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 32},
        "mixture-of-experts",
    ),
    "rwkv": (_SMALL, "position_ids"),
    "t5": ({"vocab_size": 256, "d_model": 64, "num_layers": 2, "num_heads": 4}, "encoder-decoder"),
    "xglm": ({**_SMALL, "d_model": 64, "num_layers": 2, "attention_heads": 4}, "attention"),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_an_architecture_that_would_come_out_wrong(
    model_type: str, octavo_here: Command, tmp_path: Path
) -> None:
    sizes, reason = REFUSED[model_type]
    config = tmp_path / "config.json"
    config.write_text(AutoConfig.for_model(model_type, **sizes).to_json_string())
    arguments = ("compile", config, "-o", tmp_path / "out", "--random-weights", "0")
    with nothing_left_behind(tmp_path):
        assert_refused(octavo_here(*arguments), model_type, reason)
        with pytest.raises(OctavoError, match=reason):
            compile_model(config, tmp_path / "out", random_weights=0, progress=False)


# The output directory.


def test_an_existing_output(octavo_here: Command, tiny_checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    with nothing_left_behind(tmp_path):
        done = octavo_here("compile", tiny_checkpoint, "-o", output)
        assert_refused(done, str(output), "exists", "--force")


def test_force_replaces_an_artifact(
    octavo_here: Command, tiny_checkpoint: Path, tiny_artifact: Path, tmp_path: Path
) -> None:
    output = shutil.copytree(tiny_artifact, tmp_path / "out")
    (output / "manifest.json").write_text("{}")
    done = octavo_here("compile", tiny_checkpoint, "-o", output, "--target", "cpu", "--force")
    assert done.returncode == 0, done.stderr
    wanted = Artifact.open(tiny_artifact).manifest.artifact_id
    assert Artifact.open(output).manifest.artifact_id == wanted
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_compile_that_fails_leaves_the_old_artifact(
    octavo_here: Command, checkpoint: Path, tiny_artifact: Path, tmp_path: Path
) -> None:
    output = shutil.copytree(tiny_artifact, tmp_path / "out")
    edit_weights(checkpoint, lambda tensors: tensors.pop("model.norm.weight"))
    with nothing_left_behind(tmp_path):
        done = octavo_here("compile", checkpoint, "-o", output, "--target", "cpu", "--force")
        assert_refused(done, "model.norm.weight")
    Artifact.open(output)


def test_an_output_below_a_file(
    octavo_here: Command, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with nothing_left_behind(tmp_path):
        done = octavo_here("compile", tiny_checkpoint, "-o", tmp_path / "file" / "out")
        assert_refused(done, str(tmp_path / "file"), "irectory")


def test_a_dtype_that_the_target_does_not_have(octavo_here: Command, checkpoint: Path) -> None:
    output = checkpoint.parent / "out"
    with nothing_left_behind(checkpoint.parent):
        done = octavo_here("compile", checkpoint, "-o", output, "--dtype", "float16")
        assert_refused(done, "float16", "cpu", "--dtype float32")
