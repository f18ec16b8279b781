"""``octavo inspect`` over a small artifact written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from octavo.cli.main import app
from octavo.ir.errors import OctavoError
from octavo.ir.manifest import FileEntry, KVSlot, Manifest

IMPORTED = """\
graph @tiny(%ids: i64[T]) {
  %embed: f32[T, 8] = embedding(%ids, @embed.weight)
  %odd: f32[T, 8] = aten.erfinv.default(%embed)
  %more: f32[T, 8] = aten.erfinv.default(%odd)
  return %more
}
"""
FUSED = IMPORTED.replace("  %more: f32[T, 8] = aten.erfinv.default(%odd)\n", "").replace(
    "return %more", "return %odd"
)
KERNEL = """\
# op: rms_norm
# template: cpu/rms_norm.py.j2
# constants: hidden=[8] dtype=f32
# a comment that is none of these

def rms_norm_8(x): ...
"""
MISSED = [
    {"where": "%layers.5.k", "reason": "bias on k_proj"},
    {"where": "%layers.6.k", "reason": "bias on k_proj"},
]


def stage(number: int, name: str, file: str, **counts: object) -> dict[str, object]:
    defaults = {"rewrites": 0, "missed": [], "nodes": 2}
    return {"number": number, "name": name, "file": file, **defaults, **counts}


STAGES = [
    stage(0, "import", "00-import.ir", nodes=3),
    stage(1, "fuse", "01-fuse.ir", rewrites=1, missed=MISSED),
    stage(2, "clean", "01-fuse.ir"),
    stage(3, "clean", "01-fuse.ir"),
]


def write_index(directory: Path, stages: list[dict[str, object]]) -> None:
    (directory / "ir" / "index.json").write_text(json.dumps({"stages": stages}))


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    manifest = Manifest(
        architecture="TinyForCausalLM",
        model_type="tiny",
        target="cpu",
        dtype="f32",
        vocab_size=100,
        max_position=64,
        kv_slots=(KVSlot(3, 64, 64), KVSlot(3, 64, 64), KVSlot(1, 64, 32, window=16)),
        files={
            "program.py": FileEntry(1200, "0" * 64, "program"),
            "weights/a.safetensors": FileEntry(4_000_000, "1" * 64, "weights"),
            "weights/b.safetensors": FileEntry(1_000_000, "2" * 64, "weights"),
        },
        source="tiny-model",
    )
    (tmp_path / "manifest.json").write_text(manifest.to_json())
    (tmp_path / "ir").mkdir()
    (tmp_path / "ir" / "00-import.ir").write_text(IMPORTED)
    (tmp_path / "ir" / "01-fuse.ir").write_text(FUSED)
    write_index(tmp_path, STAGES)
    (tmp_path / "kernels" / "src").mkdir(parents=True)
    (tmp_path / "kernels" / "src" / "__init__.py").write_text("")
    (tmp_path / "kernels" / "src" / "rms_norm_8.py").write_text(KERNEL)
    return tmp_path


def inspect(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def lines(result: Result) -> list[list[str]]:
    assert result.exit_code == 0, result.exception
    return [line.split() for line in result.stdout.splitlines()]


def test_summary_names_the_model(artifact: Path) -> None:
    text = inspect(artifact).stdout
    assert "TinyForCausalLM (tiny)" in text
    assert "sha256:" in text
    assert "2 x 3 heads of 64, 1 x 1 heads of 64 (values 32), window 16" in text


def test_summary_adds_sizes_by_role_largest_first(artifact: Path) -> None:
    found = lines(inspect(artifact))
    weights, program = ["weights", "2", "5,000,000"], ["program", "1", "1,200"]
    assert found.index(weights) + 1 == found.index(program)


def test_summary_counts_passes_and_groups_misses_by_reason(artifact: Path) -> None:
    result = inspect(artifact)
    assert ["1", "fuse", "2", "1", "2"] in lines(result)
    assert "missed by fuse: %layers.5.k and 1 more: bias on k_proj\n" in result.stdout


def test_summary_lists_kernels_from_their_headers(artifact: Path) -> None:
    row = ["rms_norm_8", "rms_norm", "cpu/rms_norm.py.j2", "hidden=[8]", "dtype=f32"]
    assert row in lines(inspect(artifact))


def test_nothing_is_padded_in_a_pipe(artifact: Path) -> None:
    result = inspect(artifact)
    assert len(result.stdout) > 500
    assert [line for line in result.stdout.splitlines() if line != line.rstrip()] == []


def test_constants_are_the_shortest_numbers_that_are_the_same_in_float32(artifact: Path) -> None:
    (artifact / "kernels" / "src" / "rms_norm_8.py").write_text(
        "# op: f16.e5\n# template: t\n"
        "# constants: eps=9.999999747378752e-06 scale=0.22360679774997896 half=0.5 n=20 b=1e-06 "
        "big=1e+300 v=0.1.2 limit=-3.4028234663852886e+38\n"
    )
    row = "f16.e5 t eps=1e-05 scale=0.2236068 half=0.5 n=20 b=1e-06 big=1e+300 v=0.1.2"
    assert ["rms_norm_8", *row.split(), "limit=-3.4028235e+38"] in lines(inspect(artifact))


def test_a_narrow_terminal_breaks_no_word(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = "heads=9 kv_heads=3 head_dim=64 v_head_dim=64 dtype=f32 kv_dtype=f32 scale=0.125"
    name = "paged_attention_with_a_name_that_is_rather_long_for_it"
    (artifact / "kernels" / "src" / f"{name}.py").write_text(
        f"# op: paged_attention\n# template: cpu/paged_attention.py.j2\n# constants: {constants}\n"
    )
    monkeypatch.setattr("octavo.cli.inspect.PIPE_WIDTH", 80)
    text = inspect(artifact).stdout
    kernels = text[text.index("\nKernels\n") :]
    words = set(kernels.split())
    assert {name, "cpu/paged_attention.py.j2", *constants.split()} <= words
    assert all(len(line) <= 80 for line in kernels.splitlines())


def test_summary_counts_fallbacks_of_the_last_stage(artifact: Path) -> None:
    assert ["aten.erfinv.default", "1"] in lines(inspect(artifact))


def test_fallbacks_count_in_each_repeat_and_not_among_the_weights(artifact: Path) -> None:
    (artifact / "ir" / "01-fuse.ir").write_text(
        "graph @tiny(%x: f32[T, 8]) {\n"
        "  weights {\n"
        "    @table: f32[8] = aten.cos.default(@angles)\n"
        "  }\n"
        "  repeat i = 0..4 {\n"
        "    %layers.{i}: f32[T, 8], %rest.{i}: f32[T] = aten.erfinv.default(%layers.{i-1})\n"
        "  }\n"
        "}\n"
    )
    result = inspect(artifact)
    assert ["aten.erfinv.default", "5"] in lines(result)
    assert "aten.cos.default" not in result.stdout


def test_a_damaged_stage_is_named_with_its_line(artifact: Path) -> None:
    (artifact / "ir" / "01-fuse.ir").write_text("graph @tiny() {\n  repeat i = 0..4 {\n")
    assert_error(inspect(artifact), "01-fuse.ir:2: this repeat is never closed")


@pytest.mark.parametrize("wanted", ["0", "import"])
def test_stage_prints_the_file_as_it_is(artifact: Path, wanted: str) -> None:
    assert inspect(artifact, "--stage", wanted).stdout == IMPORTED


def test_diff_has_context_and_no_colour_in_a_pipe(artifact: Path) -> None:
    assert inspect(artifact, "--diff", "import", "1").stdout == (
        "--- 00-import.ir\n+++ 01-fuse.ir\n@@ -1,6 +1,5 @@\n"
        " graph @tiny(%ids: i64[T]) {\n"
        "   %embed: f32[T, 8] = embedding(%ids, @embed.weight)\n"
        "   %odd: f32[T, 8] = aten.erfinv.default(%embed)\n"
        "-  %more: f32[T, 8] = aten.erfinv.default(%odd)\n"
        "-  return %more\n"
        "+  return %odd\n"
        " }\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage", "nope"], "no stage 'nope'; there are: 0 import, 1 fuse"),
        (["--stage", "clean"], "ran several times; give its number, one of 2, 3"),
        (["--stage", "0", "--diff", "0", "1"], "exclude each other"),
    ],
)
def test_a_wrong_stage_says_which_there_are(
    artifact: Path, arguments: list[str], message: str
) -> None:
    assert_error(inspect(artifact, *arguments), message)


@pytest.mark.parametrize("manifest", ["", "[]", '{"format": 99}', "\x00"])
def test_a_damaged_manifest_is_named(artifact: Path, manifest: str) -> None:
    (artifact / "manifest.json").write_text(manifest)
    assert_error(inspect(artifact), "manifest.json: ")


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"stages": [{}]}', '{"stages": 3}'])
def test_a_damaged_index_is_named(artifact: Path, index: str) -> None:
    (artifact / "ir" / "index.json").write_text(index)
    assert_error(inspect(artifact), "index.json: damaged")


def test_a_missing_index_is_named(artifact: Path) -> None:
    (artifact / "ir" / "index.json").unlink()
    assert_error(inspect(artifact), "index.json: missing")


def test_a_stage_file_outside_the_artifact_is_not_read(artifact: Path) -> None:
    write_index(artifact, [STAGES[0] | {"file": "../../secret"}])
    assert_error(inspect(artifact, "--stage", "0"), "'../../secret' is not a file name")


def assert_error(result: Result, message: str) -> None:
    assert isinstance(result.exception, OctavoError)
    assert message in str(result.exception)
