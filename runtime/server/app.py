"""The application: which path leads where, and what stands before it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.ir.errors import OctavoError
from octavo.runtime.async_llm import AsyncLLM
from octavo.runtime.errors import EngineDeadError, InvalidRequest
from octavo.runtime.server.api_errors import ApiError, ClientDisconnected
from octavo.runtime.server.chat import create_chat_completion, rendering, template_messages
from octavo.runtime.server.completions import create_completion
from octavo.runtime.server.context import ServerContext
from octavo.runtime.server.invalid_body import explain_invalid
from octavo.runtime.server.middleware import (
    AccessLog,
    Authentication,
    BodyLimit,
    RateLimit,
    error_response,
)
from octavo.runtime.server.page import page
from octavo.runtime.server.prometheus import HttpCounts, engine_registry
from octavo.runtime.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from octavo.runtime.server.tool_parsers import parser_for_template

CHAT_PATH = "/v1/chat/completions"
PATHS = (
    *("/v1/completions", CHAT_PATH, "/v1/models", "/tokenize", "/detokenize"),
    *("/", "/health", "/ready", "/version", "/metrics"),
)
DEFAULT_MAX_REQUEST_BYTES = 16 * 2**20


@dataclass(frozen=True)
class ServerOptions:
    """``tool_parser`` None means: by the model's chat template. ``api_keys`` empty: none needed.

    ``requests_per_minute`` holds for each API key, or each address where there are no keys.
    ``trusts_chat_templates`` renders templates that come in a request.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    tool_parser: str | None = None
    max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES
    requests_per_minute: int | None = None
    trusts_chat_templates: bool = False
    logs_prompts: bool = False
    version: str = ""


def create_app(engine: AsyncLLM, options: ServerOptions) -> FastAPI:
    """The ASGI application. Does not end the engine: who made it does."""
    context = ServerContext(
        engine,
        options.model_names,
        options.tool_parser or _parser(engine),
        options.trusts_chat_templates,
        uses_keys=bool(options.api_keys),
    )
    app = FastAPI(title="Octavo", version=options.version or "0", docs_url=None, redoc_url=None)
    app.state.context = context
    _add_openai(app, context)
    _add_tokenizer(app, context)
    _add_operation(app, context, options)
    _add_error_handlers(app, context)
    http = HttpCounts(frozenset(PATHS))
    registry = engine_registry(engine, options.model_names[0], http)

    index = page()

    @app.get("/")
    async def root() -> Response:
        return index

    @app.get("/metrics")
    def metrics() -> Response:  # in a thread: the event loop has better to do
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    # Each is wrapped around those before it: the access log sees all answers.
    if options.requests_per_minute is not None:
        uses_keys = bool(options.api_keys)
        app.add_middleware(RateLimit, per_minute=options.requests_per_minute, uses_keys=uses_keys)
    app.add_middleware(BodyLimit, max_bytes=options.max_request_bytes)
    if options.api_keys:
        app.add_middleware(Authentication, keys=options.api_keys)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(AccessLog, count=http.add, with_prompts=options.logs_prompts)
    return app


def _parser(engine: AsyncLLM) -> str | None:
    """The tool-call format of the model's own chat templates."""
    try:
        templates = engine.get_tokenizer().chat_templates
    except InvalidRequest:  # there is no tokenizer, hence no chat; token ids are answered
        return None
    template = engine.options.chat_template or ""
    known = [templates.get(template, template), *templates.values()]
    return next((found for each in known if (found := parser_for_template(each))), None)


def _add_openai(app: FastAPI, context: ServerContext) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await create_completion(context, body, request)

    @app.post(CHAT_PATH)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        return await create_chat_completion(context, body, request)

    @app.get("/v1/models")
    async def models() -> Response:
        data = [_model(context, name) for name in context.model_names]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return JSONResponse(_model(context, context.model_name(name)))


def _model(context: ServerContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.created,
        "owned_by": "octavo",
        "root": context.model_names[0],
        "parent": None,
        "max_model_len": context.engine.max_model_len,
        "artifact_id": context.engine.artifact.manifest.artifact_id,
    }


def _add_tokenizer(app: FastAPI, context: ServerContext) -> None:
    engine = context.engine

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        context.model_name(body.model)
        tokenizer = engine.get_tokenizer()
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give prompt or messages", param="prompt")
        if body.messages is not None:
            messages = template_messages(body.messages)
            prompt = await engine.prepare_chat(messages, **rendering(context, body))
            token_ids = list(prompt.token_ids)
        else:
            adds = body.add_special_tokens is not False
            token_ids = await engine.offload(tokenizer.encode, body.prompt, adds)
        found: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": engine.max_model_len,
            "tokens": token_ids,
        }
        if body.return_token_strs:
            found["token_strs"] = [tokenizer.convert_ids_to_tokens(each) for each in token_ids]
        return JSONResponse(found)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        context.model_name(body.model)
        vocab_size = engine.artifact.manifest.vocab_size
        for token_id in body.tokens:
            if not 0 <= token_id < vocab_size:
                message = f"token id {token_id} is not in the vocabulary of {vocab_size} tokens"
                raise ApiError(400, message, param="tokens")
        text = await engine.offload(engine.get_tokenizer().decode, body.tokens)
        return JSONResponse({"prompt": text})


def _add_operation(app: FastAPI, context: ServerContext, options: ServerOptions) -> None:
    engine = context.engine

    @app.get("/health")
    async def health() -> Response:
        """Whether the process is worth keeping."""
        try:
            await engine.check_health()
        except EngineDeadError as error:
            return JSONResponse({"status": "dead", "reason": str(error)}, status_code=503)
        return JSONResponse({"status": "alive"})

    @app.get("/ready")
    async def ready() -> Response:
        """Whether requests should be sent here."""
        if engine.is_ready:
            return JSONResponse({"status": "ready"})
        status = "draining" if engine.is_draining else "dead"
        return JSONResponse({"status": status}, status_code=503)

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": options.version})


Handler = Callable[[Request, Any], Awaitable[Response]]


def _add_error_handlers(app: FastAPI, context: ServerContext) -> None:
    async def explained(request: Request, error: Exception) -> Response:
        explained = context.explain(error)
        if explained.param == "prompt" and request.url.path == CHAT_PATH:
            explained.param = "messages"  # what the prompt was made of
        return error_response(explained)

    async def invalid(_: Request, error: RequestValidationError) -> Response:
        return error_response(explain_invalid(error.errors(), error.body))

    async def http(_: Request, error: HTTPException) -> Response:
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        return error_response(
            ApiError(error.status_code, str(error.detail), kind, headers=error.headers)
        )

    async def gone(_: Request, __: ClientDisconnected) -> Response:
        return Response(status_code=499)  # nobody reads it but the access log

    handlers: dict[type[Exception], Handler] = {
        ApiError: explained,
        OctavoError: explained,
        RequestValidationError: invalid,
        HTTPException: http,
        ClientDisconnected: gone,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
