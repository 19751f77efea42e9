"""An ASGI middleware for vLLM's API server that passes a header's value to the engine.

    KVFERRY_CORRELATION_HEADER=X-Correlation-Id vllm serve … \\
        --middleware kvferry.connector.tracing.correlation_middleware.CorrelationMiddleware

vLLM passes no header to its scheduler, but it does pass the body's `vllm_xargs`. So the value is inserted there, as the
body's first member. If the client sends `vllm_xargs` too, the client's count: of two equal keys, the later one wins.
The body is streamed: it is not parsed, and nothing but the space before it is held back.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kvferry.connector.tracing.correlation import CORRELATION_ARG, CorrelationSource
from kvferry.protocol.errors import InvalidCorrelation

logger = logging.getLogger(__name__)

PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"})
"""Paths where vLLM accepts `vllm_xargs`."""
MAX_SPACE = 4096
"""Bytes before a body's first member; a body that has more is not changed."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_SPACE = b" \t\r\n"


class CorrelationMiddleware:
    """Puts the value of a header into the bodies of requests.

    Raises:
        InvalidCorrelation: `source` is None and `KVFERRY_CORRELATION_HEADER` names no valid one.
    """

    def __init__(self, app: App, source: CorrelationSource | None = None) -> None:
        self._app = app
        self._source = source or CorrelationSource.from_environment()
        self._has_warned = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        value = self._value(scope) if _is_of_interest(scope) else None
        if value is None:
            await self._app(scope, receive, send)
            return
        first = await _beginning(receive)
        member = member_for(value, first.get("body", b""))
        if member:
            scope = {**scope, "headers": _with_longer_body(scope["headers"], len(member))}
            first = {**first, "body": first["body"].replace(b"{", b"{" + member, 1)}
        waiting = [first]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, replay, send)

    def _value(self, scope: Scope) -> str | None:
        try:
            return self._source.value(scope["headers"])
        except InvalidCorrelation as invalid:
            if not self._has_warned:
                logger.warning("%s; dropped; further ones are not logged", invalid)
            self._has_warned = True
            return None


def member_for(value: str, beginning: bytes) -> bytes:
    """The bytes to insert after the `{` of a JSON object that begins so; empty if it is no object or has no member.

    `value="a1"`, `beginning=b'{"prompt":'` → `b'"vllm_xargs":{"kvferry_correlation":"a1"},'`
    """
    opened = beginning.lstrip(_SPACE)
    if not opened.startswith(b"{") or not opened[1:].lstrip(_SPACE).startswith(b'"'):
        return b""
    return f'"vllm_xargs":{{"{CORRELATION_ARG}":"{value}"}},'.encode()


def _is_of_interest(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] != "POST":
        return False
    path: str = scope["path"]
    return path in PATHS or path.removeprefix(scope.get("root_path") or "") in PATHS  # --root-path: part of the path


async def _beginning(receive: Receive) -> Message:
    """The body's first chunks, joined, up to its first member."""
    message = await receive()
    while message["type"] == "http.request" and message.get("more_body"):
        body = message.get("body", b"")
        if len(body.lstrip(_SPACE + b"{")) or len(body) > MAX_SPACE:
            break
        following = await receive()
        if following["type"] != "http.request":
            return following
        message = {**following, "body": body + following.get("body", b"")}
    return message


def _with_longer_body(headers: list[tuple[bytes, bytes]], more: int) -> list[tuple[bytes, bytes]]:
    return [
        (name, str(int(value) + more).encode() if name == b"content-length" and value.isdigit() else value)
        for name, value in headers
    ]
