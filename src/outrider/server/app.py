"""ASGI application: HTTP routes and error handlers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from outrider import __version__
from outrider.options import shown
from outrider.server.config import KeyRing, ServerConfig
from outrider.server.gate import Gate, error_body, error_response
from outrider.server.service import Service, as_http_error
from outrider.types import OutriderError

if TYPE_CHECKING:
    from outrider.engine.llm import LLM

Handler = Callable[[Any, Request], Awaitable[Response]]


class Deferred(Response):
    """Response that is computed after FastAPI's own handler has returned, which holds a body's bytes and JSON until then."""

    def __init__(self, handler: Handler, given: Any, http: Request) -> None:
        super().__init__()
        self._handler, self._given, self._http = handler, given, http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for kept in ("_body", "_json"):  # by starlette as long as the answer takes
            vars(self._http).pop(kept, None)
        response = await self._handler(self._given, self._http)
        await response(scope, receive, send)


def _deferred(handler: Handler) -> Handler:
    @wraps(handler)
    async def defer(body: Any, http: Request) -> Response:
        return Deferred(handler, body, http)

    return defer


def create_app(llm: LLM, config: ServerConfig, keys: KeyRing, address: str = ServerConfig.host) -> FastAPI:
    """Return the ASGI application for a loaded ``LLM``, which it owns while it runs. ``address``: of the socket."""
    service = Service(llm, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()

    app = FastAPI(
        title="Outrider",
        version=__version__,
        redirect_slashes=False,  # behind a proxy the location would be wrong
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    handlers: dict[str, Handler] = {
        "/v1/chat/completions": service.chat,
        "/v1/responses": service.responses,
        "/v1/messages": service.messages,
        "/v1/messages/count_tokens": service.count_tokens,
        "/v1/completions": service.completions,
        "/tokenize": service.tokenize,
        "/detokenize": service.detokenize,
    }
    app.state.routes = f"POST {', '.join(handlers)}, or GET /v1/models"
    for path, handler in handlers.items():
        app.add_api_route(path, _deferred(handler), methods=["POST"], response_model=None)
    _add_states(app, service)
    for kind in (OutriderError, RequestValidationError, HTTPException, TimeoutError):
        app.add_exception_handler(kind, _on_error)
    app.add_middleware(Gate, config=config, keys=keys, address=address)
    return app


def _add_states(app: FastAPI, service: Service) -> None:
    """Add the routes that describe the server: models, health, readiness and metrics."""

    async def model(name: str) -> dict[str, Any]:
        """Describe the served model."""
        service.check_model(name)
        about = {"id": name, "object": "model", "created": 0, "owned_by": "outrider"}
        return about | {"max_model_len": service.llm.runner.max_len, "method": service.llm.proposer.name}

    async def models() -> dict[str, Any]:
        """List the served model."""
        return {"object": "list", "data": [await model(service.config.name)]}

    async def health() -> Response:
        """Report whether the engine thread is alive."""
        is_healthy = service.bridge.is_healthy
        return PlainTextResponse("ok" if is_healthy else "the engine thread has stopped", 200 if is_healthy else 500)

    async def ready() -> Response:
        """Report whether the server accepts requests."""
        why = service.unready()
        return PlainTextResponse("ready") if why is None else PlainTextResponse(f"not ready: {why}", 503)

    async def metrics() -> Response:
        """Return metrics in Prometheus's text format."""
        return Response(service.metrics.page(), media_type="text/plain; version=0.0.4")

    app.add_api_route("/v1/models", models)
    app.add_api_route("/v1/models/{name:path}", model)
    texts: dict[str, Callable[[], Awaitable[Any]]] = {"/health": health, "/ready": ready, "/metrics": metrics}
    for path, answer in texts.items():
        app.add_api_route(path, answer, response_class=PlainTextResponse)
    for path, answer in {"/v1/models": models, **texts}.items():  # not in the routes above: a route has one operation id
        app.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)


async def _on_error(request: Request, error: Exception) -> Response:
    status, body, headers = as_http_error(error)
    if isinstance(error, HTTPException) and status in (404, 405):  # the router's
        what = f"{request.method} {shown(request.url.path)} is not served: expected {request.app.state.routes}"
        body = error_body(what, "invalid_request_error", "unknown_url")
    if status in (429, 503):
        request.app.state.service.metrics.refused(status)
    return error_response(request.url.path, request.state.call, status, body, headers)
