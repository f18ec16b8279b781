"""Weights of an artifact in one block: read, and made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.runtime import device_weights
from octavo.runtime.artifact import Artifact
from octavo.runtime.device_weights import load_weights, packed_bytes, stored_weights
from octavo.runtime.errors import ArtifactError
from octavo.runtime.llm import LLM
from tests.runtime.toy_artifact import write_manifest

CPU = torch.device("cpu")


def write(toy: Path, shapes: dict[str, object] | None = None) -> dict[str, torch.Tensor]:
    """Replace the weights: two shards, sizes that leave gaps, an empty tensor and a scalar."""
    generator = torch.Generator().manual_seed(7)
    shards = [
        {
            "a": torch.randn(3, 5, generator=generator).bfloat16(),
            "b": torch.randn(1, generator=generator),
            "empty": torch.zeros(0, 4),
        },
        {
            "c": torch.randint(-9, 9, (7,), generator=generator),
            "d": torch.randn(70, 11, generator=generator).half(),
            "scalar": torch.tensor(3.5),
        },
    ]
    weight_map = {}
    for number, tensors in enumerate(shards):
        save_file(tensors, toy / f"weights/{number}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{number}.safetensors")
    index = {"weight_map": weight_map, **({"shapes": shapes} if shapes else {})}
    (toy / "weights/index.json").write_text(json.dumps(index))
    write_manifest(toy)
    return shards[0] | shards[1]


@pytest.mark.parametrize("piece_bytes", [16, 100, 2**20])
def test_every_tensor_is_what_was_stored(
    toy: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_weights, "_PIECE_BYTES", piece_bytes)
    expected = write(toy)
    stored = stored_weights(Artifact.open(toy))
    loaded = load_weights(stored, CPU, dummy=False)
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
        assert loaded[name].data_ptr() % 16 == 0
    storages = {tensor.untyped_storage().data_ptr() for tensor in loaded.values()}
    assert len(storages) == 1
    assert packed_bytes(stored) == loaded["a"].untyped_storage().nbytes()


def test_dummies_are_random_floats_and_zeros(toy: Path) -> None:
    write(toy)
    stored = stored_weights(Artifact.open(toy))
    first, second = (load_weights(stored, CPU, dummy=True) for _ in range(2))
    assert 0.01 < first["d"].float().std() < 0.03
    assert not first["c"].any()
    assert all(torch.equal(first[name], second[name]) for name in stored)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "float8_e4m3fn"])
def test_dummies_of_codes_are_random_numbers(dtype: str, toy: Path) -> None:
    write(toy, shapes={"codes": [dtype, [64, 32]], "scales": ["float8_e8m0fnu", [64]]})
    loaded = load_weights(stored_weights(Artifact.open(toy)), CPU, dummy=True)
    codes = loaded["codes"].double()
    assert len(codes.unique()) > 100
    assert bool(codes.isfinite().all())
    assert set(loaded["scales"].float().tolist()) == {2.0**-6}


def test_weights_that_are_absent_are_made_up_beside_those_that_are_there(toy: Path) -> None:
    expected = write(toy, shapes={"absent": ["bfloat16", [64, 32]]})
    artifact = Artifact.open(toy)
    with pytest.raises(ArtifactError, match=r"compiled without weights .*load_format='dummy'"):
        load_weights(stored_weights(artifact), CPU, dummy=False)
    loaded = load_weights(stored_weights(artifact), CPU, dummy=True)
    assert loaded["absent"].shape == (64, 32)
    assert loaded["absent"].dtype == torch.bfloat16
    assert 0.01 < loaded["absent"].float().std() < 0.03
    assert torch.equal(loaded["c"], expected["c"])


def test_a_damaged_shard_is_refused(toy: Path) -> None:
    write(toy)
    artifact = Artifact.open(toy)
    shard = toy / "weights/1.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-40])
    with pytest.raises(ArtifactError, match="ends too early"):
        load_weights(stored_weights(artifact), CPU, dummy=False)
    shard.write_bytes(b"\xff" * 40)
    with pytest.raises(ArtifactError, match="cannot be read"):
        stored_weights(artifact)


def test_an_llm_with_dummy_weights_generates(toy: Path) -> None:
    [output] = LLM(toy, load_format="dummy").generate([[1, 2]])
    assert len(output.outputs[0].token_ids) > 0
