"""The notifications of a producer worker's consumers."""

from __future__ import annotations

import logging
import time

from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.notifications import decode_notification
from kvferry.protocol.rate_limited_log import RateLimitedLog
from kvferry.worker.fabric.errors import internal_errors
from kvferry.worker.fabric.port import Fabric
from kvferry.worker.leases import LeaseTable
from kvferry.worker.loads.results import ResultBox

logger = logging.getLogger(__name__)

_AT_ONCE = 32
_RELEASED_S = 50e-6
"""Given to other threads after every `_AT_ONCE`, which take some 100 µs: anyone can send any number, and the step
thread would wait for 5 ms each time it needs the interpreter's lock."""


class Notifications:
    """Passes consumers' notifications from the fabric to the lease table. Used on the transfer thread.

    Any agent can send them, so the log of invalid ones is limited.
    """

    def __init__(self, fabric: Fabric, table: LeaseTable, results: ResultBox) -> None:
        self._fabric = fabric
        self._table = table
        self._results = results
        self._invalid = RateLimitedLog(logger)

    def take(self) -> bool:
        """Take the notifications that have arrived. Returns whether there were any.

        Raises:
            FabricError: the fabric failed.
        """
        arrived = self._fabric.take_notifications()
        for count, (sender, frame) in enumerate(arrived, 1):
            if count % _AT_ONCE == 0:
                time.sleep(_RELEASED_S)
            try:
                self._take_one(sender, frame)
            except Exception:  # noqa: BLE001 - shown, with its traceback
                internal_errors.log("one notification is lost; the others are processed")
        return bool(arrived)

    def _take_one(self, sender: str, frame: bytes) -> None:
        try:
            done = decode_notification(frame)
            finished = self._table.done(done)
        except InvalidMessage as invalid:
            self._invalid.warning("ignored a notification of %s: %s", sender, invalid)
            with self._results as results:
                results.counts["bad_notifications"] += 1
            return
        except KeyError:
            logger.debug("ignored a notification of %s: no such lease", sender)
            with self._results as results:
                results.counts["late_notifications"] += 1
            return
        logger.debug("slot=%d done by worker %d of %s", done.slot, done.worker, done.consumer)
        if finished is not None:
            with self._results as results:
                results.sent.add(finished)
