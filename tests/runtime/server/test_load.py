"""A thousand clients at once, some of whom go early or send nonsense."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.runtime.server.running_server import Process, in_process

NONSENSE = [
    {"prompt": ""},
    {"prompt": [10**9]},
    {"prompt": "a", "temperature": -1},
    {"propmt": "a"},
]


class Crowd:
    """Clients that ask, again and again until the time is over."""

    def __init__(self, server: Process, until: float) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self._address = host, int(port)
        self._until = until
        self.outcomes: Counter[str] = Counter()

    async def run(self, count: int) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                tasks.create_task(self._client(random.Random(number)))

    async def _client(self, rng: random.Random) -> None:
        while time.monotonic() < self._until:
            kind = rng.random()
            if kind < 0.05:
                status, _ = await self._ask(rng.choice(NONSENSE))
                self.outcomes[f"nonsense {status}"] += 1
                continue
            count = rng.randint(4, 30)
            body = {"prompt": [5, 6, 7], "max_tokens": count, "ignore_eos": True, "stream": True}
            leaves = rng.randint(1, count) if kind < 0.15 else None
            status, events = await self._ask(body, leaves)
            if leaves is not None:
                self.outcomes[f"left {status}"] += 1
                continue
            is_whole = events[-1:] == ["[DONE]"] and "length" in events[-2]
            self.outcomes[f"{'whole' if is_whole else 'broken'} {status}"] += 1

    async def _ask(self, body: object, leaves_after: int | None = None) -> tuple[int, list[str]]:
        """The status and the events of an answer, or as many as the client stays for."""
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (len(content), content)
            )
            status = int((await reader.readline()).split()[1])
            events: list[str] = []
            async for line in reader:
                if line.startswith(b"data: "):
                    events.append(line[6:].decode().strip())
                    if leaves_after is not None and len(events) >= leaves_after:
                        break
            return status, events
        finally:
            writer.close()


def figures(server: Process) -> dict[str, float]:
    with server.http() as client:
        text = client.get("/metrics").text
    families = text_string_to_metric_families(text)
    return {s.name: s.value for family in families for s in family.samples if "le" not in s.labels}


def resident_bytes(server: Process) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(status.split("VmRSS:")[1].split()[0])


def check_quiet(server: Process, free: float) -> None:
    """Nothing is left of any request."""
    limit = time.monotonic() + 30
    while figures(server)["octavo:requests"] and time.monotonic() < limit:
        time.sleep(0.2)
    now = figures(server)
    assert now["octavo:requests"] == 0
    assert now["vllm:num_requests_running"] == now["vllm:num_requests_waiting"] == 0
    assert now["octavo:kv_blocks_free"] == free


def crowd(server: Process, count: int, seconds: float) -> Counter[str]:
    clients = Crowd(server, time.monotonic() + seconds)
    asyncio.run(clients.run(count))
    outcomes = clients.outcomes
    assert set(outcomes) <= {"whole 200", "left 200", "nonsense 400"}, outcomes
    assert len(outcomes) == 3, outcomes
    return outcomes


def test_a_hundred_clients(shared_toy: Path) -> None:
    with in_process(shared_toy, "--quiet") as server:
        free = figures(server)["octavo:kv_blocks_free"]
        crowd(server, 100, seconds=3)
        check_quiet(server, free)
        assert server.process.poll() is None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_thousand_clients_for_two_minutes(shared_toy: Path) -> None:
    with in_process(shared_toy, "--quiet") as server:
        free = figures(server)["octavo:kv_blocks_free"]
        crowd(server, 1000, seconds=30)  # until all that grows once has grown
        check_quiet(server, free)
        before = resident_bytes(server)
        crowd(server, 1000, seconds=120)
        check_quiet(server, free)
        assert resident_bytes(server) - before < 32 * 2**20
