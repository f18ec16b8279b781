"""``octavo top``: what a server is doing, live in the terminal."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.serve import require_packages
from octavo.ir.errors import OctavoError

if TYPE_CHECKING:
    from rich.console import RenderableType

_BAR_WIDTH = 30
_TIMEOUT_SECONDS = 10


def top(
    url: Annotated[str, typer.Argument(help="The server's address, such as localhost:8000.")],
    interval: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look twice, an interval apart, print it, and exit.")
    ] = False,
) -> None:
    """Watch a server: its batch, its memory, tokens a second, latencies. Ctrl-C ends it."""
    require_packages()
    address = metrics_url(url)
    before = Reading.take(address)

    from rich.console import Console
    from rich.live import Live

    if once:
        time.sleep(interval)
        Console().print(render(before, Reading.take(address), url))
        return
    with Live(render(before, before, url), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval)
            now = Reading.take(address)
            live.update(render(before, now, url), refresh=True)
            before = now


def metrics_url(url: str) -> str:
    """Where the figures are: a scheme and the path are added where they are missing."""
    full = url if "://" in url else f"http://{url}"
    full = full.rstrip("/")
    return full if full.endswith("/metrics") else f"{full}/metrics"


@dataclass(frozen=True)
class Reading:
    """The samples of one look: sums over all labels but ``le``, which is part of the name."""

    time: float
    values: Mapping[str, float]

    @classmethod
    def take(cls, address: str) -> Reading:
        """Raises OctavoError when nobody answers, or somebody else does."""
        try:
            with urllib.request.urlopen(address, timeout=_TIMEOUT_SECONDS) as answer:
                text = answer.read().decode()
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise OctavoError(f"{address}: {reason}; is 'octavo serve' running there?") from None
        reading = cls.parse(text, time.monotonic())
        if "vllm:num_requests_running" not in reading.values:
            raise OctavoError(f"{address}: these are not the metrics of a model server")
        return reading

    @classmethod
    def parse(cls, text: str, now: float) -> Reading:
        from prometheus_client.parser import text_string_to_metric_families

        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                le = sample.labels.get("le")
                name = sample.name if le is None else f"{sample.name}|{le}"
                values[name] = values.get(name, 0.0) + sample.value
        return cls(now, values)

    def __getitem__(self, name: str) -> float:
        return self.values.get(name, 0.0)


class Change:
    """What happened between two looks."""

    def __init__(self, before: Reading, now: Reading) -> None:
        self._before = before
        self._now = now

    def of(self, name: str) -> float:
        return self._now[name] - self._before[name]

    def rate(self, name: str) -> float:
        """A second; 0 when no time has passed."""
        seconds = self._now.time - self._before.time
        return self.of(name) / seconds if seconds > 0 else 0.0

    def share(self, part: str, whole: str) -> float | None:
        """None when the whole is nothing."""
        return self.of(part) / self.of(whole) if self.of(whole) > 0 else None

    def mean(self, histogram: str) -> float | None:
        """Of the values that came; None when none did."""
        return self.share(f"{histogram}_sum", f"{histogram}_count")

    def quantile(self, histogram: str, q: float) -> float | None:
        """An upper bound of the quantile of the values that came."""
        count = self.of(f"{histogram}_count")
        if count <= 0:
            return None
        prefix = f"{histogram}_bucket|"
        bounds = {
            float(n.removeprefix(prefix)): n for n in self._now.values if n.startswith(prefix)
        }
        for bound in sorted(bounds):
            if self.of(bounds[bound]) >= q * count:
                return bound
        return None


def render(before: Reading, now: Reading, url: str) -> RenderableType:
    """The view of two looks."""
    from rich import box
    from rich.table import Table

    change = Change(before, now)
    running, most = now["vllm:num_requests_running"], now["octavo:max_num_seqs"]
    usage = now["vllm:kv_cache_usage_perc"]
    table = Table(
        title=f"octavo top {url}", box=box.SIMPLE, show_header=False, title_justify="left"
    )
    table.add_column(style="bold")
    table.add_column()
    batch = f"{_bar(running / most if most else 0)} {running:.0f} of {most:.0f} running"
    table.add_row("batch", f"{batch}, {now['vllm:num_requests_waiting']:.0f} waiting")
    fragmentation = now["octavo:kv_fragmentation"]
    table.add_row("KV cache", f"{_bar(usage)} {usage:.0%} used, {fragmentation:.0%} of that empty")
    table.add_row(
        "tokens a second",
        f"{change.rate('vllm:generation_tokens_total'):,.0f} generated, "
        f"{change.rate('vllm:prompt_tokens_total'):,.0f} of prompts, "
        f"{change.rate('octavo:computed_tokens_total'):,.0f} computed",
    )
    table.add_row(
        "in vain",
        f"{change.rate('octavo:recomputed_tokens_total'):,.0f} computed again, "
        f"{change.rate('octavo:discarded_tokens_total'):,.0f} for nobody, "
        f"{now['vllm:num_preemptions_total']:,.0f} preemptions in all",
    )
    for label, name in (
        ("first token", "vllm:time_to_first_token_seconds"),
        ("between tokens", "vllm:inter_token_latency_seconds"),
        ("queue", "vllm:request_queue_time_seconds"),
        ("whole request", "vllm:e2e_request_latency_seconds"),
    ):
        mean, high = change.mean(name), change.quantile(name, 0.95)
        table.add_row(label, f"{_seconds(mean)} mean, 95 % within {_seconds(high)}")
    padding = change.share("octavo:computed_tokens_total", "octavo:launched_tokens_total")
    hits = change.share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    table.add_row(
        "steps",
        f"{change.rate('octavo:steps_total'):,.1f} a second, "
        f"{_percent(padding)} of launched tokens useful",
    )
    table.add_row("prefix cache", f"{_percent(hits)} of prompt tokens found")
    table.add_row(
        "requests",
        f"{change.rate('vllm:request_success_total'):,.1f} ended a second, "
        f"{now['vllm:request_success_total']:,.0f} in all",
    )
    return table


def _bar(share: float) -> str:
    filled = round(min(1.0, max(0.0, share)) * _BAR_WIDTH)
    return "█" * filled + "░" * (_BAR_WIDTH - filled)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:,.1f} ms" if value < 1 else f"{value:,.2f} s"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
