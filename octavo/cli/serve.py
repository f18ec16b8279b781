"""``octavo serve``: an OpenAI-compatible server."""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import octavo
from octavo.cli.artifact import require_artifact
from octavo.ir.errors import OctavoError

KEYS_VARIABLE = "OCTAVO_API_KEYS"
_NEEDED = ("fastapi", "prometheus_client", "uvicorn")


def serve(
    directory: Annotated[Path, typer.Argument(help="An artifact directory.", metavar="DIR")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="The model's name in requests; may be given several times. Default: DIR's."
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help=f"API keys, one a line; more are read from ${KEYS_VARIABLE}, by commas."),
    ] = None,
    artifact_id: Annotated[
        str | None, typer.Option(help="Refuse an artifact with another content id.")
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt and answer together, in tokens.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Most sequences a step.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Most tokens a step.")] = None,
    max_queued_requests: Annotated[
        int | None, typer.Option(help="Most requests that wait; one more gets 429.")
    ] = None,
    kv_cache_memory_bytes: Annotated[int | None, typer.Option(help="Size of the KV cache.")] = None,
    kv_offload_gb: Annotated[
        float | None, typer.Option(help="GiB of host memory for KV blocks that are evicted.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Share of the GPU's memory to use.")
    ] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens a KV block.")] = None,
    enable_prefix_caching: Annotated[
        bool | None, typer.Option(help="Share KV blocks of equal prompts. Default: yes.")
    ] = None,
    scheduling_policy: Annotated[
        str | None,
        typer.Option(help="fcfs, priority, edf, shortest or fair: who runs first. Default: fcfs."),
    ] = None,
    ageing_ms: Annotated[
        float | None, typer.Option(help="What waiting is worth: see docs/scheduling.md.")
    ] = None,
    check_invariants: Annotated[
        bool,
        typer.Option("--check-invariants", help="Check the books of KV blocks after each step."),
    ] = False,
    result_cache_size: Annotated[
        int | None,
        typer.Option(help="Answers to keep for equal requests, if greedy or seeded. Default: 0."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="For requests without one.")] = None,
    max_logprobs: Annotated[int | None, typer.Option(help="Most logprobs a token.")] = None,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="Capture no CUDA graphs.")
    ] = False,
    chat_template: Annotated[
        Path | None, typer.Option(help="A file with the chat template to use.")
    ] = None,
    trust_request_chat_template: Annotated[
        bool,
        typer.Option(
            "--trust-request-chat-template",
            help="Render chat templates of requests: only for clients that may stop the server.",
        ),
    ] = False,
    generation_config: Annotated[
        str | None, typer.Option(help="'auto', or 'vllm' for none of the model's defaults.")
    ] = None,
    tool_call_parser: Annotated[
        str | None,
        typer.Option(help="hermes, llama3_json or mistral. Default: by the chat template."),
    ] = None,
    max_request_bytes: Annotated[int, typer.Option(help="Largest body of a request.", min=1)] = 16
    * 2**20,
    requests_per_minute: Annotated[
        int | None, typer.Option(help="Most requests from a key, or an address.", min=1)
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="A web origin that may call; '*' for all.")
    ] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="PEM file.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file.")] = None,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds for requests to finish after SIGTERM.", min=0)
    ] = 60.0,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write prompts into the access log.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No access log.")] = False,
) -> None:
    """Serve a model over HTTP, with OpenAI's API.

    SIGTERM and Ctrl-C let the requests there are finish; a second one stops at once.
    """
    require_packages()
    require_artifact(directory)
    keys = read_keys(api_key_file)
    _log_to_stderr(quiet)

    from octavo.runtime.async_llm import AsyncLLM
    from octavo.runtime.server.app import ServerOptions, create_app
    from octavo.runtime.server.serve import ListenOptions, check_tls, run_server
    from octavo.runtime.server.tool_parsers import PARSERS

    listen = ListenOptions(host, port, tls_certificate, tls_key, drain_timeout)
    check_tls(listen)
    if tool_call_parser is not None and tool_call_parser not in PARSERS:
        known = ", ".join(PARSERS)
        raise OctavoError(f"--tool-call-parser must be one of {known}, got {tool_call_parser!r}")
    if not keys and not _is_loopback(host):
        logging.getLogger("octavo.server").warning(
            "anyone who reaches %s may use this server: it has no API keys; see --api-key-file",
            host,
        )
    keywords: dict[str, Any] = {
        "artifact_id": artifact_id,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_queued_requests": max_queued_requests,
        "kv_cache_memory_bytes": kv_cache_memory_bytes,
        "kv_offload_gb": kv_offload_gb,
        "gpu_memory_utilization": gpu_memory_utilization,
        "block_size": block_size,
        "enable_prefix_caching": enable_prefix_caching,
        "scheduling_policy": scheduling_policy,
        "ageing_ms": ageing_ms,
        "check_invariants": check_invariants or None,
        "result_cache_size": result_cache_size,
        "seed": seed,
        "max_logprobs": max_logprobs,
        "enforce_eager": enforce_eager or None,
        "chat_template": None if chat_template is None else chat_template.read_text("utf-8"),
        "generation_config": generation_config,
    }
    given = {name: value for name, value in keywords.items() if value is not None}
    engine = AsyncLLM(directory, **given)
    try:
        app = create_app(
            engine,
            ServerOptions(
                model_names=tuple(served_model_name or [directory.resolve().name]),
                api_keys=keys,
                cors_origins=tuple(cors_origin or ()),
                tool_parser=tool_call_parser,
                max_request_bytes=max_request_bytes,
                requests_per_minute=requests_per_minute,
                trusts_chat_templates=trust_request_chat_template,
                logs_prompts=log_prompts,
                version=octavo.__version__,
            ),
        )
        is_whole = run_server(app, engine, listen)
    finally:
        engine.shutdown()
    if not is_whole:
        raise typer.Exit(1)


def require_packages() -> None:
    """Refuse to start without the packages of the server, in one line."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise OctavoError(
            f"the server needs {', '.join(missing)}; install them with: pip install 'octavo[serve]'"
        )


def read_keys(path: Path | None) -> tuple[str, ...]:
    """API keys of the file, without blank lines and those that begin with #, and of the
    environment. Raises OctavoError for a file without any: it would let everyone in."""
    keys = [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",")]
    if path is not None:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
        from_file = [line for line in lines if line and not line.startswith("#")]
        if not from_file:
            raise OctavoError(f"{path}: holds no API key; write one a line")
        keys += from_file
    return tuple(dict.fromkeys(key for key in keys if key))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _log_to_stderr(quiet: bool) -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.getLogger("octavo").setLevel(logging.WARNING)
    access = logging.getLogger("octavo.access")
    access.setLevel(logging.WARNING if quiet else logging.INFO)
