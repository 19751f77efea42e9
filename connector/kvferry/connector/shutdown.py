"""Hearing of the engine's end before vLLM tells: it calls a connector's `shutdown` only when all is over.

On SIGTERM an engine goes on stepping until no request is left, and a request whose blocks are held counts as one. So
unless somebody ends what nobody will come for, the engine steps until it is killed.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType


class ShutdownNotice:
    """Knows whether this process was asked to end.

    vLLM has set its handlers of SIGTERM and SIGINT before it makes a connector. They are called as before; nothing is
    done in the handler but to remember. Where nobody has set a handler (an engine within a program of somebody else),
    or on a thread that may not set one, nothing is changed and nothing is heard.
    """

    def __init__(self) -> None:
        self.was_given = False
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._listen(number)

    def _listen(self, number: signal.Signals) -> None:
        before = signal.getsignal(number)
        if not callable(before) or before is signal.default_int_handler:
            return

        def heard(given: int, frame: FrameType | None) -> None:
            self.was_given = True
            before(given, frame)

        signal.signal(number, heard)
