"""A link over which one data read follows another, each of which takes its time."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvferry.worker.fabric.port import Transfer, TransferState
from tests.harness.fault_fabric import FaultFabric


class SlowLink:
    """Lets the data reads of a fabric end in the order in which they are polled first.

    Attributes:
        ended: reads that have ended.
        loses: whether a read, when it is first polled, never ends and keeps the link from no other.
    """

    def __init__(
        self,
        fabric: FaultFabric,
        read_s: float,
        loses: Callable[[Transfer], bool] = lambda _: False,
    ) -> None:
        self.ended = 0
        self.loses = loses
        self._read_s = read_s
        self._inner = fabric.inner.poll
        self._fabric = fabric
        self.ends_s: dict[Transfer, float] = {}
        self._free_s = 0.0
        fabric.inner.poll = self._poll  # type: ignore[method-assign]

    def _poll(self, transfer: Transfer) -> TransferState:
        if transfer not in self._fabric.open_reads:
            return self._inner(transfer)
        now_s = time.monotonic()
        if transfer not in self.ends_s:
            if self.loses(transfer):
                self.ends_s[transfer] = float("inf")
            else:
                self._free_s = max(self._free_s, now_s) + self._read_s
                self.ends_s[transfer] = self._free_s
        if now_s < self.ends_s[transfer]:
            return TransferState.IN_FLIGHT
        state = self._inner(transfer)
        self.ended += state is TransferState.DONE
        return state

    def mend(self) -> None:
        """Every read ends at once from now on."""
        self._read_s = 0.0
        self.ends_s = dict.fromkeys(self.ends_s, 0.0)
