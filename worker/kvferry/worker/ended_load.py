"""A load that is over."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.protocol.orders import FailureReason
from kvferry.worker.load_account import LoadAccount
from kvferry.worker.load_figures import LoadFigures
from kvferry.worker.load_times import LoadTimes
from kvferry.worker.peer import PeerKey


@dataclass(slots=True)
class EndedLoad:
    """What the transfer thread tells of it.

    Attributes:
        request_id: of this engine.
        source: whom it was read from.
        reason: why it failed; None for a good one.
        figures: what a good one moved.
        account: of a good one, for metrics.
    """

    request_id: str
    source: PeerKey
    times: LoadTimes
    reason: FailureReason | None = None
    figures: LoadFigures | None = None
    account: LoadAccount | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.figures is not None:
            self.account = LoadAccount.of(self.figures, self.times)
