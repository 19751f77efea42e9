"""Messages over loopback TCP: a neighbour that takes none for hundreds of signs of life hangs no engine of its host."""

from __future__ import annotations

from bench.ucx import LOOPBACK_TCP, silent_peer

INTERVAL_S = 0.02
SIGNS = 600
"""A queue in shared memory has room for 256; through it the agent is never closed."""
PATIENCE_S = 60.0


def test_over_loopback_tcp_an_agent_closes_although_its_peer_takes_no_signs_of_life() -> None:
    *_, cores, seconds_to_close = silent_peer(
        LOOPBACK_TCP, "stopped", f"{INTERVAL_S * 1e3:g}ms", SIGNS * INTERVAL_S, PATIENCE_S
    )
    assert isinstance(cores, float)
    assert cores < 0.5, "the progress thread spins"
    assert seconds_to_close is not None, "closing the agent hangs"
