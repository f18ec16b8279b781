"""An artifact for the cuda target of one kernel, small enough to write by hand."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from octavo.ir.manifest import KVSlot
from octavo.runtime.artifact import Artifact
from octavo.runtime.cross_compile import specialisations
from octavo.runtime.kernel_binary import Binary, BinaryInfo, Specialisation
from octavo.runtime.record_program import record_program
from tests.runtime.toy_artifact import write_manifest

PROGRAM = '''
"""A program of one kernel, which has another block size for many tokens."""
import torch

from .kernels.src import double


class Program:
    def __init__(self, weights, kv_caches, *, max_num_tokens, max_num_seqs):
        self.table = weights["table"]
        assert self.table.shape == (8, 64) and self.table.dtype == torch.bfloat16

    def __call__(
        self, ids, positions, slot_mapping, block_table, query_start, seq_lens, logit_rows
    ):
        return double.run(ids, out=torch.empty_like(ids))
'''

KERNEL = """
import triton
import triton.language as tl

from octavo.runtime.kernel import Choices, Kernel, pdl_trigger, pdl_wait


@triton.jit
def double(x_ptr, y_ptr, num, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        pdl_trigger()
        pdl_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, mask=at < num), mask=at < num)


DOUBLE = Kernel(double, "x_ptr: *i64, y_ptr: *i64, num: i32")

CHOICES = Choices(
    (16, [dict(BLOCK=32), dict(BLOCK=64)]),
    (None, [dict(BLOCK=256)]),
)


def run(x, *, out):
    block = CHOICES.for_rows(x.shape[0])["BLOCK"]
    DOUBLE.launch((-(-x.shape[0] // block),), x, out, x.shape[0], BLOCK=block)
    return out
"""


def write_kernel_artifact(root: Path) -> None:
    """Write the artifact, without binaries."""
    for name, text in (("program.py", PROGRAM), ("kernels/src/double.py", KERNEL)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "weights").mkdir()
    save_file({"table": torch.zeros(8, 64).bfloat16()}, root / "weights" / "a.safetensors")
    (root / "weights/index.json").write_text('{"weight_map": {"table": "a.safetensors"}}')
    finish(root)


def finish(root: Path) -> None:
    """Write the manifest for the files as they are now."""
    write_manifest(root, target="cuda:sm_90", kv_slots=(KVSlot(1, 64, 64),))


def ship(root: Path, arch: int = 90) -> list[str]:
    """Give the artifact the binaries that its program needs; their names."""
    manifest = Artifact.open(root).manifest
    wanted = specialisations(record_program(root, manifest), arch)
    for each in wanted:
        binary_of(each, b"shipped").write(root / f"kernels/bin/sm_{arch}", each.stem)
    finish(root)
    return [each.stem for each in wanted]


def binary_of(each: Specialisation, cubin: bytes) -> Binary:
    """A binary with a made-up content."""
    info = BinaryInfo(
        each.module, each.kernel, each.constants, each.options, each.signature, "sm_90a",
        each.kernel, 4, 0, 5, 2, 0, 32, 0, "3.6.0", "12.8",
    )  # fmt: skip
    return Binary(info, cubin)
