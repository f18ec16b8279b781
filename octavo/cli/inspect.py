"""``octavo inspect``: what an artifact holds, and what each pass did to the graph."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from textwrap import TextWrapper
from typing import Annotated

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from octavo.cli import artifact
from octavo.ir.errors import OctavoError
from octavo.ir.manifest import KVSlot, Manifest, num_groups

PIPE_WIDTH = UNBROKEN_WIDTH = 1000
_DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def inspect(
    directory: Annotated[Path, typer.Argument(help="An artifact directory.", metavar="DIR")],
    stage: Annotated[
        str | None,
        typer.Option(metavar="STAGE", help="Print the IR of this stage: its number or pass name."),
    ] = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Print what changed from stage A to stage B."),
    ] = None,
    kernels: Annotated[
        bool,
        typer.Option("--kernels", help="Print how each GPU kernel is run, and its binaries."),
    ] = False,
    plan: Annotated[
        str | None,
        typer.Option(metavar="PLAN", help="With --kernels: what this plan chooses, like sm_90."),
    ] = None,
) -> None:
    """Show what an artifact holds, or the IR of its stages."""
    if (stage is not None) + (diff is not None) + kernels > 1:
        raise OctavoError("--stage, --diff and --kernels exclude each other; give one of them")
    if plan is not None and not kernels:
        raise OctavoError("--plan goes with --kernels")
    manifest = artifact.read_manifest(directory)
    stages = artifact.read_stages(directory)
    if stage is not None:
        sys.stdout.write(artifact.find_stage(stages, stage).text())
        return
    if diff is not None:
        before, after = (artifact.find_stage(stages, wanted) for wanted in diff)
        _print_diff(_console(), before, after)
        return
    console = _console()
    with console.capture() as captured:
        if kernels:
            _print_gpu_kernels(console, directory, plan)
        else:
            _print_summary(console, directory, manifest, stages)
    # Rich pads a table's last column: blanks that a narrower screen or a file shows as such.
    for line in captured.get().splitlines():
        print(line.rstrip())


def _print_summary(
    console: Console, directory: Path, manifest: Manifest, stages: list[artifact.Stage]
) -> None:
    _print_model(console, directory, manifest)
    _print_loss(console, directory)
    _print_sizes(console, manifest)
    _print_stages(console, stages)
    _print_kernels(console, artifact.read_kernels(directory))
    _print_fallbacks(console, stages)


def _console() -> Console:
    """Plain text as it stands, in colour on a terminal and unbroken in a file or a pipe."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(highlight=False, markup=False, emoji=False, width=width)


def _print_diff(console: Console, before: artifact.Stage, after: artifact.Stage) -> None:
    lines = difflib.unified_diff(
        before.text().splitlines(),
        after.text().splitlines(),
        before.path.name,
        after.path.name,
        lineterm="",
    )
    for line in lines:
        console.print(Text(line, style=_DIFF_STYLES.get(line[:1], "")), soft_wrap=True)


def _print_model(console: Console, directory: Path, manifest: Manifest) -> None:
    rows = {
        "artifact": str(directory),
        "id": manifest.artifact_id,
        "source": " at ".join(filter(None, (manifest.source, manifest.revision))),
        "model": f"{manifest.architecture} ({manifest.model_type})",
        "target": manifest.target,
        "dtype": manifest.dtype,
        "quantization": _describe_quantization(manifest),
        "vocabulary": f"{manifest.vocab_size} tokens",
        "longest context": f"{manifest.max_position} tokens",
        "KV cache": _describe_slots(manifest.kv_slots),
        "KV scheme": _describe_kv_scheme(manifest),
        "made with": ", ".join(f"{name} {v}" for name, v in sorted(manifest.producer.items())),
    }
    width = max(map(len, rows)) + 2
    for name, value in rows.items():
        if value:  # unbroken, whatever the width: an id is there to be copied
            console.print(Text.assemble((name.ljust(width), "bold"), value), soft_wrap=True)


def _describe_quantization(manifest: Manifest) -> str:
    """The recipe, and how many linears are held by each scheme."""
    schemes = ", ".join(f"{count} x {name}" for name, count in manifest.quant_schemes.items())
    return ": ".join(filter(None, (manifest.quantization or "none", schemes)))


def _describe_kv_scheme(manifest: Manifest) -> str:
    """The scheme, and whose keys have an offset; nothing for a cache in the model's dtype."""
    if not manifest.num_key_offsets:
        return manifest.kv_scheme or ""
    count = f"{manifest.num_key_offsets} of {len(manifest.kv_slots)}"
    return f"{manifest.kv_scheme}, keys with an offset in {count}"


def _print_loss(console: Console, directory: Path) -> None:
    """What quantising cost on a short text, if it was measured."""
    loss = artifact.read_loss(directory)
    if loss is None:
        return
    table = _table("Loss", "measure", "value")
    for name, value in loss.items():
        table.add_row(name, value)
    console.print(table)


def _describe_slots(slots: tuple[KVSlot, ...]) -> str:
    """Slots of one kind counted together: ``30 x 3 heads of 64``."""
    kinds = dict.fromkeys(slots, 0)
    for slot in slots:
        kinds[slot] += 1
    texts = []
    for slot, count in kinds.items():
        group = f" in block group {slot.group}" if num_groups(slots) > 1 else ""
        texts.append(f"{count} x {_describe_slot(slot)}{group}")
    return ", ".join(texts)


def _describe_slot(slot: KVSlot) -> str:
    dims = str(slot.head_dim)
    if slot.v_head_dim != slot.head_dim:
        dims += f" (values {slot.v_head_dim})"
    window = "" if slot.window is None else f", window {slot.window}"
    chunk = "" if slot.chunk is None else f", chunks of {slot.chunk}"
    return f"{slot.num_kv_heads} heads of {dims}{window}{chunk}"


def _print_sizes(console: Console, manifest: Manifest) -> None:
    table = _table("Files", "role", "files", "bytes")
    for role, (num_files, num_bytes) in artifact.bytes_by_role(manifest).items():
        table.add_row(role, str(num_files), f"{num_bytes:,}")
    console.print(table)


def _print_stages(console: Console, stages: list[artifact.Stage]) -> None:
    table = _table("Passes", "#", "pass", "nodes", "rewrites", "missed")
    for stage in stages:
        table.add_row(
            str(stage.number),
            stage.name,
            str(stage.num_nodes),
            str(stage.num_rewrites),
            str(len(stage.missed) or ""),
        )
    console.print(table)
    for stage in stages:
        for reason, places in artifact.group_misses(stage).items():
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            console.print(Text(f"missed by {stage.name}: {places[0]}{more}: {reason}"))


def _print_kernels(console: Console, kernels: list[artifact.Kernel]) -> None:
    if not kernels:
        return
    table = _table("Kernels", "kernel", "op", "template", "constants")
    for kernel in kernels:
        table.add_row(kernel.name, kernel.op, kernel.template, kernel.constants)
    unbroken = console.options.update(width=UNBROKEN_WIDTH)
    if Measurement.get(console, unbroken, table).maximum <= console.width:
        console.print(table)
        return
    # A narrow terminal: the constants on lines of their own, or names would break in mid-word.
    console.print(Text("\nKernels", style="bold"))
    wrapper = TextWrapper(console.width - 2, break_long_words=False, break_on_hyphens=False)
    for kernel in kernels:
        console.print(Text(kernel.name, style="bold"), soft_wrap=True)
        for text in (f"{kernel.op}, {kernel.template}", kernel.constants):
            for line in wrapper.wrap(text):
                console.print(Text(f"  {line}"), soft_wrap=True)


def _print_gpu_kernels(console: Console, directory: Path, plan: str | None) -> None:
    # Triton is imported by the kernels only, and takes its time.
    from octavo.cli import inspect_kernels

    known = ", ".join(inspect_kernels.plan_names(directory)) or "none"
    console.print(f"Choices of {plan or 'no plan: the defaults'}; plans: {known}", soft_wrap=True)
    table = _table("Kernels", "kernel", "op", "rows", "choice", "bytes", "flops")
    for way in inspect_kernels.read_ways(directory, plan):
        table.add_row(way.module, way.op, way.rows, way.choice, way.num_bytes, way.flops)
    console.print(table)
    binaries = inspect_kernels.read_compiled(directory)
    names = ("kernel", "function", "arch", "constants", "registers", "spilled", "shared")
    table = _table("Binaries", *names)
    for each in binaries:
        table.add_row(
            each.module,
            each.kernel,
            each.arch,
            each.constants,
            each.registers,
            each.spilled,
            each.shared,
        )
    console.print(table if binaries else "\nThere are no binaries: they are compiled when loaded.")


def _print_fallbacks(console: Console, stages: list[artifact.Stage]) -> None:
    fallbacks = artifact.count_fallbacks(stages[-1]) if stages else {}
    if not fallbacks:
        console.print("\nNo op is left to PyTorch's ATen.")
        return
    table = _table("Ops left to PyTorch", "op", "count")
    for op, count in sorted(fallbacks.items()):
        table.add_row(op, str(count))
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    """A plain table; columns of numbers are set to the right."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.title = Text(f"\n{title}", style="bold")
    numeric = {"#", "files", "bytes", "flops", "nodes", "rewrites", "missed", "count", "value"}
    numeric |= {"registers", "spilled", "shared"}
    for column in columns:
        table.add_column(column, justify="right" if column in numeric else "left", overflow="fold")
    return table
