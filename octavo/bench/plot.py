"""Decode throughput over batch size, as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.bench.results import Decode, Results
from octavo.ir.errors import OctavoError


def require_matplotlib() -> None:
    """Raises OctavoError where there is none: call it before minutes of measuring."""
    if importlib.util.find_spec("matplotlib") is None:
        raise OctavoError("plots need matplotlib; install it with `pip install 'octavo[bench]'`")


def draw(results: Results, path: Path) -> None:
    """Write a PNG: tokens a second against the roofline and other engines, and efficiency."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    by_engine: dict[str, list[Decode]] = {}
    for each in sorted(results.decode, key=lambda each: each.batch_size):
        by_engine.setdefault(each.engine, []).append(each)
    for engine, decodes in by_engine.items():
        _draw_engine(left, right, engine, decodes)
    left.set_ylabel("decode tokens a second")
    left.set_yscale("log")
    right.set_ylabel("scaling efficiency")
    right.set_ylim(bottom=0.0)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("batch size")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    machine = results.machine.gpu or results.machine.cpu
    figure.suptitle(f"{results.model.name}, {results.model.dtype}, {machine}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_engine(left: Any, right: Any, engine: str, decodes: Sequence[Decode]) -> None:
    sizes = [each.batch_size for each in decodes]
    left.plot(sizes, [each.tokens_per_second for each in decodes], marker="o", label=engine)
    right.plot(sizes, [each.efficiency for each in decodes], marker="o", label=engine)
    floors = [(each.batch_size, each.floor_ms) for each in decodes if each.floor_ms]
    if floors:
        ceiling = [size / (floor / 1e3) for size, floor in floors]
        left.plot([size for size, _ in floors], ceiling, "--", color="grey", label="roofline")
