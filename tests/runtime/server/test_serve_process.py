"""``octavo serve`` as a process: how it starts, drains and stops."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from command_line import Command, assert_refused

from tests.runtime.server.running_server import Process, in_process, wait_until
from tests.runtime.toy_artifact import MAX_POSITION

LONG = {"prompt": "a", "max_tokens": 150, "ignore_eos": True}


@contextmanager
def load(server: Process, count: int) -> Iterator[list[Any]]:
    """Requests that have begun; half of them streams. Of each, how many tokens or events came."""
    limits = httpx2.Limits(max_connections=count)
    with server.http(limits=limits) as client, ThreadPoolExecutor(count) as pool:

        def ask() -> int:
            answer = client.post("/v1/completions", json=LONG).raise_for_status()
            tokens: int = answer.json()["usage"]["completion_tokens"]
            return tokens

        def stream() -> int:
            with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
                lines = [line for line in answer.iter_lines() if line]
            assert lines[-1] == "data: [DONE]"
            assert "length" in lines[-2]
            return 150

        futures: list[Any] = [pool.submit(stream if i % 2 else ask) for i in range(count)]
        time.sleep(0.5)
        assert not all(future.done() for future in futures), "the load is too small"
        yield futures


def test_the_result_cache_is_an_option(shared_toy: Path) -> None:
    with in_process(shared_toy, "--result-cache-size", "2") as server, server.http() as client:
        body = {"prompt": "a", "max_tokens": 5, "temperature": 0}
        answers = [client.post("/v1/completions", json=body).json() for _ in range(3)]
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        rows = client.get("/metrics").text.splitlines()
        [hits] = [row for row in rows if row.startswith("octavo:result_cache_hits_total")]
        assert hits.endswith(" 2.0")


def test_the_order_of_requests_is_an_option(shared_toy: Path) -> None:
    options = ("--scheduling-policy", "priority", "--ageing-ms", "1000", "--check-invariants")
    with in_process(shared_toy, *options) as server, server.http() as client:
        body = {"prompt": "a", "max_tokens": 2, "priority": 3}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert 'priority="3"' in client.get("/metrics").text


def test_sigterm_under_load_loses_no_request_that_was_taken(shared_toy: Path) -> None:
    with in_process(shared_toy, "--max-num-seqs", "2") as server, load(server, 16) as futures:
        server.signal(signal.SIGTERM)
        wait_until(lambda: any("draining" in line for line in server.log))
        with server.http() as client:
            refused = client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503
            assert refused.json()["error"]["type"] == "service_unavailable"
            assert client.get("/ready").status_code == 503
            assert client.get("/health").status_code == 200
        assert [future.result() for future in futures] == [150] * 16
        assert server.wait() == 0


def test_a_policy_that_there_is_not(
    shared_toy: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = Command(capfd, monkeypatch)("serve", shared_toy, "--scheduling-policy", "lifo")
    assert_refused(done, "scheduling_policy must be one of fcfs", "'lifo'")


def test_a_second_signal_stops_at_once(shared_toy: Path) -> None:
    with in_process(shared_toy, "--max-num-seqs", "1") as server, load(server, 16) as futures:
        started = time.monotonic()
        server.signal(signal.SIGTERM)
        wait_until(lambda: any("draining" in line for line in server.log))
        server.signal(signal.SIGTERM)
        assert server.wait(10) == 1
        assert time.monotonic() - started < 5
        assert any(future.exception() is not None for future in futures)


def test_draining_has_a_limit(shared_toy: Path) -> None:
    options = ("--max-num-seqs", "1", "--drain-timeout", "0.2")
    with in_process(shared_toy, *options) as server, load(server, 16) as futures:
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 1
        assert all(future.exception(10) is not None for future in futures[-2:])
        assert any("did not finish in time" in line for line in server.log)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_with_keys_from_the_file_and_the_environment(shared_toy: Path, tmp_path: Path) -> None:
    keys, certificate, key = (tmp_path / name for name in ("keys", "cert.pem", "key.pem"))
    keys.write_text("# of the team\nfirst\n\n second \n")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost".split()
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    arguments = ["--tls-certificate", str(certificate), "--tls-key", str(key), "--quiet"]
    arguments += ["--api-key-file", str(keys)]
    with in_process(shared_toy, *arguments, OCTAVO_API_KEYS="third, fourth") as server:
        assert server.url.startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate))
        for each, status in (("first", 200), ("second", 200), ("fourth", 200), ("# of", 401)):
            headers = {"Authorization": f"Bearer {each}"}
            with httpx2.Client(verify=context, headers=headers) as client:
                assert client.get(f"{server.url}/v1/models").status_code == status
        assert len(server.log) == 1  # that it listens, and no access log


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(capfd, monkeypatch)


def test_what_is_refused_before_anything_is_loaded(
    here: Command, shared_toy: Path, tmp_path: Path
) -> None:
    assert_refused(here("serve", tmp_path / "none"), "no such directory", "octavo compile")
    assert_refused(here("serve", shared_toy, "--artifact-id", "sha256:0"), "sha256:0")
    parser = here("serve", shared_toy, "--tool-call-parser", "other")
    assert_refused(parser, "hermes, llama3_json, mistral")
    assert_refused(here("serve", shared_toy, "--tls-key", "k"), "both")
    too_long = here("serve", shared_toy, "--max-model-len", str(MAX_POSITION + 1))
    assert_refused(too_long, "max_model_len")
    assert_refused(here("serve", shared_toy, "--kv-offload-gb", "1e9"), "kv_offload_gb", "lower it")
    empty = tmp_path / "empty"
    empty.write_text("# none\n")
    assert_refused(here("serve", shared_toy, "--api-key-file", empty), "holds no API key")


def test_without_its_packages_it_says_what_to_install(
    here: Command, shared_toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.cli.serve._NEEDED", ("fastapi", "no_such_package"))
    assert_refused(here("serve", shared_toy), "no_such_package", "pip install 'octavo[serve]'")


def test_a_port_in_use(here: Command, shared_toy: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert_refused(
            here("serve", shared_toy, "--port", str(port)), f"127.0.0.1:{port}", "in use"
        )
