"""The HTTP application of `serve`: one pinned model, by the request handlers of transformers, behind limits.

Requests are checked before a handler of transformers sees them: their host, size, key and form. What is wrong with a
request is said in one JSON line with a status from 400 to 499, as OpenAI's clients expect it.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import jinja2
import pydantic
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from transformers.cli.serving.utils import GenerateManager


logger = logging.getLogger(__name__)

# When the request that is being computed must be answered, in seconds of `time.monotonic`.
DEADLINE: contextvars.ContextVar[float] = contextvars.ContextVar("deadline", default=float("inf"))
# Seconds after the deadline in which the computation may report it by itself.
OVERTIME = 1.0
LATE = "the request took longer than `serve --request_timeout` allows"
# What a handler raises for a request that it cannot read.
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, jinja2.TemplateError)


@dataclass(frozen=True)
class Limits:
    """What the server accepts.

    Args:
        hosts: the names in the `Host` header of a request.
        max_request_bytes: the largest body of a request.
        request_timeout: seconds from the arrival of a request until its answer is complete.
        api_key: what a client sends as a Bearer token; None: nothing.
    """

    hosts: tuple[str, ...]
    max_request_bytes: int
    request_timeout: float
    api_key: str | None = None


class GenerationOptions(pydantic.BaseModel):
    """The options of a request on which all three endpoints agree; further fields are the handlers' own."""

    model: str | None = None
    stream: bool | None = None
    seed: int | None = None
    temperature: Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, pydantic.Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, pydantic.Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, pydantic.Field(ge=1)] | None = None
    max_output_tokens: Annotated[int, pydantic.Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    generation_config: pydantic.Json[dict[str, Any]] | None = None


class MessagePart(pydantic.BaseModel):
    """A part of a message: a text, or something that not every model reads."""

    type: str
    text: str | None = None


class Message(pydantic.BaseModel):
    """A message of a chat."""

    role: str
    content: str | list[MessagePart] | None = None


class Chat(GenerationOptions):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], pydantic.Field(min_length=1)]


class Completion(GenerationOptions):
    """The body of `/v1/completions`."""

    prompt: str


class Answer(GenerationOptions):
    """The body of `/v1/responses`."""

    input: str | Annotated[list[dict[str, Any]], pydantic.Field(min_length=1)]


class LimitedManager(GenerateManager):
    """Computes one request after the other, each in the context of its request, whose deadline ends it."""

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, for at least one token."""
        _require_tokens(inputs)
        return super().generate_streaming(model, processor, inputs, *args, **kwargs)

    async def generate_non_streaming(self, model: Any, processor: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, for at least one token."""
        _require_tokens(inputs)
        return await super().generate_non_streaming(model, processor, inputs, *args, **kwargs)

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As in transformers, in the context of the request that calls it."""
        return super().submit(_in_context(fn), *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future:
        """As in transformers; a request that gave up leaves a future that the thread can still complete."""
        return asyncio.shield(super().async_submit(_in_context(fn), *args, **kwargs))


def _require_tokens(inputs: Any) -> None:
    if inputs["input_ids"].shape[-1] == 0:
        raise ValueError("it holds no token; send a text that is not empty")


def _in_context(fn: Callable[..., Any]) -> Callable[..., Any]:
    context = contextvars.copy_context()

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return context.run(fn, *args, **kwargs)
        except (TypeError, LookupError, AttributeError) as error:  # a mistake of the model, not of the request
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    return run


def build_app(
    manager: Any, handlers: Mapping[str, Any], limits: Limits, *, state: Any, enable_cors: bool = False
) -> FastAPI:
    """The application that answers requests to the one model of `manager`.

    Args:
        manager: the ModelManager of transformers, which has loaded its `force_model`.
        handlers: transformers' handlers, by `chat`, `completion` and `response`.
        limits: what a request may be.
        state: the GenerationState of the handlers.
        enable_cors: whether pages of any web site may ask.
    """
    ((model_id, loaded),) = manager.loaded_models.items()
    _end_at_the_deadline(loaded.model)
    thread = LimitedManager()
    state.get_manager = lambda model_id, use_cb=False: thread
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for error in (
        RequestValidationError,
        pydantic.ValidationError,
        StarletteHTTPException,
        TimeoutError,
        *UNREADABLE,
        Exception,
    ):
        app.add_exception_handler(error, _explain)
    app.add_middleware(LimitMiddleware, limits=limits)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(limits.hosts), www_redirect=False)
    if enable_cors:
        app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    app.include_router(_routes(manager.force_model, model_id, loaded.processor, handlers, limits))

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def _routes(name: str, model_id: str, processor: Any, handlers: Mapping[str, Any], limits: Limits) -> APIRouter:
    """The paths that need the key: `/reset` and what loads another model are none of them."""
    router = APIRouter(dependencies=[Depends(_key_check(limits.api_key))])

    async def handle(kind: str, form: type[GenerationOptions], body: dict[str, Any]) -> Any:
        form.model_validate(body)
        if kind != "completion" and not _has_chat_template(processor):
            raise HTTPException(
                400,
                f"{name!r} is a base model: its tokenizer has no chat template, so it cannot read messages. "
                "Send a `prompt` to /v1/completions",
            )
        return await handlers[kind].handle_request(body, str(uuid.uuid4()))

    @router.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> Any:
        return await handle("chat", Chat, body)

    @router.post("/v1/completions")
    async def completion(body: dict[str, Any]) -> Any:
        return await handle("completion", Completion, body)

    @router.post("/v1/responses")
    async def response(body: dict[str, Any]) -> Any:
        return await handle("response", Answer, body)

    @router.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": started, "owned_by": "local"}]}

    @router.post("/load_model")  # `transformers chat` asks for its model before it begins
    def load_model(body: dict[str, Any]) -> Response:
        if body.get("model") not in (name, model_id):
            raise HTTPException(400, f"this server serves {name!r} and loads no other model")
        event = json.dumps({"status": "ready", "model": model_id, "cached": True})
        return Response(f"data: {event}\n\n", media_type="text/event-stream")

    started = int(time.time())
    return router


def _has_chat_template(processor: Any) -> bool:
    return any(getattr(part, "chat_template", None) for part in (processor, getattr(processor, "tokenizer", None)))


def _key_check(api_key: str | None) -> Callable[..., None]:
    bearer = Depends(HTTPBearer(auto_error=False))

    def check(given: HTTPAuthorizationCredentials | None = bearer) -> None:
        if api_key is None:
            return
        if given is None or not secrets.compare_digest(given.credentials.encode(), api_key.encode()):
            text = "this server needs its API key, as the header `Authorization: Bearer KEY`"
            raise HTTPException(401, text, headers={"WWW-Authenticate": "Bearer"})

    return check


def _end_at_the_deadline(model: Any) -> None:
    """Let every layer of the model raise TimeoutError once the request that is being computed is too late."""

    def check(*_: Any) -> None:
        if time.monotonic() > DEADLINE.get():
            raise TimeoutError("the request took too long")

    for module in model.modules():
        if hasattr(module, "linear_attention"):
            module.register_forward_pre_hook(check)


class LimitMiddleware:
    """Answers 413 to a body that is too large, before it is complete, and 504 to a request that takes too long."""

    def __init__(self, app: Any, limits: Limits) -> None:
        self.app, self.limits = app, limits

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on (ASGI)."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        length = dict(scope["headers"]).get(b"content-length", b"")
        size, is_started = 0, False

        async def counted() -> Any:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            self._check(size)
            return message

        async def watched(message: Any) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        token = DEADLINE.set(time.monotonic() + self.limits.request_timeout)
        try:
            async with asyncio.timeout(self.limits.request_timeout + OVERTIME):
                if length.isdigit():
                    self._check(int(length))
                await self.app(scope, counted, watched)
        except HTTPException as error:
            await _error(error.status_code, error.detail)(scope, receive, send)
        except TimeoutError:
            late = _error(504, f"{LATE} ({self.limits.request_timeout:g} s)")
            if not is_started:
                return await late(scope, receive, send)
            await send({"type": "http.response.body", "body": b"data: " + bytes(late.body) + b"\n\n"})
        finally:
            DEADLINE.reset(token)
        return None

    def _check(self, size: int) -> None:
        if size > (largest := self.limits.max_request_bytes):
            raise HTTPException(413, f"the request has more than {largest:,} bytes; `serve --max_request_mb` allows it")


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status, headers)


async def _explain(request: Request, error: Exception) -> JSONResponse:
    """What is wrong with a request, in the form of OpenAI's errors."""
    if isinstance(error, StarletteHTTPException):
        return _error(error.status_code, str(error.detail), error.headers)
    if isinstance(error, (RequestValidationError, pydantic.ValidationError)):
        return _error(400, "; ".join(f"{_place(found['loc'])}: {found['msg']}" for found in error.errors()[:5]))
    if isinstance(error, TimeoutError):
        return _error(504, LATE)
    if not isinstance(error, UNREADABLE):  # Starlette logs its traceback
        return _error(500, f"the server failed ({type(error).__name__}: {error})")
    logger.warning("%s was refused", request.url.path, exc_info=error)
    return _error(400, f"the request cannot be read ({type(error).__name__}: {error})")


def _place(location: tuple[Any, ...]) -> str:
    return ".".join(map(str, location)) or "body"
