"""Steps on a paged cache, drawn at random, for the attention kernels and their reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ir.ops.paged import KVState


@dataclass
class PagedCase:
    """A step of sequences with ``(context, new tokens)`` each, the context counting the new ones.

    What no sequence has written is NaN in both caches, and all blocks lie in a random order.
    """

    lengths: Sequence[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int = 16
    rotary_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        counts = [-(-context // self.block_size) for context, _ in self.lengths]
        order = (torch.randperm(sum(counts)) + 1).to(torch.int32)
        self.num_blocks = sum(counts) + 1
        self.block_table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
        for row, count, start in zip(
            self.block_table, counts, [sum(counts[:i]) for i in range(len(counts))], strict=True
        ):
            row[:count] = order[start : start + count]
        self.query_start = torch.tensor(
            [sum(new for _, new in self.lengths[:i]) for i in range(len(counts) + 1)],
            dtype=torch.int32,
        )
        self.seq_lens = torch.tensor([context for context, _ in self.lengths], dtype=torch.int32)
        self._draw()

    def _draw(self) -> None:
        num_tokens = int(self.query_start[-1])
        width = self.heads * self.head_dim + self.kv_heads * (self.head_dim + self.v_head_dim)
        self.qkv = torch.randn(num_tokens, width, dtype=self.dtype)
        angles = torch.randn(num_tokens, self.rotary_dim)
        self.cos, self.sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        self.slot_mapping = torch.cat(
            [self._slots(i)[-new:] for i, (_, new) in enumerate(self.lengths)]
        )
        shape = (self.num_blocks, self.block_size, self.kv_heads)
        self.keys = torch.full((*shape, self.head_dim), torch.nan, dtype=self.dtype)
        self.values = torch.full((*shape, self.v_head_dim), torch.nan, dtype=self.dtype)
        for i, (context, new) in enumerate(self.lengths):
            old = self._slots(i)[: context - new]
            for cache in (self.keys, self.values):
                flat = cache.flatten(0, 1)
                flat[old] = torch.randn(flat[old].shape, dtype=self.dtype, device=flat.device)

    def _slots(self, index: int) -> Tensor:
        ticks = torch.arange(self.lengths[index][0])
        blocks = self.block_table[index][ticks // self.block_size].long()
        return blocks * self.block_size + ticks % self.block_size

    def new(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v: views of one buffer."""
        sizes = (self.heads * self.head_dim, self.kv_heads * self.head_dim)
        q, k, v = self.qkv.split([*sizes, self.kv_heads * self.v_head_dim], dim=-1)
        return (
            q.unflatten(-1, (self.heads, self.head_dim)),
            k.unflatten(-1, (self.kv_heads, self.head_dim)),
            v.unflatten(-1, (self.kv_heads, self.v_head_dim)),
        )

    def layout(self) -> tuple[Tensor, Tensor, Tensor]:
        """Block table, query start and sequence lengths."""
        return self.block_table, self.query_start, self.seq_lens

    def exact_state(self) -> KVState:
        """The caches in float64, copied."""
        return KVState((self.keys.double(),), (self.values.double(),))

    def constants(self) -> dict[str, object]:
        """What a template is told of this case; further keys may be set over it."""
        name = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[self.dtype]
        return {
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "v_head_dim": self.v_head_dim,
            "kv_dtype": name,
            "dtype": name,
            "rotary_dim": self.rotary_dim,
            "table_dtype": name,
            "interleaved": False,
            "scale": self.head_dim**-0.5,
            "window": None,
            "chunk": None,
            "softcap": None,
            "has_sinks": False,
            "has_alibi": False,
            "norm_eps": None,
            "norm_offset": 0.0,
            "has_norm_weight": False,
        }
