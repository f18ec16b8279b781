"""What the server does beside answering: keys, limits, errors, health, logs."""

from __future__ import annotations

import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from octavo.runtime.errors import EngineError
from octavo.runtime.llm import LLM
from octavo.runtime.outputs import RequestOutput
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.server.middleware import RateLimit
from octavo.runtime.tokenizer import Tokenizer
from tests.runtime.server.running_server import InThread, in_thread, wait_until

LONG = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}
SHORT = {"prompt": "a", "max_tokens": 2}


def post(server: InThread, body: Any, path: str = "/v1/completions", **headers: str) -> Any:
    with server.http() as client:
        return client.post(path, json=body, headers=headers)


def error_of(answer: Any) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_keys_of_which_any_will_do(shared_toy: Path) -> None:
    with in_thread(shared_toy, api_keys=("first", "zweiter-Schlüssel"[:7])) as server:
        for key in ("first", "zweiter"):
            assert post(server, SHORT, Authorization=f"Bearer {key}").status_code == 200
        for headers in ({}, {"Authorization": "Bearer firs"}, {"Authorization": "Basic first"}):
            answer = post(server, SHORT, **headers)
            assert answer.status_code == 401
            assert error_of(answer)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        with server.http() as client:
            for path in ("/health", "/ready", "/version"):
                assert client.get(path).status_code == 200
            for path in ("/v1/models", "/openapi.json", "/nope"):
                assert client.get(path).status_code == 401


def test_a_body_too_large(shared_toy: Path) -> None:
    with in_thread(shared_toy, max_request_bytes=1000) as server:
        at_limit = {**SHORT, "user": ""}
        at_limit["user"] = "x" * (1000 - len(json.dumps(at_limit, separators=(",", ":"))))
        body = json.dumps(at_limit, separators=(",", ":")).encode()
        kind = {"Content-Type": "application/json"}
        with server.http() as client:
            assert client.post("/v1/completions", content=body, headers=kind).status_code == 200
            for content in (body + b" ", iter([body, b" "])):  # with its length, and without
                answer = client.post("/v1/completions", content=content, headers=kind)
                assert answer.status_code == 413
                assert "1000 bytes" in error_of(answer)["message"]


def test_a_full_queue(shared_toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        in_thread(shared_toy, {"max_num_seqs": 1, "max_queued_requests": 0}) as server,
        ThreadPoolExecutor() as pool,
    ):
        step, goes_on = server.engine._engine.step, threading.Event()
        monkeypatch.setattr(server.engine._engine, "step", lambda: (goes_on.wait(30), step())[1])
        running = pool.submit(post, server, SHORT)
        wait_until(lambda: server.engine.num_requests == 1)
        for stream in (False, True):
            answer = post(server, {**SHORT, "stream": stream})
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert error_of(answer)["code"] == "rate_limit_exceeded"
        goes_on.set()
        assert running.result().status_code == 200
        assert post(server, SHORT).status_code == 200


def test_a_client_that_asks_too_often(shared_toy: Path) -> None:
    with in_thread(shared_toy, requests_per_minute=2, api_keys=("a", "b")) as server:
        codes = [post(server, SHORT, Authorization="Bearer a").status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        answer = post(server, SHORT, Authorization="bearer  a")  # the same key, written otherwise
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert post(server, SHORT, Authorization="Bearer b").status_code == 200
        with server.http() as client:
            assert client.get("/health").status_code == 200


def test_the_bucket_of_a_client_fills_again() -> None:
    limit = RateLimit(lambda *_: None, per_minute=60, uses_keys=False)  # type: ignore[arg-type]
    assert [limit._take("x", 0.0) for _ in range(60)] == [0.0] * 60
    assert limit._take("x", 0.25) == pytest.approx(0.75)
    assert limit._take("x", 1.0) == 0.0
    assert limit._take("x", 1.0) == pytest.approx(1.0)
    assert limit._take("y", 1.0) == 0.0
    for index in range(20_000):
        limit._take(str(index), 2.0)
    assert len(limit._buckets) == 10_000


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_goes_frees_its_blocks(
    toy_server: InThread, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = toy_server.engine._engine.step
    monkeypatch.setattr(toy_server.engine._engine, "step", lambda: (time.sleep(0.005), step())[1])
    before = toy_server.engine.stats().output_tokens
    with toy_server.http() as client:
        if stream:
            with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
                next(answer.iter_lines())
                assert toy_server.engine.num_requests == 1
        else:
            with pytest.raises(Exception, match="timed out"):
                client.post("/v1/completions", json=LONG, timeout=0.1)
    toy_server.wait_until_idle()
    assert toy_server.engine.stats().output_tokens - before < 300, "it ran on to the end"


def test_draining(shared_toy: Path) -> None:
    with in_thread(shared_toy) as server, server.http() as client:
        assert client.get("/ready").json() == {"status": "ready"}
        server.engine._is_draining = True
        answer = post(server, SHORT)
        assert answer.status_code == 503
        assert error_of(answer)["type"] == "service_unavailable"
        assert (client.get("/ready").status_code, client.get("/health").status_code) == (503, 200)


def test_a_dead_engine(shared_toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with in_thread(shared_toy) as server, server.http() as client:
        monkeypatch.setattr(server.engine._engine, "step", lambda: 1 / 0)
        assert post(server, SHORT).status_code == 503
        assert client.get("/health").status_code == 503
        assert client.get("/ready").json() == {"status": "dead"}
        assert "division by zero" in error_of(post(server, SHORT))["message"]


def with_finish(
    server: InThread, monkeypatch: pytest.MonkeyPatch, reason: str, after: int = 0
) -> None:
    """Let requests end for that reason after so many outputs."""
    step, count = server.engine._engine.step, 0

    def changed() -> list[RequestOutput]:
        nonlocal count
        outputs: list[RequestOutput] = step()
        for output in outputs:
            count += 1
            if count > after:
                output.outputs[0].finish_reason, output.finished = reason, True
                output.outputs[0].text = ""
        return outputs

    monkeypatch.setattr(server.engine._engine, "step", changed)


@pytest.mark.parametrize(
    ("reason", "status"), [("deadline", 504), ("queue_timeout", 504), ("error", 500)]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_end_without_an_answer(
    shared_toy: Path,
    monkeypatch: pytest.MonkeyPatch,
    reason: str,
    status: int,
    path: str,
    stream: bool,
) -> None:
    with in_thread(shared_toy) as server:
        with_finish(server, monkeypatch, reason)
        messages = [{"role": "user", "content": "a"}]
        body = {"messages": messages} if "chat" in path else {"prompt": "a"}
        answer = post(server, {**body, "max_tokens": 1, "stream": stream}, path)
        assert answer.status_code == status
        assert error_of(answer)["code"] == reason


def test_an_end_in_the_middle_of_a_stream(
    shared_toy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with in_thread(shared_toy) as server:
        with_finish(server, monkeypatch, "deadline", after=100)
        with caplog.at_level(logging.ERROR):
            answer = post(server, {**LONG, "temperature": 0, "stream": True})
        assert not caplog.records
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert answer.status_code == 200
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "deadline"
        shown = "".join(json.loads(each)["choices"][0]["text"] for each in events[:-2])
        params = SamplingParams(max_tokens=101, ignore_eos=True, temperature=0.0)
        [expected] = LLM(shared_toy).generate("a", params)
        assert expected.outputs[0].text.startswith(shown)
        assert len(shown) > 50


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_step_that_fails(shared_toy: Path, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    with in_thread(shared_toy) as server:

        def fails(*_: Any) -> None:
            raise EngineError("out of luck")

        with monkeypatch.context() as patch:
            patch.setattr(server.engine._engine.executor, "launch", fails)
            answer = post(server, {**SHORT, "stream": stream})
        assert answer.status_code == 500
        assert "out of luck" in error_of(answer)["message"]
        assert post(server, SHORT).status_code == 200


def test_what_nobody_expected(
    shared_toy: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), in_thread(shared_toy) as server:

        async def fails(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError("a fault of ours")

        monkeypatch.setattr(server.engine, "add_request", fails)
        answer = post(server, SHORT, **{"X-Request-Id": "mine-2"})
        assert answer.status_code == 500
        assert error_of(answer)["message"] == "internal error; the server's log says more"
        assert answer.headers["x-request-id"] == "mine-2"
        with server.http() as client:
            counts = client.get("/metrics").text
    assert 'octavo:http_answers_total{path="/v1/completions",status="500"} 1.0' in counts
    [line] = [json.loads(r.getMessage()) for r in caplog.records if "mine-2" in r.getMessage()]
    assert line["status"] == 500
    [told] = [record for record in caplog.records if record.exc_info is not None]
    assert told.getMessage() == "POST /v1/completions failed"


def test_what_is_not_json(toy_server: InThread) -> None:
    with toy_server.http() as client:
        kind = {"Content-Type": "application/json"}
        answer = client.post("/v1/completions", content=b"{", headers=kind)
        assert answer.status_code == 400
        assert error_of(answer)["message"].startswith("We could not parse the JSON body")
        answer = client.post("/v1/completions", content=b'{"prompt": "a"}')
        assert answer.status_code == 400
        assert "Content-Type: application/json" in error_of(answer)["message"]
        assert client.post("/v1/completions", json={}).json()["error"]["param"] == "prompt"
        assert error_of(client.get("/nope"))["message"] == "Not Found"
        assert client.get("/v1/completions").status_code == 405


def test_cors_is_off_unless_asked(shared_toy: Path, toy_server: InThread) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with toy_server.http() as client:
        assert "access-control-allow-origin" not in client.get("/health", headers=asked).headers
    keys = {"cors_origins": ("https://a.example",), "api_keys": ("k",)}
    with in_thread(shared_toy, **keys) as server, server.http() as client:
        answer = client.options("/v1/completions", headers=asked)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        other = client.get("/health", headers={"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("with_prompts", [False, True])
def test_the_access_log(
    shared_toy: Path, with_prompts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "octavo.access"),
        in_thread(shared_toy, logs_prompts=with_prompts) as server,
    ):
        answer = post(server, {**SHORT, "prompt": "secret"}, **{"X-Request-Id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        odd = post(server, SHORT, **{"X-Request-Id": "a b"})
        assert odd.headers["x-request-id"] not in ("a b", "mine-1")
        wait_until(lambda: len(caplog.records) >= 2)
    line = json.loads(caplog.records[0].getMessage())
    assert (line["request_id"], line["path"], line["status"]) == ("mine-1", "/v1/completions", 200)
    assert (line["prompt_tokens"], line["completion_tokens"]) == (7, 2)
    assert ("secret" in caplog.text) == with_prompts


def test_tokenize_and_back(toy_server: InThread) -> None:
    text = "Grüße, 世界"
    with toy_server.http() as client:
        tokenizer = toy_server.engine.get_tokenizer()
        found = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert found["tokens"] == tokenizer.encode(text)
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert found["max_model_len"] == toy_server.engine.max_model_len
        bare = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
        assert bare["tokens"] == found["tokens"][1:]
        back = client.post("/detokenize", json={"tokens": bare["tokens"]}).json()
        assert back == {"prompt": text}
        messages = [{"role": "user", "content": "Hi"}]
        chat = client.post("/tokenize", json={"messages": messages}).json()
        assert chat["tokens"] == tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        for bad in ([-1], [260], [2**63]):
            answer = client.post("/detokenize", json={"tokens": bad})
            assert answer.status_code == 400
            assert f"token id {bad[0]}" in error_of(answer)["message"]
        assert client.post("/tokenize", json={}).status_code == 400


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_template_of_a_client_is_not_run(toy_server: InThread, stream: bool) -> None:
    own = "{{ 1 }}"
    bodies = {
        "/v1/chat/completions": {**CHAT, "chat_template": own, "stream": stream},
        "/tokenize": {"messages": CHAT["messages"], "chat_template": own},
    }
    for path, body in bodies.items():
        answer = post(toy_server, body, path)
        assert answer.status_code == 400
        assert "--trust-request-chat-template" in error_of(answer)["message"]
        assert error_of(answer)["param"] == "chat_template"
    named = post(toy_server, {**CHAT, "chat_template": "default"}, "/v1/chat/completions")
    assert named.status_code == 200


def test_a_template_of_a_trusted_client(shared_toy: Path) -> None:
    with in_thread(shared_toy, trusts_chat_templates=True) as server:
        answer = post(server, {**CHAT, "chat_template": "abc"}, "/v1/chat/completions")
        tokens = post(
            server, {"messages": CHAT["messages"], "chat_template": "abc"}, "/tokenize"
        ).json()["tokens"]
        assert tokens == server.engine.get_tokenizer().encode("abc", add_special_tokens=False)
    assert answer.json()["usage"]["prompt_tokens"] == len(tokens)


def test_a_model_without_a_tokenizer_answers_ids(
    shared_toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "from_artifact", lambda _: None)
    with in_thread(shared_toy) as server:
        answer = post(server, {"prompt": [97, 98], "max_tokens": 3, "ignore_eos": True})
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 3
        for body, path in ((SHORT, "/v1/completions"), (CHAT, "/v1/chat/completions")):
            refused = post(server, body, path)
            assert refused.status_code == 400
            assert "came without a tokenizer" in error_of(refused)["message"]


def test_special_tokens_are_added_unless_told_not_to(toy_server: InThread) -> None:
    for adds, count in ((None, 3), (True, 3), (False, 2)):
        answer = post(toy_server, {"prompt": "ab", "max_tokens": 1, "add_special_tokens": adds})
        assert answer.json()["usage"]["prompt_tokens"] == count


def test_the_version(shared_toy: Path) -> None:
    with in_thread(shared_toy, version="1.2.3") as server, server.http() as client:
        assert client.get("/version").json() == {"version": "1.2.3"}


def test_the_page_loads_nothing_from_elsewhere(toy_server: InThread) -> None:
    with toy_server.http() as client:
        answer = client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "//" not in answer.text.replace("// ", "")
    assert "src=" not in answer.text


@pytest.mark.parametrize("keys", [(), ("key-1", "key-2")], ids=["open", "keys"])
def test_whose_a_request_is(
    shared_toy: Path, keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key's, which gets no more by naming many users; without keys the user's it names."""
    options = {"scheduling_policy": "fair"}
    with in_thread(shared_toy, options, api_keys=keys) as server:
        clients = []
        add_request = server.engine._llm.engine.add_request

        def spy(*args: Any, **keywords: Any) -> None:
            clients.append(keywords["client"])
            add_request(*args, **keywords)

        monkeypatch.setattr(server.engine._llm.engine, "add_request", spy)
        for user in ({"user": "ann"}, {"user": "bob"}, {}):
            headers = {"Authorization": "Bearer key-2"} if keys else {}
            assert post(server, {**SHORT, **user}, **headers).status_code == 200
            chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **user}
            path = "/v1/chat/completions"
            assert post(server, chat, path, **headers).status_code == 200
    each = ["key-2"] * 3 if keys else ["ann", "bob", "127.0.0.1"]
    assert clients == [client for client in each for _ in range(2)]
