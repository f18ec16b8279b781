"""``octavo top``: its arithmetic, and its view of a server."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Command, assert_refused

from octavo.cli.top import Change, Reading, metrics_url
from tests.runtime.server.running_server import in_thread
from tests.runtime.toy_artifact import write_toy_artifact

BEFORE = """
vllm:generation_tokens_total{model_name="a"} 100
vllm:generation_tokens_total{model_name="b"} 50
t_seconds_bucket{le="0.1"} 1
t_seconds_bucket{le="0.5"} 1
t_seconds_bucket{le="+Inf"} 1
t_seconds_count 1
t_seconds_sum 0.05
"""
NOW = """
vllm:generation_tokens_total{model_name="a"} 300
vllm:generation_tokens_total{model_name="b"} 100
t_seconds_bucket{le="0.1"} 10
t_seconds_bucket{le="0.5"} 20
t_seconds_bucket{le="+Inf"} 21
t_seconds_count 21
t_seconds_sum 4.05
"""


def test_rates_means_and_quantiles_are_of_what_came_between() -> None:
    change = Change(Reading.parse(BEFORE, 10.0), Reading.parse(NOW, 12.0))
    assert change.rate("vllm:generation_tokens_total") == 125
    assert change.mean("t_seconds") == pytest.approx(4.0 / 20)
    # 9 of the 20 that came are at most 0.1, 19 at most 0.5.
    assert change.quantile("t_seconds", 0.45) == 0.1
    assert change.quantile("t_seconds", 0.46) == 0.5
    assert change.quantile("t_seconds", 0.96) == float("inf")
    still = Change(Reading.parse(NOW, 12.0), Reading.parse(NOW, 12.0))
    assert still.rate("vllm:generation_tokens_total") == 0
    assert still.mean("t_seconds") is None
    assert still.quantile("t_seconds", 0.5) is None


@pytest.mark.parametrize(
    "url", ["localhost:1", "http://localhost:1", "localhost:1/", "http://localhost:1/metrics"]
)
def test_what_is_missing_of_the_address_is_added(url: str) -> None:
    assert metrics_url(url) == "http://localhost:1/metrics"


def test_a_look_at_a_server(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_toy_artifact(tmp_path / "toy")
    here = Command(capfd, monkeypatch)
    with in_thread(tmp_path / "toy", {"max_num_seqs": 7}) as server:
        with server.http() as client:
            client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        shown = here("top", server.url, "--once", "--interval", "0.1")
    assert shown.returncode == 0
    assert "0 of 7 running, 0 waiting" in shown.stdout
    assert "0% used" in shown.stdout
    assert "1 in all" in shown.stdout


def test_nobody_there(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    here = Command(capfd, monkeypatch)
    assert_refused(here("top", "127.0.0.1:9"), "http://127.0.0.1:9/metrics", "octavo serve")
    assert_refused(here("top", "localhost:port"), "http://localhost:port/metrics", "octavo serve")
