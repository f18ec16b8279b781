"""What cannot be read is refused by name: never loaded wrongly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.frontend.config import read_config
from octavo.frontend.source import resolve
from octavo.ir.errors import OctavoError
from tests.frontend.quantized_checkpoints import DATA, open_directory

Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors], Any]
Configure = Callable[[dict[str, Any]], Any]

UP = "model.layers.0.mlp.up_proj"


def changed(
    name: str, directory: Path, edit: Edit | None = None, configure: Configure | None = None
) -> Path:
    """A copy of a checkpoint with other tensors, or another quantization_config."""
    shutil.copytree(DATA / name, directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    if edit:
        edit(tensors)
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    config = json.loads((directory / "config.json").read_text())
    if configure:
        configure(config["quantization_config"])
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def put(name: str, index: int, value: float) -> Edit:
    """Set one element of a tensor."""

    def edit(tensors: Tensors) -> None:
        tensors[name].view(-1)[index] = value

    return edit


def cut(name: str, dim: int) -> Edit:
    """Leave out the last row or column of a tensor."""

    def edit(tensors: Tensors) -> None:
        tensors[name] = tensors[name].narrow(dim, 0, tensors[name].shape[dim] - 1)

    return edit


BAD_SCALES = {
    "awq-gemm": "scales",
    "bnb-int8": "SCB",
    "bnb-nf4": "weight.absmax",
    "bnb-nf4-double": "weight.nested_absmax",
    "ct-fp8-block": "weight_scale",
    "ct-fp8-tensor": "weight_scale",
    "ct-w4a16": "weight_scale",
    "ct-w8a8-int": "weight_scale",
    "fp8-blocks": "weight_scale_inv",
    "fp8-tensor": "weight_scale_inv",
    "gptq-4bit": "scales",
}
# In these a block of zeros has the scale zero.
ZERO_IS_SOUND = ("bnb-int8", "bnb-nf4", "bnb-nf4-double")


@pytest.mark.parametrize(
    ("kind", "value"), [("NaN", float("nan")), ("infinite", float("inf")), ("zero", 0.0)]
)
@pytest.mark.parametrize("name", sorted(BAD_SCALES))
def test_a_bad_scale(name: str, kind: str, value: float, tmp_path: Path) -> None:
    scales = f"{UP}.{BAD_SCALES[name]}"
    store = open_directory(changed(name, tmp_path / "m", put(scales, -1, value)))
    if kind == "zero" and name in ZERO_IS_SOUND:
        assert bool(store.read(f"{UP}.weight").isfinite().all())
        return
    with pytest.raises(OctavoError, match=rf"^{scales}: 1 of \d+ scales are {kind}"):
        store.read(f"{UP}.weight")


@pytest.mark.parametrize("side", ["blocks", "scales"])
def test_mxfp4_stacks_that_do_not_fit(side: str, tmp_path: Path) -> None:
    key = "model.layers.0.mlp.experts.down_proj"
    store = open_directory(changed("mxfp4-gpt-oss", tmp_path / "m", cut(f"{key}_{side}", 1)))
    with pytest.raises(OctavoError, match=rf"^{key}_scales has the shape .*, expected "):
        store.read(key)


def test_an_exponent_that_is_no_number(tmp_path: Path) -> None:
    key = "model.layers.0.mlp.experts.down_proj"
    store = open_directory(changed("mxfp4-gpt-oss", tmp_path / "m", put(f"{key}_scales", 0, 255)))
    with pytest.raises(OctavoError, match=rf"^{key}_scales: 1 of \d+ scales are NaN"):
        store.read(key)


MISSING = {
    "awq-gemm": ("scales", "qzeros"),
    "bnb-int8": ("SCB",),
    "bnb-nf4": ("weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4"),
    "bnb-nf4-double": ("weight.nested_quant_map",),
    "ct-fp8-block": ("weight_scale",),
    "ct-w4a16": ("weight_shape", "weight_scale"),
    "ct-w4a16-zeros": ("weight_zero_point",),
    "ct-w8a8-int": ("weight_scale",),
    "fp8-blocks": ("weight_scale_inv",),
    "gptq-4bit": ("scales", "qzeros"),
    "gptq-4bit-act-order": ("g_idx",),
}


@pytest.mark.parametrize(
    ("name", "part"), [(name, part) for name, parts in MISSING.items() for part in parts]
)
def test_a_missing_part(name: str, part: str, tmp_path: Path) -> None:
    """Told when the checkpoint is opened, before anything is traced."""
    directory = changed(name, tmp_path / "m", lambda tensors: tensors.pop(f"{UP}.{part}"))
    with pytest.raises(OctavoError, match=rf"^{UP}\.{part} is missing: "):
        resolve(directory)


@pytest.mark.parametrize(
    ("name", "part", "dim"),
    [
        ("awq-gemm", "qweight", 0),
        ("awq-gemm", "qzeros", 1),
        ("bnb-nf4", "weight", 0),
        ("bnb-nf4", "weight.absmax", 0),
        ("bnb-int8", "SCB", 0),
        ("ct-fp8-block", "weight_scale", 1),
        ("ct-w4a16", "weight_packed", 1),
        ("ct-w4a16-zeros", "weight_zero_point", 0),
        ("ct-w8a16", "weight_scale", 0),
        ("fp8-blocks", "weight_scale_inv", 0),
        ("gptq-4bit", "qweight", 0),
        ("gptq-4bit", "scales", 0),
        ("gptq-4bit", "qzeros", 1),
        ("gptq-4bit-act-order", "g_idx", 0),
    ],
)
def test_a_part_of_another_shape(name: str, part: str, dim: int, tmp_path: Path) -> None:
    directory = changed(name, tmp_path / "m", cut(f"{UP}.{part}", dim))
    pattern = rf"^{UP}\.[\w.]+(: K=\d+ is not a multiple| has the shape \[.*\], expected \[)"
    with pytest.raises(OctavoError, match=pattern):
        open_directory(directory).read(f"{UP}.weight")


def test_a_group_that_does_not_divide(tmp_path: Path) -> None:
    directory = changed("gptq-4bit", tmp_path / "m", configure=lambda c: c.update(group_size=48))
    with pytest.raises(OctavoError, match=r"K=64 is not a multiple of the group of 48"):
        open_directory(directory).read(f"{UP}.weight")


def test_groups_of_unequal_size(tmp_path: Path) -> None:
    directory = changed("gptq-4bit-act-order", tmp_path / "m", put(f"{UP}.g_idx", 0, 1))
    with pytest.raises(OctavoError, match=rf"^{UP}\.g_idx: expected each of 2 groups to have 32"):
        open_directory(directory).read(f"{UP}.weight")


def test_a_truncated_file(tmp_path: Path) -> None:
    directory = changed("awq-gemm", tmp_path / "m")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(OctavoError, match=r"model\.safetensors is cut short"):
        resolve(directory)


@pytest.mark.parametrize(
    "method",
    ["aqlm", "hqq", "eetq", "quip", "spqr", "vptq", "torchao", "bitnet", "quanto", "fbgemm_fp8"],
)
def test_a_method_that_is_not_known(method: str, tmp_path: Path) -> None:
    directory = changed(
        "awq-gemm", tmp_path / "m", configure=lambda c: c.update(quant_method=method)
    )
    with pytest.raises(OctavoError, match=f"quant_method {method} is not supported"):
        resolve(directory)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("awq-gemm", {"version": "gemv"}, "awq with version 'gemv' is not supported"),
        ("awq-gemm", {"version": "GEMV_FAST"}, "awq with version 'gemv_fast' is not supported"),
        ("awq-gemm", {"bits": 3}, "awq with bits=3 is not supported"),
        ("gptq-4bit", {"bits": 3}, "gptq with bits=3 is not supported"),
        ("gptq-4bit", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ("gptq-4bit", {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic settings by module"),
        ("gptq-4bit", {"group_size": None}, "group_size=None, expected a int"),
        ("ct-w4a16", {"sparsity_config": {"format": "marlin-24"}}, "sparsity 'marlin-24'"),
        ("ct-w4a16", {"transform_config": {"config_groups": {"a": 1}}}, "transform_config"),
        ("ct-w4a16", {"config_groups": {}}, "no target of config_groups"),
        ("fp8-blocks", {"activation_scheme": "odd"}, "activation_scheme 'odd'"),
        ("fp8-blocks", {"fmt": "e5m2"}, "fmt 'e5m2'"),
        ("fp8-blocks", {"weight_block_size": [128]}, r"weight_block_size \[128\]"),
    ],
)
def test_a_setting_that_is_not_supported(
    name: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    directory = changed(name, tmp_path / "m", configure=lambda c: c.update(settings))
    with pytest.raises(OctavoError, match=message):
        resolve(directory)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"num_bits": 2}, "pack-quantized weights of int2"),
        ({"type": "float"}, "pack-quantized weights of float4"),
        ({"strategy": "tensor_group"}, "weights by tensor_group"),
    ],
)
def test_weights_of_a_group_that_are_not_supported(
    weights: dict[str, Any], message: str, tmp_path: Path
) -> None:
    def configure(config: dict[str, Any]) -> None:
        config["config_groups"]["group_0"]["weights"].update(weights)

    directory = changed("ct-w4a16", tmp_path / "m", configure=configure)
    with pytest.raises(OctavoError, match=message):
        resolve(directory)


@pytest.mark.parametrize("form", ["nvfp4-pack-quantized", "marlin-24", "mxfp8-quantized"])
def test_a_format_of_compressed_tensors_that_is_not_supported(form: str, tmp_path: Path) -> None:
    def configure(config: dict[str, Any]) -> None:
        config["config_groups"]["group_0"]["format"] = form

    directory = changed("ct-w4a16", tmp_path / "m", configure=configure)
    with pytest.raises(OctavoError, match=f"compressed-tensors with format '{form}'"):
        resolve(directory)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("awq-gemm", {"modules_to_not_convert": ["up_proj"]}),
        ("bnb-int8", {"llm_int8_skip_modules": ["mlp.up_proj"]}),
        ("ct-w4a16", {"ignore": ["lm_head", UP]}),
        ("ct-w4a16", {"ignore": ["re:.*up_proj"]}),
        ("fp8-blocks", {"modules_to_not_convert": ["model.layers.0.mlp.up_proj"]}),
    ],
)
def test_a_module_that_the_config_calls_float(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    directory = changed(name, tmp_path / "m", configure=lambda c: c.update(settings))
    with pytest.raises(OctavoError, match=rf"^{UP}\.weight is stored quantised, but "):
        resolve(directory)


def test_a_weight_that_is_stored_twice(tmp_path: Path) -> None:
    directory = changed(
        "awq-gemm", tmp_path / "m", lambda t: t.update({f"{UP}.weight": torch.zeros(128, 64)})
    )
    with pytest.raises(OctavoError, match=rf"^{UP}\.weight is stored twice"):
        resolve(directory)


def test_fp4_of_bitsandbytes(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        state = tensors.pop(f"{UP}.weight.quant_state.bitsandbytes__nf4")
        tensors[f"{UP}.weight.quant_state.bitsandbytes__fp4"] = state

    with pytest.raises(OctavoError, match="bitsandbytes with 4-bit fp4 is not supported"):
        resolve(changed("bnb-nf4", tmp_path / "m", edit))


def test_no_weight_is_quantised(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        for key in list(tensors):
            if key.endswith(("qweight", "qzeros", "scales")):
                del tensors[key]

    with pytest.raises(OctavoError, match="says quant_method awq, but no weight is stored"):
        resolve(changed("awq-gemm", tmp_path / "m", edit))


def test_random_weights_for_a_quantised_config(tmp_path: Path) -> None:
    directory = changed("awq-gemm", tmp_path / "m")
    with pytest.raises(OctavoError, match="says quant_method awq, but random weights are drawn"):
        resolve(directory, random_weights=0)


def test_the_config_has_nothing_of_it() -> None:
    """transformers would build the modules of the format."""
    assert not hasattr(read_config(DATA / "gptq-4bit" / "config.json"), "quantization_config")
