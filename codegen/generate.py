"""From the graph after all passes to program, kernels and weights in a directory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.codegen.kernels import is_fallback
from octavo.codegen.lower import Line, lower
from octavo.codegen.memory import MemoryPlan, plan_memory, unit_size
from octavo.codegen.program import ProgramWriter
from octavo.codegen.render import KernelSet, RenderedKernel
from octavo.codegen.schedule import Schedule, make_schedule
from octavo.codegen.target import CPU, Target
from octavo.codegen.weights import Progress, write_weights
from octavo.ir.errors import OctavoError
from octavo.ir.graph import Graph, Node, Value
from octavo.ir.manifest import KVSlot
from octavo.ir.types import KVType
from octavo.ir.weight_cache import WeightSource

STEP_INPUTS = (
    "ids",
    "positions",
    "slot_mapping",
    "block_table",
    "query_start",
    "seq_lens",
    "logit_rows",
)


@dataclass(frozen=True)
class Generated:
    """What was written: kernels, ops left to PyTorch with their counts, memory, KV slots."""

    kernels: tuple[RenderedKernel, ...]
    fallback_ops: dict[str, int]
    memory: MemoryPlan
    kv_slots: tuple[KVSlot, ...]
    weight_bytes: int
    layouts: dict[Value, str]  # of quantised weights


def generate(
    graph: Graph,
    target: Target,
    directory: Path,
    weights: WeightSource,
    *,
    without_checkpoint: bool = False,
    progress: Progress | None = None,
) -> Generated:
    """Write ``program.py``, ``kernels/src``, ``plans/memory.json`` and ``weights`` to a directory.

    Raises OctavoError for a graph that has no paged cache, an op without a kernel, and a weight
    that is not finite. ``without_checkpoint`` leaves the checkpoint's weights out, see
    ``write_weights``; ``progress`` is told how many weights are written.
    """
    check_inputs(graph)
    kernels = KernelSet(target)
    program = lower(graph, target.rules)
    schedule = make_schedule(program.lines, graph.outputs, program.num_early)
    memory = plan_memory(schedule)
    text = ProgramWriter(graph, schedule, memory, kernels).text()
    _write(directory / "program.py", text)
    for kernel in kernels.rendered.values():
        _write(directory / kernel.path, kernel.text)
    _write(directory / "plans" / "memory.json", memory_json(memory))
    layouts = weight_layouts(program.lines)
    weight_bytes = write_weights(
        graph,
        weights,
        directory / "weights",
        layouts=layouts,
        progress=progress,
        without_checkpoint=without_checkpoint,
    )
    fallback = Counter(node.op for node in graph.nodes if is_fallback(node))
    rendered = tuple(kernels.rendered.values())
    return Generated(
        rendered, dict(sorted(fallback.items())), memory, kv_slots(graph), weight_bytes, layouts
    )


def weight_layouts(lines: Iterable[Line]) -> dict[Value, str]:
    """How each quantised weight is packed: as the kernels that read it say."""
    found: dict[Value, str] = {}
    for line in lines:
        for index, layout in line.rule.kernel.layouts if line.rule.kernel else ():
            value = line.operand(index)
            assert found.setdefault(value, layout) == layout, f"{value} is read in two layouts"
    return found


def check_inputs(graph: Graph) -> None:
    """Raise OctavoError unless the graph's parameters are those of a step."""
    for value in graph.inputs:
        if value.name not in STEP_INPUTS and not isinstance(value.type, KVType):
            raise OctavoError(f"{value} is no input of a step; a step has {', '.join(STEP_INPUTS)}")


def kv_slots(graph: Graph) -> tuple[KVSlot, ...]:
    """The caches that the program needs, one pair a slot; ``window`` and ``chunk`` are those of its
    widest reader."""
    state = next((v.type for v in graph.inputs if isinstance(v.type, KVType)), None)
    if state is None:
        return ()
    readers: dict[int, list[Node]] = {}
    for node in graph.find("paged_attention", "rotary_paged_attention"):
        readers.setdefault(node.attrs["slot"], []).append(node)
    slots = []
    for index, shape in enumerate(state.slots):
        nodes = readers.get(index, [])
        window, chunk = (_widest([n.attrs[name] for n in nodes]) for name in ("window", "chunk"))
        group = _group(graph, nodes[0]) if nodes else 0
        slots.append(
            KVSlot(shape.num_kv_heads, shape.head_dim, shape.v_head_dim, window, chunk, group)
        )
    return tuple(slots)


def _group(graph: Graph, attention: Node) -> int:
    """The block group whose table an attention reads."""
    tables = (graph.producer(value, "select") for value in attention.operands)
    found = [node for node in tables if node and node.operand(0).name == "block_table"]
    return int(found[0].attrs["index"]) if found else 0


def _widest(windows: list[int | None]) -> int | None:
    known = [window for window in windows if window is not None]
    return max(known) if known and len(known) == len(windows) else None


def memory_json(plan: MemoryPlan) -> str:
    """The memory plan for a reader: buffers, who shares them, and what sharing saved."""
    symbols = sorted({buffer.symbol for buffer in plan.buffers})
    body: dict[str, Any] = {
        "bytes_per": {s: plan.bytes_per(s) for s in symbols},
        "bytes_per_without_sharing": {s: plan.unshared_bytes_per(s) for s in symbols},
        "buffers": [
            {
                "symbol": buffer.symbol,
                "bytes": buffer.unit_bytes,
                "values": {v.name: (unit_size(v.tensor) or ("", 0))[1] for v in buffer.values},
            }
            for buffer in plan.buffers
        ],
        "unplanned": [value.name for value in plan.unplanned],
    }
    return json.dumps(body, indent=2) + "\n"


def schedule_of(graph: Graph, target: Target = CPU) -> Schedule:
    """The schedule that ``generate`` would use: for tests and for looking at a model."""
    program = lower(graph, target.rules)
    return make_schedule(program.lines, graph.outputs, program.num_early)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="\n")
