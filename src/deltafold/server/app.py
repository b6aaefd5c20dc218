"""The routes: parse -> call -> serialise. `create_app` makes the ASGI application over one engine.

Bodies are in protocol.py, generation in calls.py, errors in problems.py, what wraps all routes in middleware.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.security import HTTPBearer
from starlette.responses import Response

from deltafold import API_VERSION, Engine, OptionError, __version__
from deltafold.server import handlers, metrics, page, problems, protocol
from deltafold.server.calls import Call
from deltafold.server.middleware import AccessLog, BearerAuth, BodyLimit
from deltafold.server.shapes import ChatShape, CompletionShape
from deltafold.server.state import ServerState

DEFAULT_MAX_BODY_BYTES = 16 * 2**20
"""Largest body taken, in bytes, unless the server is told another limit."""

_EVENTS = {
    "text/event-stream": {
        "schema": {
            "type": "object",
            "description": "One server-sent event, if stream is true: a chunk, an error, or [DONE].",
            "properties": {"data": {"type": "string"}},
            "required": ["data"],
        }
    }
}
_FAILURES = {
    400: "A malformed body, a field that is missing or not supported, or a value that is refused.",
    401: "No valid key.",
    404: "No such model.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "The queue is full; Retry-After says when to come again.",
    500: "The request failed inside the engine.",
    503: "The engine is closed or shutting down.",
}


def _failures(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": protocol.ErrorResponse, "description": _FAILURES[status]} for status in statuses}


class _Application(FastAPI):
    """FastAPI whose document does not announce 422: every malformed body is a 400 here."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document


def create_app(
    engine: Engine,
    *,
    served_model_name: str | None = None,
    api_key: str | None = None,
    cors_origins: Sequence[str] = (),
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
) -> FastAPI:
    """The server's ASGI application; `app.state.server` is its `ServerState`.

    Args:
        engine: what answers; the caller closes it.
        served_model_name: what clients call the model; None takes `engine.model_name`.
        api_key: what clients must bring as a bearer key; None asks for none.
        cors_origins: origins whose pages may call from a browser; "*" is any.
        max_body_bytes: largest body taken, in bytes.

    Raises:
        OptionError: `api_key` or `served_model_name` is empty, or `max_body_bytes` is not positive.
    """
    for option, value in (("api_key", api_key), ("served_model_name", served_model_name)):
        if value == "":
            raise OptionError(f"{option} must not be empty, got ''")
    if max_body_bytes < 1:
        raise OptionError(f"max_body_bytes must be >= 1, got {max_body_bytes}")
    app = _Application(title="deltafold", version=__version__, docs_url=None, redoc_url=None)
    state = app.state.server = ServerState(engine, served_model_name or engine.model_name)
    handlers.install(app)
    locked = [Depends(HTTPBearer(auto_error=False))] if api_key is not None else []
    app.include_router(_open_routes(state))
    app.include_router(_model_routes(state), dependencies=locked)
    app.include_router(_generation_routes(state), dependencies=locked)
    app.include_router(_token_routes(state), dependencies=locked)
    app.include_router(page.routes())
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    if api_key is not None:
        open_paths = ("/health", "/version", "/openapi.json", *page.PATHS)
        app.add_middleware(BearerAuth, api_key=api_key, open_paths=open_paths)
    if cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(AccessLog, metrics=state.metrics)
    return app


def _open_routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    @router.get("/health", response_model=protocol.HealthResponse, responses=_failures(503))
    async def health() -> Any:
        """Whether requests are answered: 503 once the engine has died or the server is shutting down."""
        state.refuse_if_draining()
        if not state.engine.is_alive:
            return problems.Problem(503, "the engine is closed", "server_error", code="engine_closed").to_response()
        return {"status": "ok"}

    @router.get("/version", response_model=protocol.VersionResponse)
    async def version() -> Any:
        return {"version": __version__, "api_version": API_VERSION}

    return router


def _model_routes(state: ServerState) -> APIRouter:
    router = APIRouter()

    def card() -> dict[str, Any]:
        engine = state.engine
        return {
            "id": state.model_name,
            "object": "model",
            "created": state.created,
            "owned_by": "deltafold",
            "max_model_len": engine.max_model_len,
        }

    @router.get("/v1/models", response_model=protocol.ModelList, responses=_failures(401))
    async def models() -> Any:
        return {"object": "list", "data": [card()]}

    @router.get("/v1/models/{model:path}", response_model=protocol.ModelCard, responses=_failures(401, 404))
    async def model(model: str) -> Any:
        return card() if model == state.model_name else _no_such_model(state, model)

    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **_failures(401)},
    )
    async def prometheus() -> Response:
        """Counters and histograms in Prometheus' text format."""
        return Response(state.metrics.render(), headers={"Content-Type": metrics.CONTENT_TYPE})

    return router


def _no_such_model(state: ServerState, model: str) -> Response:
    return problems.model_not_found(model, state.model_name).to_response()


def _is_other_model(state: ServerState, model: str | None) -> bool:
    return model is not None and model != state.model_name


def _generation_routes(state: ServerState) -> APIRouter:
    router = APIRouter()
    failures = _failures(400, 401, 404, 413, 415, 429, 500, 503)
    answers: dict[int | str, dict[str, Any]] = {200: {"content": _EVENTS}, **failures}

    @router.post("/v1/completions", response_model=protocol.CompletionResponse, responses=answers)
    async def completions(body: protocol.CompletionRequest, request: Request) -> Any:
        if _is_other_model(state, body.model):
            return _no_such_model(state, str(body.model))
        params, prompts = body.sampling_params(), body.prompts()
        token_ids = [await state.token_ids(prompt) for prompt in prompts]
        echoes = [p if isinstance(p, str) else state.engine.decode(p) for p in prompts] if body.echo else None
        shape = CompletionShape(state.texts, n=params.n, echoes=echoes, is_scoring=body.is_scoring)
        call = Call(state, request, shape, token_ids, params)
        return call.stream(include_usage=body.wants_usage) if body.stream else await call.answer()

    @router.post("/v1/chat/completions", response_model=protocol.ChatResponse, responses=answers)
    async def chat_completions(body: protocol.ChatRequest, request: Request) -> Any:
        if _is_other_model(state, body.model):
            return _no_such_model(state, str(body.model))
        params = body.sampling_params()
        token_ids = await state.chat_token_ids(protocol.message_dicts(body.messages), add_generation_prompt=True)
        call = Call(state, request, ChatShape(state.texts), [token_ids], params)
        return call.stream(include_usage=body.wants_usage) if body.stream else await call.answer()

    return router


def _token_routes(state: ServerState) -> APIRouter:
    router = APIRouter()
    failures = _failures(400, 401, 404, 413, 415)

    @router.post("/tokenize", response_model=protocol.TokenizeResponse, responses=failures)
    async def tokenize(body: protocol.TokenizeRequest) -> Any:
        """Token ids of a text, or of a chat as `/v1/chat/completions` would see it."""
        if _is_other_model(state, body.model):
            return _no_such_model(state, str(body.model))
        if body.messages is not None:
            messages = protocol.message_dicts(body.messages)
            tokens = await state.chat_token_ids(messages, add_generation_prompt=body.add_generation_prompt)
        else:
            tokens = await state.token_ids(body.prompt or "")
        return {"tokens": tokens, "count": len(tokens), "max_model_len": state.engine.max_model_len}

    @router.post("/detokenize", response_model=protocol.DetokenizeResponse, responses=failures)
    async def detokenize(body: protocol.DetokenizeRequest) -> Any:
        """The text of token ids, control tokens by name."""
        if _is_other_model(state, body.model):
            return _no_such_model(state, str(body.model))
        return {"prompt": state.engine.decode(body.tokens, skip_special_tokens=False)}

    return router
