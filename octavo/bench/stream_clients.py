"""Clients of a benchmarked server, in a process of their own: ``HOST PORT PATH COUNT`` and a body.

The body of each request comes on stdin. All clients ask at once; nothing is parsed but the end, so
that the server and not its clients is what runs. Prints the number of events that came, the last
``[DONE]`` of each client not counted. Imports the standard library alone.
"""

from __future__ import annotations

import asyncio
import sys

_DONE = b"data: [DONE]\n\n"


async def main(host: str, port: int, path: str, count: int, body: bytes) -> int:
    """The events of ``count`` streams. Raises RuntimeError for an answer that is none."""
    return sum(await asyncio.gather(*(_stream(host, port, path, body) for _ in range(count))))


async def _stream(host: str, port: int, path: str, body: bytes) -> int:
    reader, writer = await asyncio.open_connection(host, port)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200") or _DONE not in answer:
        raise RuntimeError(f"a stream did not end as it should: {answer[-500:]!r}")
    return answer.count(b"data: {")


if __name__ == "__main__":
    _, to_host, to_port, to_path, how_many = sys.argv
    stdin = sys.stdin.buffer.read()
    print(asyncio.run(main(to_host, int(to_port), to_path, int(how_many), stdin)))
