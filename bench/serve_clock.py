"""The moments at which a producer's answers are ready, which a router hides from its clients.

vLLM loads `AnswerClock` into the producer's server (`--middleware`). It writes the id and the time of each answer to a
file, which `Answers` reads. A router gives the same id to both engines, and the ids of vLLM's answers end with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

FILE_VARIABLE = "KVFERRY_BENCH_ANSWERS"
"""The environment variable that names the file."""

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class AnswerClock:
    """ASGI middleware that writes a line for every answer: the request's id, and the time (monotonic)."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._path = Path(os.environ[FILE_VARIABLE])

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Send
    ) -> None:
        """Handle one request."""
        request_id = dict(scope.get("headers", ())).get(b"x-request-id", b"").decode()

        async def send_and_write(message: Message) -> None:
            ready_s = time.monotonic()
            await send(message)
            if message["type"] == "http.response.start" and request_id:
                with self._path.open("a") as file:
                    file.write(f"{request_id} {ready_s}\n")

        await self._app(scope, receive, send_and_write)


class Answers:
    """Reads the times that one producer writes."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
        self._path = path

    def ready_s(self, answer_id: str) -> float | None:
        """The time (monotonic) at which the producer's part of an answer was ready; None if there is none.

        Args:
            answer_id: as the client got it: `cmpl-` and the request's id.
        """
        times = dict(line.split() for line in self._path.read_text().splitlines())
        found = times.get(answer_id.partition("-")[2])
        return float(found) if found is not None else None
