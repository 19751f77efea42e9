"""Which producers have a label of their own in the metrics that are told by producer.

Clients choose what params name, so nothing that was only named gets a label: a load is good when its producer has
been met and the seal of its params checked. And labels are never taken back, so there is a bound.
"""

from __future__ import annotations

import re

from kvferry.connector.metric_tables import OTHER_PEERS
from kvferry.worker.peers.peer import PeerKey

MAX_PEER_LABELS = 1024
"""The most that can be asked for; the front end makes no more, whatever workers tell."""
_LONGEST = 128
_UNCLEAN = re.compile(r"[^A-Za-z0-9.:_\-]")


class PeerLabels:
    """The first producers, by address: an engine that was restarted is the same one.

    Args:
        most: labels beside `other`.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[tuple[str, int], str] = {}

    def of(self, source: PeerKey, *, is_good: bool) -> str:
        """The label of a producer that a load from has ended, well or badly."""
        address = (source.host, source.port)
        known = self._known.get(address)
        if known is None and is_good and len(self._known) < self._most:
            known = self._known[address] = _UNCLEAN.sub("_", f"{source.host}:{source.port}"[-_LONGEST:])
        return OTHER_PEERS if known is None else known
