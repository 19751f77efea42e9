"""kvferry's log lines in vLLM's log: same handlers, same format, same level, and a word to search for."""

from __future__ import annotations

import copy
import logging


class _Forward(logging.Handler):
    """Passes records on to vLLM's handlers, marked as kvferry's."""

    def emit(self, record: logging.LogRecord) -> None:
        marked = copy.copy(record)
        marked.msg = f"kvferry: {record.msg}"
        for handler in logging.getLogger("vllm").handlers:
            if marked.levelno >= handler.level:
                handler.handle(marked)


def join_vllm_log() -> None:
    """Let the logger `kvferry` write where vLLM writes, unless somebody has configured it. Idempotent."""
    ours, theirs = logging.getLogger("kvferry"), logging.getLogger("vllm")
    if ours.handlers or not theirs.handlers:
        return
    ours.addHandler(_Forward())
    ours.setLevel(theirs.level)
    ours.propagate = False
