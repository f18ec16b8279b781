"""OpenAI's batch files: requests, one a line of JSON, and their answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.runtime.errors import InvalidRequest

URLS = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True)
class BatchRequest:
    """A line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """The requests of a file, blank lines left out.

    Raises InvalidRequest, naming the line, for one that is no request or has an id for the second
    time. What is wrong with a body is left to whoever answers it.
    """
    seen: set[str] = set()
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            request = _parse(f"{path}:{number}", line)
            if request.custom_id in seen:
                raise InvalidRequest(
                    f"{path}:{number}: custom_id {request.custom_id!r:.80} is there already; "
                    "give each line its own"
                )
            seen.add(request.custom_id)
            yield request


def _parse(where: str, line: str) -> BatchRequest:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}: must be an object with custom_id, method, url and body")
    custom_id, body = value.get("custom_id"), value.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise InvalidRequest(f"{where}: custom_id must be a string that is not empty")
    if value.get("method") != "POST":
        raise InvalidRequest(f'{where}: method must be "POST", got {value.get("method")!r:.40}')
    if value.get("url") not in URLS:
        raise InvalidRequest(
            f"{where}: url must be {' or '.join(URLS)}, got {value.get('url')!r:.80}"
        )
    if not isinstance(body, dict):
        raise InvalidRequest(f"{where}: body must be an object")
    if body.get("stream"):
        raise InvalidRequest(f"{where}: an answer in a file cannot be streamed; leave stream out")
    return BatchRequest(custom_id, value["url"], body)


def recover_answers(path: Path) -> set[str]:
    """The ids that are answered in an output file; what an interruption cut short is cut off it.

    Raises InvalidRequest for a file that holds anything else than answers.
    """
    if not path.exists():
        return set()
    finished: set[str] = set()
    with path.open("rb+") as file:
        end = 0
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            finished.add(_answered_id(f"{path}:{number}", line))
            end += len(line)
        file.truncate(end)
    return finished


def _answered_id(where: str, line: bytes) -> str:
    try:
        custom_id = json.loads(line)["custom_id"]
    except (ValueError, KeyError, TypeError):
        custom_id = None
    if not isinstance(custom_id, str):
        raise InvalidRequest(
            f"{where}: not an answer of a batch; name another file, or remove this one"
        )
    return custom_id


def answer_line(custom_id: str, answer_id: str, status: int, body: Any) -> str:
    """A line of the output."""
    answer = {
        "id": answer_id,
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": answer_id, "body": body},
        "error": None,
    }
    return json.dumps(answer, ensure_ascii=False) + "\n"
