"""Figures as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One workload on one engine: median output tokens a second, and the range of the repeats."""

    workload: str
    engine: str
    tokens_per_second: float
    slowest: float
    fastest: float


@dataclass(frozen=True)
class Ratio:
    """Octavo's tokens a second over another engine's, on one workload."""

    workload: str
    against: str
    ratio: float
    target: float

    @property
    def is_met(self) -> bool:
        return self.ratio >= self.target


@dataclass(frozen=True)
class Results:
    """All that one run found. Bandwidths in bytes a second, rates in operations a second."""

    model: str
    dtype: str
    threads: int
    versions: dict[str, str]
    read_bandwidth: float
    matmul_rate: float
    weight_bytes: int
    figures: list[Figure]
    ratios: list[Ratio]

    @property
    def bandwidth_share(self) -> float:
        """Share of the read bandwidth that batch 1 reaches: every token reads every weight once."""
        single = next(f for f in self.figures if f.workload == "single" and f.engine == "octavo")
        return single.tokens_per_second * self.weight_bytes / self.read_bandwidth


def print_tables(results: Results) -> None:
    """Two tables: the figures, and the ratios with their targets."""
    console = Console()
    table = Table(
        "workload", "engine", "tokens/s", "range", title=f"{results.model}, {results.dtype}"
    )
    for figure in results.figures:
        spread = f"{figure.slowest:.1f} to {figure.fastest:.1f}"
        table.add_row(figure.workload, figure.engine, f"{figure.tokens_per_second:.1f}", spread)
    console.print(table)
    ratios = Table("workload", "octavo against", "ratio", "target", "met")
    for ratio in results.ratios:
        met = "yes" if ratio.is_met else "NO"
        ratios.add_row(ratio.workload, ratio.against, f"{ratio.ratio:.2f}", str(ratio.target), met)
    console.print(ratios)
    console.print(
        f"read bandwidth {results.read_bandwidth / 1e9:.1f} GB/s, of which batch 1 reaches "
        f"{results.bandwidth_share:.0%}; matmul {results.matmul_rate / 1e9:.0f} GFLOP/s; "
        f"{results.threads} threads"
    )


def write_json(results: Results, path: Path) -> None:
    """Everything, with the share of the bandwidth."""
    body = {**asdict(results), "bandwidth_share": results.bandwidth_share}
    path.write_text(json.dumps(body, indent=2) + "\n", encoding="utf-8")


def draw(results: Results, path: Path) -> None:
    """A bar for each figure, with the range of the repeats."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.5), layout="constrained")
    labels = [f"{f.workload}: {f.engine}" for f in results.figures]
    medians = [f.tokens_per_second for f in results.figures]
    errors = [
        [f.tokens_per_second - f.slowest for f in results.figures],
        [f.fastest - f.tokens_per_second for f in results.figures],
    ]
    colours = ["tab:blue" if f.engine == "octavo" else "lightgrey" for f in results.figures]
    bars = axes.barh(labels, medians, xerr=errors, color=colours, ecolor="grey")
    axes.bar_label(bars, fmt="%.1f", padding=6)
    axes.invert_yaxis()
    axes.set_xlabel("output tokens a second")
    axes.set_title(f"{results.model}, {results.dtype}, {results.threads} threads")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
