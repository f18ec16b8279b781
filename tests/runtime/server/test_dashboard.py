"""The Grafana dashboard shows all that a server says, and asks for nothing else."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from command_line import ROOT
from prometheus_client.parser import text_string_to_metric_families

from octavo.runtime.memory_plan import MemoryPlan, MemoryUse
from octavo.runtime.server import prometheus
from tests.runtime.server.running_server import InThread

NAME = re.compile(r"\b(?:vllm|octavo):\w+")
DASHBOARD: dict[str, Any] = json.loads(
    (ROOT / "docs" / "grafana-dashboard.json").read_text("utf-8")
)


def shown() -> set[str]:
    """Names of all figures on a panel."""
    targets = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return {name for target in targets for name in NAME.findall(target["expr"])}


@pytest.fixture
def served(toy_server: InThread, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Names of all that a server says, with the names of their families, also of its GPU."""
    plan = MemoryPlan(100, 10, 5, weights=40, program=3, inputs=2, graphs=1, kv_cache=20)
    executor = toy_server.engine._engine.executor
    monkeypatch.setattr(executor, "memory", MemoryUse(plan, 64), raising=False)
    monkeypatch.setattr(prometheus, "gpu_utilization", lambda: 0.5)
    with toy_server.http() as client:
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        families = list(text_string_to_metric_families(client.get("/metrics").text))
    return {sample.name: family.name for family in families for sample in family.samples}


def test_every_figure_of_the_dashboard_is_served(served: dict[str, str]) -> None:
    assert shown() <= served.keys()


def test_every_figure_that_is_served_is_on_the_dashboard(served: dict[str, str]) -> None:
    """Of a histogram one of its series will do."""
    on_panels = {served[name] for name in shown()}
    assert set(served.values()) == on_panels


def test_panels_have_ids_and_places_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    for panel in panels:
        refs = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(refs)) == len(refs)
