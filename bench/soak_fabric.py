"""NIXL with faults in front of it: a fault waits for the next call that it is about."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from kvferry.protocol.slots import Done, encode_notification
from kvferry.worker.fabric.errors import FabricError, PeerLost, TransferFailed
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.fabric.port import PeerAgent, Transfer, TransferState
from tests.harness.gates import GateFabric, Hold

ERRORS: tuple[Callable[[], Exception], ...] = (
    lambda: TransferFailed("soak", "as drawn"),
    lambda: FabricError("soak", "as drawn"),
    lambda: RuntimeError("nixlBackendError, as drawn"),
)
METHODS = (
    "post_read",
    "post_data_read",
    "poll",
    "telemetry",
    "notify",
    "take_notifications",
    "prepare_local",
    "prepare_remote",
    "add_peer",
)
"""Calls that may raise; by its contract the port's `release` and `remove_peer` do not."""


class SoakFabric(GateFabric):
    """NIXL with faults of the soak.

    Attributes:
        holds: for the next data reads, one each.
        done_faults: for the next notifications, one each: `lost`, `doubled` or `forged`.
    """

    def __init__(self, agent_name: str) -> None:
        super().__init__(NixlFabric(agent_name))
        self.holds: deque[Hold] = deque()
        self.done_faults: deque[str] = deque()
        self.hold = lambda: self.holds.popleft() if self.holds else None
        self._draw = random.Random(agent_name)

    def poll(self, transfer: Transfer) -> TransferState:
        """A read that is said to have failed has really ended, as the port promises: nothing of it lands later."""
        due = self.faults.pop("poll", None)
        state = super().poll(transfer)
        if due is not None and state is TransferState.IN_FLIGHT:
            self.faults["poll"] = due
        elif due is not None:
            raise due[0]()
        return state

    def notify(self, peer: PeerAgent, message: bytes) -> None:
        fault = self.done_faults.popleft() if self.done_faults else ""
        if fault == "lost":
            return
        if fault == "doubled":
            super().notify(peer, message)
        if fault == "forged":
            for forged in self._forgeries():
                super().notify(peer, forged)
        super().notify(peer, message)

    def lose_peer(self) -> None:
        """The next data read ends as if its peer had died."""
        self.fail("post_data_read", lambda: PeerLost("soak", "as drawn"))

    def _forgeries(self) -> list[bytes]:
        epoch = f"{self._draw.getrandbits(59) | 1:015x}"
        wrong = Done(
            slot=self._draw.randrange(64),
            epoch=epoch,
            consumer="0" * 32,
            worker=0,
            expected=1,
        )
        return [
            encode_notification(wrong),
            self._draw.randbytes(self._draw.randrange(200)),
            b"",
            b"\xff" * 65,
        ]
