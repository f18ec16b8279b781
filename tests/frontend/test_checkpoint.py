"""Safetensors: what is read equals what transformers wrote; what is broken is refused by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.frontend.accounting import account
from octavo.frontend.checkpoint import INDEX_NAME, SafetensorsFile, open_checkpoint
from octavo.frontend.source import open_weights, resolve
from octavo.ir.errors import OctavoError

MODEL_TYPES = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "opt",
    "phi3",
    "stablelm",
    "cohere",
    "mixtral",
    "qwen3_moe",
]


def assert_loads_as(directory: Path, model: Any, meta_model: Any) -> None:
    weights = open_weights(resolve(directory), meta_model)
    account(meta_model, weights)
    for key, value in model.state_dict().items():
        info = weights.info(key)
        loaded = weights.load(key)
        assert (info.shape, info.dtype) == (tuple(loaded.shape), loaded.dtype), key
        assert torch.equal(loaded, value), key


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_loads_what_transformers_saved(
    model_type: str,
    max_shard_size: str,
    tiny_model: Callable[..., Any],
    on_meta: Callable[..., Any],
    tmp_path: Path,
) -> None:
    model = tiny_model(model_type)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / INDEX_NAME).exists() == (max_shard_size == "20KB")
    assert_loads_as(tmp_path, model, on_meta(model.config))


def test_experts_are_stacked_from_one_tensor_each(
    tiny_model: Callable[..., Any], on_meta: Callable[..., Any], tmp_path: Path
) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.1.mlp.experts"
    assert f"{prefix}.3.gate_proj.weight" in stored
    weights = open_weights(resolve(tmp_path), on_meta(model.config))
    expected = torch.stack(
        [
            torch.cat(
                [stored[f"{prefix}.{e}.gate_proj.weight"], stored[f"{prefix}.{e}.up_proj.weight"]]
            )
            for e in range(4)
        ]
    )
    assert torch.equal(weights.load(f"{prefix}.gate_up_proj"), expected)


@pytest.mark.parametrize(
    ("model_type", "prefix"), [("gpt2", "transformer."), ("llama", "model."), ("opt", "model.")]
)
def test_the_base_models_prefix_may_be_absent(
    model_type: str,
    prefix: str,
    tiny_model: Callable[..., Any],
    on_meta: Callable[..., Any],
    tmp_path: Path,
) -> None:
    model = tiny_model(model_type, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({k.removeprefix(prefix): v for k, v in load_file(path).items()}, path)
    assert_loads_as(tmp_path, model, on_meta(model.config))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int64,
        torch.int16,
        torch.uint8,
        torch.bool,
    ],
)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5, 7), (2, 3, 5)])
def test_every_dtype_and_shape_comes_back(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    path = tmp_path / "x.safetensors"
    stored = {"pad": torch.ones(3, dtype=torch.uint8), "x": torch.randn(shape).mul(9).to(dtype)}
    save_file(stored, path)
    file = SafetensorsFile(path)
    loaded = file.read("x")
    assert loaded.dtype == dtype
    assert loaded.shape == shape
    assert loaded.tolist() == stored["x"].tolist()


def test_loading_keeps_no_more_than_a_tensor(tmp_path: Path) -> None:
    """64 tensors of 4 MiB: resident memory stays within a few of them (Linux)."""
    save_file({f"t{i}": torch.ones(1 << 20) for i in range(64)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.read("t0")
    before = _resident_bytes()
    for name in checkpoint.names():
        checkpoint.read(name)
    assert _resident_bytes() - before < 16 << 20


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs /proc")
    return int(statm.read_text().split()[1]) * 4096


@pytest.mark.parametrize("keep", [0, 5, 8, 200, -4])
def test_a_cut_file_is_refused(saved_llama: Path, keep: int) -> None:
    path = saved_llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(OctavoError, match=r"^model.safetensors is (cut short|corrupt): .*again$"):
        resolve(saved_llama)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"\xff{", "its header is not JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"a": {"dtype": "F32"}}', "entry of 'a' is malformed"),
        (b'{"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}', "dtype F3"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "needs 8 bytes"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}', "malformed|needs 4"),
        (b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', "ends at byte"),
    ],
)
def test_a_corrupt_header_is_refused(tmp_path: Path, header: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(OctavoError, match=message):
        SafetensorsFile(path)


@pytest.fixture
def sharded(tiny_model: Callable[..., Any], tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "m", max_shard_size="20KB")
    return tmp_path / "m"


def test_a_missing_shard_is_named(sharded: Path) -> None:
    next(iter(sorted(sharded.glob("*.safetensors")))).unlink()
    with pytest.raises(OctavoError, match=r"1 of \d+ shards .* missing \(model-00001-of"):
        resolve(sharded)


def test_an_index_that_lies_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_NAME).read_text())
    index["weight_map"]["model.phantom"] = sorted(index["weight_map"].values())[0]
    (sharded / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(OctavoError, match=r"tensor 'model.phantom' is in model-00001.*not hold it"):
        resolve(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    save_file({**load_file(first), **load_file(second)}, second)
    with pytest.raises(OctavoError, match=r"stands in both model-00001"):
        resolve(sharded)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON with"), ("[]", "not JSON with"), ('{"weight_map": {"a": "../b"}}', "plain")],
)
def test_a_bad_index_is_refused(sharded: Path, text: str, message: str) -> None:
    (sharded / INDEX_NAME).write_text(text)
    with pytest.raises(OctavoError, match=message):
        resolve(sharded)


def test_pickles_are_refused(saved_llama: Path) -> None:
    (saved_llama / "model.safetensors").rename(saved_llama / "pytorch_model.bin")
    with pytest.raises(OctavoError, match="convert it to safetensors"):
        resolve(saved_llama)


def test_two_unindexed_files_are_refused(saved_llama: Path) -> None:
    data = (saved_llama / "model.safetensors").read_bytes()
    (saved_llama / "model.safetensors").rename(saved_llama / "a.safetensors")
    assert resolve(saved_llama).kind == "safetensors"  # the only file needs no particular name
    (saved_llama / "b.safetensors").write_bytes(data)
    with pytest.raises(OctavoError, match="holds 2 safetensors files and no"):
        resolve(saved_llama)
