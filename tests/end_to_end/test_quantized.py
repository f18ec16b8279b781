"""A model compiled with each scheme says what Hugging Face says with the dequantised weights.

Codes and scales are read from the artifact; the matrices that they stand for are computed here, by
the formula of docs/quantization.md, and put into the Hugging Face model, which runs eagerly.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.calibrate.calibrate import Calibration
from octavo.calibrate.plan import CalibrationRequest
from octavo.codegen.cpu_rules import quant_kernel
from octavo.codegen.quant_layouts import find_layout
from octavo.codegen.weights import WrittenWeights
from octavo.compile import compile_model
from octavo.ir.errors import OctavoError
from octavo.ir.graph import Graph
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor
from octavo.ir.types import QuantType
from octavo.ir.weight_cache import WeightCache, WeightSource
from octavo.llm import LLM
from octavo.runtime.artifact import Artifact
from octavo.runtime.errors import InvalidRequest
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.self_check import check_golden
from tests.dense_matrix import dense
from tests.end_to_end.test_quantized_kv import ROUNDS, Compiled, RoundedReference, generate
from tests.runtime.toy_artifact import byte_tokenizer

HIDDEN, INNER, LAYERS = 64, 128, 3
PARTS = {  # what is merged, with its rows
    "self_attn.qkv": {"self_attn.q_proj": 64, "self_attn.k_proj": 32, "self_attn.v_proj": 32},
    "self_attn.o_proj": {"self_attn.o_proj": 64},
    "mlp.gate_up": {"mlp.gate_proj": INNER, "mlp.up_proj": INNER},
    "mlp.down_proj": {"mlp.down_proj": 64},
}
PROMPT, NEW = [5, 17, 40, 3, 99, 61, 8], 5
# Products in bf16 cost as much as Hugging Face in bf16; sums of integers are exact.
IN_BF16 = {"int4-g64", "int4-g32", "int4-asym-g32", "int8-w8a8"}
NAMES = ["int8", "fp8", "fp8-tensor", "fp8-block", "mxfp4", "nf4", *sorted(IN_BF16)]


def random_llama() -> Any:
    """The model that is quantised, of this file and of tests/gpu/test_quantized_models.py."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=263,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    return model


def forget_norms(model: Any) -> Any:
    """With ones for the weights of norms, which are folded into linears for a GPU."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.ones_(parameter)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    random_llama().save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def quantized_state(
    artifact: Path, scheme: QuantScheme, state: dict[str, Tensor], layout_name: str | None = None
) -> None:
    """Replace the linears of a state dict by what the artifact's codes stand for; they lie as they
    do for a CPU, unless another layout is named."""
    stored = WrittenWeights(artifact / "weights")
    layout = find_layout(layout_name or quant_kernel(scheme)[1])
    for layer in range(LAYERS):
        for merged, parts in PARTS.items():
            rows = sum(parts.values())
            kind = QuantType(scheme, (rows, INNER if merged == "mlp.down_proj" else HIDDEN))
            name = f"layers.{layer}.{merged}.weight"
            if f"{name}.codes" not in stored:
                name += ".folded"  # with the weight of the norm before it
            found = {part: stored[f"{name}.{part}"] for part in layout.part_types(kind)}
            whole = dense(layout.unpack(found, kind))
            for part, values in zip(parts, whole.split(list(parts.values())), strict=True):
                key = f"model.layers.{layer}.{part}.weight"
                # Rounding to nearest: no weight moves by more than the distance between codes.
                assert (values - state[key]).abs().mean() < 0.2 * state[key].abs().mean()
                state[key] = values


@cache
def hf_model(folder: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@torch.inference_mode()
def hf_logprobs(model: Any, ids: list[int]) -> Tensor:
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits.double().log_softmax(-1)


def scheme_of(artifact: Path) -> QuantScheme:
    schemes = Artifact.open(artifact).manifest.quant_schemes
    assert list(schemes.values()) == [4 * LAYERS]
    return QuantScheme.parse(next(iter(schemes)))


@pytest.mark.parametrize("name", NAMES)
def test_a_quantised_model_says_what_its_codes_say(
    name: str, checkpoint: Path, tmp_path: Path
) -> None:
    artifact = tmp_path / "artifact"
    compile_model(checkpoint, artifact, dtype="float32", target="cpu", quant=name, progress=False)
    exact = copy.deepcopy(hf_model(checkpoint)).double()
    state = exact.state_dict()
    quantized_state(artifact, scheme_of(artifact), state)
    exact.load_state_dict(state)
    narrow = copy.deepcopy(exact).to(torch.bfloat16 if name in IN_BF16 else torch.float32)

    llm = LLM(artifact, quantization=name)
    params = SamplingParams(temperature=0, max_tokens=NEW, logprobs=5, ignore_eos=True)
    answer = llm.generate([{"prompt_token_ids": PROMPT}], params)[0].outputs[0]
    text = [*PROMPT, *answer.token_ids]
    want = hf_logprobs(exact, text)[len(PROMPT) - 1 : -1]
    noise = float((hf_logprobs(narrow, text)[len(PROMPT) - 1 : -1] - want).abs().max())
    for row, found in zip(want, answer.logprobs, strict=True):
        for token, logprob in found.items():
            assert abs(logprob.logprob - float(row[token])) <= 3 * noise
    check_golden(Artifact.open(artifact))


@pytest.mark.parametrize("name", ["int8", "fp8", "int8-w8a8", "int4-g32", "int4-asym-g32"])
def test_what_an_artifact_for_a_gpu_is_held_to(
    name: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its golden answers are Hugging Face's with the weights that its codes stand for. Weights of
    norms are ones, since they are folded into linears before these are quantised."""
    plain = forget_norms(copy.deepcopy(hf_model(checkpoint)))
    plain.save_pretrained(tmp_path / "checkpoint")
    monkeypatch.setattr("octavo.build._compile_kernels", lambda job, fields: None)
    artifact = tmp_path / "artifact"
    options = {"dtype": "bfloat16", "target": "cuda:sm_90", "quant": name}
    compile_model(tmp_path / "checkpoint", artifact, progress=False, **options)
    exact = plain.double()
    state = exact.state_dict()
    quantized_state(artifact, scheme_of(artifact), state, "triton")
    exact.load_state_dict(state)
    narrow = copy.deepcopy(exact).bfloat16()
    golden = json.loads((artifact / "tests" / "golden.json").read_text())
    assert golden["cases"]
    for case in golden["cases"]:
        want = hf_logprobs(exact, case["ids"])[-1]
        noise = float((hf_logprobs(narrow, case["ids"])[-1] - want).abs().max())
        for token, logprob in zip(case["top_ids"], case["top_logprobs"], strict=True):
            assert abs(logprob - float(want[token])) <= 3 * noise


@pytest.mark.parametrize("kv", ROUNDS)
def test_a_kv_cache_of_codes_beside_quantised_weights(
    kv: str, checkpoint: Path, tmp_path: Path
) -> None:
    artifact = tmp_path / "artifact"
    options = {"quant": "int8", "kv_cache_dtype": kv}
    compile_model(checkpoint, artifact, dtype="float32", target="cpu", progress=False, **options)
    model = copy.deepcopy(hf_model(checkpoint)).double()
    state = model.state_dict()
    quantized_state(artifact, scheme_of(artifact), state)
    model.load_state_dict(state)
    model.float().save_pretrained(tmp_path / "checkpoint")
    reference = RoundedReference(tmp_path / "checkpoint", ROUNDS[kv])
    compiled = Compiled(artifact, reference, reference)
    compiled.check(generate(compiled)[1], "codes of both")


def test_a_recipe_and_what_inspect_says_of_it(
    checkpoint: Path, tmp_path: Path, octavo_here: Any
) -> None:
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text(
        "first.*: none\n'*.q_proj': int8\n'*.mlp.*': int4<1x32, f16>\nlm_head: int8\n"
    )
    artifact = tmp_path / "artifact"
    compile_model(checkpoint, artifact, dtype="float32", target="cpu", quant=recipe, progress=False)
    manifest = Artifact.open(artifact).manifest
    assert manifest.quantization == "mixed"
    # q_proj and the MLP of all layers but the first, and the head.
    assert manifest.quant_schemes == {"int4<1x32, f16>": 4, "int8<1x*, f32>": 3}
    out = octavo_here("inspect", artifact).stdout
    assert "mixed: 4 x int4<1x32, f16>, 3 x int8<1x*, f32>" in out
    with pytest.raises(InvalidRequest, match="compiled with quantization mixed, not int8"):
        LLM(artifact, quantization="int8")


def test_a_recipe_that_matches_nothing_is_said(
    checkpoint: Path, tmp_path: Path, octavo_here: Any, caplog: pytest.LogCaptureFixture
) -> None:
    recipe, artifact = tmp_path / "other.yaml", tmp_path / "artifact"
    recipe.write_text("'*.ffn.*': int8\n")
    compile_model(
        checkpoint, artifact, target="cpu", quant=recipe, with_weights=False, progress=False
    )
    assert "'*.ffn.*': no linear answers to this pattern of other" in caplog.messages
    assert "nothing was quantised" in caplog.text
    assert "*.ffn.*: no linear answers" in octavo_here("inspect", artifact).stdout


def signs(
    graph: Graph,
    weights: WeightSource,
    sequences: Any,
    schemes: Mapping[str, QuantScheme],
    options: Any,
) -> Iterator[tuple[str, QuantTensor]]:
    """A calibration of sorts: every weight becomes its sign."""
    cache = WeightCache(graph, weights)
    for key, scheme in schemes.items():
        whole = cache.get(graph.value(f"@{key}"))
        assert isinstance(whole, Tensor)
        scales = torch.full((len(whole), 1), 0.25)
        yield key, QuantTensor(scheme, whole.sign().to(torch.int8), scales)


def test_a_calibration_gives_the_codes(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.calibrate.calibrate.quantize_streamed", signs)
    artifact, text = tmp_path / "artifact", tmp_path / "text.txt"
    text.write_text("Some text. " * 50)
    compile_model(
        tiny_checkpoint,
        artifact,
        dtype="float32",
        target="cpu",
        quant="int8",
        calibration=CalibrationRequest(text, Calibration("gptq")),
        loss_tokens=0,
        progress=False,
    )
    stored = WrittenWeights(artifact / "weights")
    state = hf_model(tiny_checkpoint).state_dict()
    down = state["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(stored["layers.1.mlp.down_proj.weight.codes"], down.sign().to(torch.int8))
    parts = [state[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    codes = stored["layers.1.self_attn.qkv.weight.codes"]
    assert torch.equal(codes, torch.cat(parts).sign().to(torch.int8))


@pytest.mark.parametrize("quantization", ["int8", "recipe.yaml"])
def test_a_model_is_quantised_on_the_way(
    quantization: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text("'*.mlp.*': int8\n")
    llm = LLM(checkpoint, quantization=quantization, dtype="float32")
    [first] = llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(max_tokens=2))
    assert len(first.outputs[0].token_ids) == 2
    assert llm.artifact.manifest.quantization == quantization.removesuffix(".yaml")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"quant": "int5"}, "'int5' is no way to quantise: choose int4, .* nf4, .* balanced"),
        ({"quant": "int4-g16"}, "'int4-g16' is no way to quantise"),
        ({"quant": "absent.yaml"}, "absent.yaml cannot be read: .*No such file"),
        (
            {"quant": "int4"},
            r"model\.layers\.0\.self_attn\.q_proj: K=64 is not a multiple of the group of 128"
            r" that int4<1x128, bf16> has; choose a group of 64 or 32",
        ),
        (
            {"quant": "fp8", "target": "cuda:sm_80"},
            "--quant fp8: cuda:sm_80 has no 8-bit floats, .*choose int8, int4, or a target from",
        ),
        (
            {"quant": "fp8", "target": "cuda:sm_90,sm_80"},
            "--quant fp8: cuda:sm_80 has no 8-bit floats",
        ),
        (
            {"quant": "int8", "quant_head": "fp8", "target": "cuda:sm_80"},
            "--quant-head fp8: cuda:sm_80 has no 8-bit floats",
        ),
        ({"quant": "int4<1x0, bf16>"}, "at least one row and one column"),
        ({"quant_head": "balanced"}, "'balanced' is no way to quantise: choose .*, or none"),
    ],
)
def test_what_cannot_be_done_is_refused(
    options: dict[str, Any], reason: str, checkpoint: Path, tmp_path: Path
) -> None:
    options = {"target": "cpu", **options}
    with pytest.raises(OctavoError, match=reason):
        compile_model(checkpoint, tmp_path / "artifact", progress=False, **options)
    assert not (tmp_path / "artifact").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- int8\n", "expected patterns over module paths with schemes"),
        ("'*.mlp.*': int5\n", r"bad\.yaml: \*\.mlp\.\*: 'int5' is no way to quantise"),
        ("'*.mlp.*': 4\n", "expected a pattern and a scheme, got '.*': 4"),
        ("a: [b\n", "cannot be read: while parsing"),
        ("a: int8\n'a': int4\n", "'a' stands there twice"),
        ("a: balanced\n", "'balanced' is no way to quantise: choose .* int4<1x64, bf16>, or none"),
    ],
)
def test_a_recipe_that_is_none(text: str, reason: str, checkpoint: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "bad.yaml"
    recipe.write_text(text)
    with pytest.raises(OctavoError, match=reason):
        compile_model(checkpoint, tmp_path / "artifact", target="cpu", quant=recipe, progress=False)
