"""kvferry's log lines in vLLM's log: same handlers, format and level, with the prefix `kvferry:`."""

from __future__ import annotations

import copy
import logging

from kvferry.protocol.visible import escape_logs, other_handlers


class _Forward(logging.Handler):
    """Passes records on to vLLM's handlers, with the prefix."""

    def emit(self, record: logging.LogRecord) -> None:
        marked = copy.copy(record)
        marked.msg = f"kvferry: {record.msg}"
        for handler in logging.getLogger("vllm").handlers:
            if marked.levelno >= handler.level:
                handler.handle(marked)


def join_vllm_log() -> None:
    """Send the logger `kvferry` to vLLM's handlers, unless it has handlers of its own. Idempotent."""
    escape_logs()
    ours, theirs = logging.getLogger("kvferry"), logging.getLogger("vllm")
    if other_handlers(ours) or not theirs.handlers:
        return
    ours.addHandler(_Forward())
    ours.setLevel(theirs.level)
    ours.propagate = False
