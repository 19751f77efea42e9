"""The events that the processes of nodes have recorded in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvferry.trace.events import AnyEvent, Part, ProcessStarted

_DECODER = msgspec.json.Decoder(AnyEvent)


def events_of(folder: Path, node: Any, part: Part = Part.SCHEDULER) -> list[Any]:
    """The events of a node that is closed, in the order of its files; all places of its workers together."""
    engine_id = node.engine.config.kv_transfer_config.engine_id
    found: list[Any] = []
    for path in sorted(folder.iterdir()):
        started, *events = (_DECODER.decode(line) for line in path.read_bytes().splitlines())
        assert isinstance(started, ProcessStarted)
        if (started.engine_id, started.part) == (engine_id, part):
            found += events
    return found


def events_about(events: list[Any], request: str) -> list[str]:
    """A request's events in short: `LoadReported good=True`, without times and leases."""
    return [_short(event) for event in events if event.request == request]


def _short(event: Any) -> str:
    shown = ("tokens", "how", "reason", "first_token", "stop_token", "good")
    reported = [f" {name}={getattr(event, name)}" for name in shown if getattr(event, name, "") != ""]
    return type(event).__name__ + "".join(reported)
