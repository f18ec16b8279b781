"""Which kernels a program needs: it is run on the meta device, over all sizes that matter."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from octavo.ir.manifest import Manifest, num_groups
from octavo.runtime.artifact import Artifact
from octavo.runtime.device_weights import shard_header
from octavo.runtime.kernel import Launch, recording
from octavo.runtime.kv_cache import KVCachePlan, KVCaches, allocate_kv_caches, block_bytes
from octavo.runtime.plans import bind_plan
from octavo.runtime.program_loader import import_program

MAX_DECODE = 512
MAX_TOKENS = 16384
_NUM_BLOCKS = 1024
# Widths of the block table, in tokens: a kernel may split long contexts more.
_CONTEXTS = (64, 1024, 8192, 131072)
_MIXED_SEQS = (1, 2, 8, 64, 256)


def record_program(
    directory: Path, manifest: Manifest, *, arch: int | None = None, block_size: int = 16
) -> list[Launch]:
    """The distinct launches of an artifact's program and its sampler; weights are not read.

    Modules run as they do by default on an architecture, or, with None, so that any can run them.
    ``manifest`` need only list the code. Raises ArtifactError for a program that cannot be
    imported, and what its kernels raise for arguments that do not fit.
    """
    program = import_program(directory, manifest)
    bind_plan(None, kernel_modules(program), arch)
    return record_module(program, directory, manifest, block_size=block_size)


def record_module(
    module: ModuleType, directory: Path, manifest: Manifest, *, block_size: int = 16
) -> list[Launch]:
    """As ``record_program``, of an imported program whose modules run as they are chosen to now."""
    found: dict[Any, Launch] = {}
    program = module.Program(
        meta_weights(directory),
        _meta_caches(directory, manifest, block_size),
        max_num_tokens=MAX_TOKENS,
        max_num_seqs=MAX_DECODE,
    )
    with recording() as launches:
        for num_tokens, num_seqs, num_blocks in step_sizes(block_size):
            inputs = _inputs(num_tokens, num_seqs, num_blocks, num_groups(manifest.kv_slots))
            program(*inputs)
            found.update((launch.identity, launch) for launch in launches)
            launches.clear()
        for num_rows in decode_sizes():
            _record_sampler(module.Program, num_rows)
        found.update((launch.identity, launch) for launch in launches)
    return list(found.values())


def kernel_modules(program: ModuleType) -> Iterator[ModuleType]:
    """The modules below ``kernels/src`` that a program has imported, by name."""
    prefix = f"{program.__name__.rpartition('.')[0]}.kernels.src."
    for name in sorted(sys.modules):
        if name.startswith(prefix):
            yield sys.modules[name]


def decode_sizes() -> list[int]:
    """Numbers of sequences that a decode step may be padded to, and what lies between buckets."""
    return [1, 2, 3, 4, *range(8, 257, 8), 384, MAX_DECODE]


def step_sizes(block_size: int) -> Iterator[tuple[int, int, int]]:
    """Tokens, sequences and blocks of a block-table row of the steps that are recorded."""
    widths = [-(-context // block_size) for context in _CONTEXTS]
    for num_seqs in decode_sizes():
        yield from ((num_seqs, num_seqs, width) for width in widths)
    powers = [2**exponent for exponent in range(MAX_TOKENS.bit_length())]
    for num_tokens in (*powers, *(power + 1 for power in powers[:-1])):
        for num_seqs in _MIXED_SEQS:
            if num_seqs < num_tokens:
                yield from ((num_tokens, num_seqs, width) for width in widths[::2])


def meta_weights(directory: Path) -> dict[str, Tensor]:
    """The weights of an artifact by name, on the meta device: shapes and dtypes only."""
    folder = directory / "weights"
    index = json.loads((folder / "index.json").read_text("utf-8"))
    weights = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, (dtype, shape) in index.get("shapes", {}).items()
    }
    for shard in sorted(set(index["weight_map"].values())):
        for name, stored in shard_header(folder / shard).items():
            weights[name] = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
    return weights


def _meta_caches(directory: Path, manifest: Manifest, block_size: int) -> KVCaches:
    slots, kv_format = manifest.kv_slots, Artifact(directory, manifest).kv_format
    plan = KVCachePlan(_NUM_BLOCKS, block_size, block_bytes(slots, kv_format, block_size))
    return allocate_kv_caches(slots, plan, kv_format, torch.device("meta"))


def _inputs(num_tokens: int, num_seqs: int, num_blocks: int, num_groups: int) -> tuple[Tensor, ...]:
    """A step's inputs, see docs/architecture.md; logits of one row for each sequence."""
    groups = () if num_groups == 1 else (num_groups,)

    def ids(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    return (
        ids(num_tokens),
        ids(num_tokens),
        ids(*groups, num_tokens),
        ints(*groups, num_seqs, num_blocks),
        ints(num_seqs + 1),
        ints(num_seqs),
        ids(num_seqs),
    )


def _record_sampler(program: Any, num_rows: int) -> None:
    """The sampler is called by the executor; ``record`` launches it as that does."""
    record = getattr(getattr(program, "sampler", None), "record", None)
    if record is not None:
        record(num_rows, torch.device("meta"))
