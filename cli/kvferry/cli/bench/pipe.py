"""A child's end of the pipe to its parent: JSON lines, which output of libraries cannot corrupt."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable

import msgspec

from kvferry.cli.bench.messages import Failed, FromChild, ToChild

_MOST_AT_ONCE = 1 << 16


class ParentGone(Exception):
    """The parent has closed the pipe."""


class Pipe:
    """Standard input and the original standard output; later output of `print` goes to standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._in = sys.stdin.fileno()
        self._unread = b""
        self._decoder: msgspec.json.Decoder[ToChild] = msgspec.json.Decoder(ToChild)

    def tell(self, message: FromChild) -> None:
        """Send one message."""
        try:
            self._out.write(msgspec.json.encode(message) + b"\n")
        except BrokenPipeError:
            raise ParentGone from None

    def take(self, timeout_s: float | None = None) -> ToChild | None:
        """The next message; None if none comes in time. Raises `ParentGone`."""
        while b"\n" not in self._unread:
            if not select.select([self._in], [], [], timeout_s)[0]:
                return None
            read = os.read(self._in, _MOST_AT_ONCE)
            if not read:
                raise ParentGone
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return self._decoder.decode(line)


def play(part: Callable[[Pipe], None]) -> int:
    """Run a child's part; an exception is sent as `Failed`, not printed as a traceback. Returns the exit status."""
    pipe = Pipe()
    try:
        part(pipe)
    except ParentGone:
        return 0
    except Exception as failure:  # noqa: BLE001 - the parent reports it
        named = f"{failure}" or type(failure).__name__
        pipe.tell(Failed(reason=named if hasattr(failure, "operation") else f"{type(failure).__name__}: {named}"))
        return 1
    return 0
