"""The Grafana dashboard asks for nothing that a server does not say."""

from __future__ import annotations

import json
import re

from command_line import ROOT

from tests.runtime.server.running_server import InThread

NAME = re.compile(r"\b(?:vllm|octavo):\w+")
# Said only where there is a GPU.
ELSEWHERE = {"octavo:gpu_memory_bytes", "octavo:gpu_utilization"}


def test_every_figure_of_the_dashboard_is_served(toy_server: InThread) -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text("utf-8"))
    expressions = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())
    ]
    wanted = {name for expression in expressions for name in NAME.findall(expression)}
    assert len(wanted) > 20
    with toy_server.http() as client:
        client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        served = set(NAME.findall(client.get("/metrics").text))
    missing = wanted - served - ELSEWHERE
    assert not missing
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
