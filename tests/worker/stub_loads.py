"""Loads without a producer: the part of a load that the runner and its table of states use."""

from __future__ import annotations

from types import SimpleNamespace

from kvferry.worker.loads.results import LoadRecord, LoadStory
from kvferry.worker.loads.slot_watch import LoadSteps, Wait
from kvferry.worker.loads.state import Deadline, LoadState
from kvferry.worker.peers.peer import PeerKey


class StubLoad:
    """A load with these steps; without any it ends at once. Nothing of it is ever in flight."""

    def __init__(self, request_id: str, steps: LoadSteps | None = None) -> None:
        self.order = SimpleNamespace(request_id=request_id, local_blocks=())
        source = PeerKey("host", 1, "engine", "0" * 32)
        self.record = LoadRecord(request_id=request_id, source=source, ordered_s=0.0)
        self.story = LoadStory(self.record)
        self.deadline = Deadline(0.0, 0.0)
        self.resumed_steps: LoadSteps = (_ for _ in ()) if steps is None else steps
        self.state = LoadState.WAITING
        self.wait: Wait | None = None
        self.since_s = 0.0
        self.lacks_room = False
        self.is_connecting = False
        self.has_read_data = False

    def __str__(self) -> str:
        return f"req={self.order.request_id}"

    def progress(self) -> None:
        """None that it could report."""

    def settle(self) -> bool:
        return True
