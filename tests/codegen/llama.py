"""A llama-like step built by hand, as it is after all passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.ir.graph import Graph, Origin, Value
from octavo.ir.types import KVType, SlotShape, SymDim, TensorType

T, S, B, R = (SymDim(symbol) for symbol in "TSBR")


@dataclass(frozen=True)
class Shape:
    """Sizes of a small model; ``windows`` and ``softcaps`` are taken in turn by the layers."""

    layers: int = 3
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    v_head_dim: int = 8
    inter: int = 48
    vocab: int = 64
    dtype: str = "f32"
    rotary_dim: int | None = None
    interleaved: bool = False
    windows: tuple[int | None, ...] = (None,)
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    weight_offset: float = 0.0
    max_position: int = 16


class LlamaBuilder:
    """Builds the graph, value by value."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.graph = Graph("llama")
        slots = (SlotShape(shape.kv_heads, shape.head_dim, shape.v_head_dim),) * shape.layers
        self.inputs = {
            name: self.graph.add_input(name, TensorType(dtype, dims))
            for name, dtype, dims in (
                ("ids", "i64", (T,)),
                ("positions", "i64", (T,)),
                ("slot_mapping", "i64", (T,)),
                ("block_table", "i32", (S, B)),
                ("query_start", "i32", (SymDim("S", 1, 1),)),
                ("seq_lens", "i32", (S,)),
                ("logit_rows", "i64", (R,)),
            )
        }
        self.kv = self.graph.add_input("kv", KVType(shape.dtype, slots))

    def build(self) -> Graph:
        """The whole step."""
        shape, graph = self.shape, self.graph
        cos, sin = self._tables()
        table = self._weight("embed_tokens", shape.vocab, shape.hidden)
        x = self._node("embedding", "embed_tokens", self.inputs["ids"], table)
        norm = self._weight("layers.0.input_layernorm", shape.hidden)
        normed = self._node("rms_norm", "layers.0.input_layernorm", x, norm, **self._norm())
        for layer in range(shape.layers):
            normed, x = self._layer(layer, normed, x, cos, sin)
        rows = self._node("gather_rows", "norm.rows", normed, self.inputs["logit_rows"])
        logits = self._node("linear", "lm_head", rows, table)
        if shape.dtype != "f32":
            logits = self._node("cast", "logits", logits, dtype="f32")
        graph.outputs = [logits, self.kv]
        return graph

    def _tables(self) -> tuple[Value, Value]:
        width = self.shape.rotary_dim or self.shape.head_dim
        tables = [
            self._weight(f"rotary.{f}", self.shape.max_position, width) for f in ("cos", "sin")
        ]
        positions = self.inputs["positions"]
        cos, sin = (
            self._node("embedding", f"rotary_emb.{name}", positions, table)
            for name, table in zip(("cos", "sin"), tables, strict=True)
        )
        return cos, sin

    def _norm(self) -> dict[str, Any]:
        return {"eps": 1e-5, "weight_offset": self.shape.weight_offset, "round_first": False}

    def _weight(self, name: str, *dims: int) -> Value:
        tensor = TensorType(self.shape.dtype, dims)
        return self.graph.constant(
            "checkpoint", key=f"model.{name}.weight", type=tensor, name=f"{name}.weight"
        )

    def _node(self, op: str, name: str, *operands: Value | None, **attrs: Any) -> Value:
        origin = Origin(module="model." + name)
        return self.graph.append(op, *operands, name=name, origin=origin, **attrs).outputs[0]

    def _linear(self, name: str, x: Value, width: int) -> Value:
        return self._node("linear", name, x, self._weight(name, width, x.shape[-1]))

    def _layer(
        self, layer: int, normed: Value, residual: Value, cos: Value, sin: Value
    ) -> tuple[Value, Value]:
        prefix = f"layers.{layer}"
        attended = self._attention(layer, f"{prefix}.self_attn", normed, cos, sin)
        output = self._linear(f"{prefix}.self_attn.o_proj", attended, self.shape.hidden)
        name = f"{prefix}.post_attention_layernorm"
        normed, residual = self._add_norm(name, output, residual)
        gate_up = self._linear(f"{prefix}.mlp.gate_up", normed, 2 * self.shape.inter)
        sizes = (self.shape.inter,) * 2
        names = [f"{prefix}.mlp.gate", f"{prefix}.mlp.up"]
        halves = self.graph.append("split", gate_up, sizes=sizes, dim=-1, name=names)
        name = f"{prefix}.mlp.act"
        gated = self._node("gated_activation", name, *halves.outputs, activation="silu")
        down = self._linear(f"{prefix}.mlp.down_proj", gated, self.shape.hidden)
        last = layer + 1 == self.shape.layers
        name = "norm" if last else f"layers.{layer + 1}.input_layernorm"
        return self._add_norm(name, down, residual)

    def _add_norm(self, name: str, x: Value, residual: Value) -> tuple[Value, Value]:
        weight = self._weight(name, self.shape.hidden)
        node = self.graph.append(
            "add_rms_norm", x, residual, weight, name=[name, f"{name}.residual"], **self._norm()
        )
        return node.outputs[0], node.outputs[1]

    def _attention(self, layer: int, name: str, x: Value, cos: Value, sin: Value) -> Value:
        s, inputs = self.shape, self.inputs
        sizes = (s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.v_head_dim)
        qkv = self._linear(f"{name}.qkv", x, sum(sizes))
        names = [f"{name}.{part}" for part in ("q_proj", "k_proj", "v_proj")]
        parts = self.graph.append("split", qkv, sizes=sizes, dim=-1, name=names)
        dims = ((s.heads, s.head_dim), (s.kv_heads, s.head_dim), (s.kv_heads, s.v_head_dim))
        q, k, v = (
            self._node("reshape", part.name, part, shape=(T, *dim))
            for part, dim in zip(parts.outputs, dims, strict=True)
        )
        rotated = self.graph.append(
            "rotary_kv_write",
            *(self.kv, q, k, v, cos, sin, inputs["slot_mapping"]),
            slot=layer,
            interleaved=s.interleaved,
            name=[f"{name}.q_rot", f"{name}.kv"],
        )
        q, self.kv = rotated.outputs
        sinks = self._weight(f"{name}.sinks", s.heads) if s.has_sinks else None
        out = self._node(
            "paged_attention",
            f"{name}.attn",
            *(q, self.kv, inputs["block_table"], inputs["query_start"], inputs["seq_lens"], sinks),
            slot=layer,
            scale=s.head_dim**-0.5,
            window=s.windows[layer % len(s.windows)],
            chunk=s.chunk,
            softcap=s.softcap,
        )
        return self._node("reshape", f"{name}.attn_flat", out, shape=(T, s.heads * s.v_head_dim))


def llama(**sizes: Any) -> Graph:
    """A llama-like step; keywords are those of ``Shape``."""
    return LlamaBuilder(Shape(**sizes)).build()
