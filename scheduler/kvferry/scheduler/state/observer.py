"""Who is told of what the ledgers decide."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.scheduler.consumer.ledger import RemotePrompt
    from kvferry.scheduler.producer.lease import Lease


class Watcher:
    """Does nothing. Whoever wants to know overrides; no method raises, or waits."""

    def lease_opened(self, lease: Lease) -> None:
        """A request has a slot."""

    def lease_over(self, lease: Lease, how: str) -> None:
        """Its blocks are given back, or never were held; `how` as the counters of leases that are over have it."""

    def recomputed(self, prompt: RemotePrompt, reason: str) -> None:
        """A prompt that was offered is computed here; `reason` as `local_recomputes` has it."""
