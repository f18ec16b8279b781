"""GET /metrics, read by Prometheus' own parser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.runtime.memory_plan import MemoryPlan, MemoryUse
from tests.runtime.server.running_server import InThread, in_thread

# As vLLM's dashboards ask for them (its docs/usage/metrics).
VLLM = {
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"),
    *("vllm:num_preemptions_total", "vllm:time_to_first_token_seconds_bucket"),
    *("vllm:inter_token_latency_seconds_sum", "vllm:e2e_request_latency_seconds_bucket"),
    *("vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum"),
    *("vllm:request_decode_time_seconds_sum", "vllm:request_inference_time_seconds_sum"),
    *("vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket"),
    *("vllm:iteration_tokens_total_bucket", "vllm:request_time_per_output_token_seconds_count"),
}


def samples(server: InThread) -> dict[str, list[tuple[dict[str, str], float]]]:
    with server.http() as client:
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_the_figures_of_a_few_requests(shared_toy: Path) -> None:
    with in_thread(shared_toy) as server:
        with server.http() as client:
            body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
            for _ in range(3):
                client.post("/v1/completions", json=body)
            client.post("/v1/completions", json={"prompt": ""})
            client.get("/some/where")
        found = samples(server)
    assert found.keys() >= VLLM
    labels = {"model_name": "toy", "engine": "0"}
    assert found["vllm:num_requests_running"] == [(labels, 0)]
    assert found["vllm:prompt_tokens_total"] == [(labels, 9)]
    assert found["vllm:generation_tokens_total"] == [(labels, 12)]
    assert found["vllm:request_success_total"] == [({**labels, "finished_reason": "length"}, 3)]
    assert found["vllm:time_to_first_token_seconds_count"] == [(labels, 3)]
    assert found["vllm:inter_token_latency_seconds_count"] == [(labels, 9)]
    buckets = found["vllm:e2e_request_latency_seconds_bucket"]
    assert buckets[-1] == ({**labels, "le": "+Inf"}, 3)
    assert [value for _, value in buckets] == sorted(value for _, value in buckets)
    assert found["octavo:computed_tokens_total"] == [(labels, 3 * 6)]
    answers = {(each["path"], each["status"]): n for each, n in found["octavo:http_answers_total"]}
    assert answers["/v1/completions", "200"] == 3
    assert answers["/v1/completions", "400"] == 1
    assert answers["other", "404"] == 1
    phases = {each["phase"] for each, _ in found["octavo:startup_seconds"]}
    assert phases >= {"open artifact", "weights", "KV cache"}
    [(build, _)] = found["octavo:build_info"]
    assert build["artifact_id"].startswith("sha256:")


def test_where_answers_come_from(shared_toy: Path) -> None:
    with in_thread(shared_toy, {"result_cache_size": 4}) as server:
        with server.http() as client:
            body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
            usages = [
                client.post("/v1/completions", json={**body, **more}).json()["usage"]
                for more in ({"seed": 1}, {"seed": 1}, {"seed": 2}, {"temperature": 0}, {"seed": 1})
            ]
        found = samples(server)
    labels = {"model_name": "toy", "engine": "0"}
    assert [usage["completion_tokens"] for usage in usages] == [4] * 5
    assert found["octavo:result_cache_hits_total"] == [(labels, 2)]
    assert found["octavo:result_cache_joined_total"] == [(labels, 0)]
    assert found["octavo:result_cache_misses_total"] == [(labels, 3)]
    assert found["vllm:generation_tokens_total"] == [(labels, 12)]


def test_the_memory_of_a_gpu(toy_server: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "octavo:gpu_memory_bytes" not in samples(toy_server)
    plan = MemoryPlan(100, 10, 5, weights=40, program=3, inputs=2, graphs=1, kv_cache=20)
    executor = toy_server.engine._engine.executor
    monkeypatch.setattr(executor, "memory", MemoryUse(plan, 64), raising=False)
    parts = {each["part"]: size for each, size in samples(toy_server)["octavo:gpu_memory_bytes"]}
    assert (parts["weights"], parts["kv_cache"], parts["used"]) == (40, 20, 64)
