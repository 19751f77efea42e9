"""The interval at which a lease is renewed: both ends of it must mean the same time by "a heartbeat"."""

from __future__ import annotations

HEARTBEATS_PER_LEASE = 6
"""As in vLLM's own connector, whose operators know what a value of `kv_lease_duration` means."""


def heartbeat_s(lease_s: float) -> float:
    """The interval of renewals of a lease that lives for `lease_s` without them."""
    return lease_s / HEARTBEATS_PER_LEASE
