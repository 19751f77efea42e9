"""How an engine of a drill is started and what it tells of itself: shared by both ends."""

from __future__ import annotations

import msgspec

SOCKETS_S = 0.3
"""How long these engines keep unused sockets; outside of drills it is a minute."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    Attributes:
        blocks, cell_bytes: of the cache; see `tests.harness.caches`.
        environ: set before the fabric is made, e.g. `UCX_TLS`.
        axes: order of the cache's axes; consumers with another one than their producer stage what they read.
    """

    name: str
    port: int
    lease_s: float = 30.0
    handshake_timeout_s: float = 10.0
    load_timeout_s: float = 20.0
    failed_read_grace_s: float = 0.5
    axes: str = "bht"
    blocks: int = 64
    cell_bytes: int = 512
    environ: dict[str, str] = {}


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of everything an engine has in use. All but the last are 0 when nothing is under way.

    Attributes:
        leases, held: in the ledger, and in the worker's table.
        loads: in the ledger.
        running, quarantined, alive: loads in the transfer thread, failed ones that may still be written, and those
            that were reported to the scheduler.
        entries, waves, transfers, leased_blocks: entries for slot reads, staging waves, handles, cache blocks in use.
        peers, prepared: agents that the fabric knows and lists that are prepared.
        files, tasks: file descriptors and threads, those that only fetch descriptions apart.
        threads: names of kvferry's threads that live.
        broken: what the integrity checks say.
        counts: what its worker counted besides.
    """

    leases: int
    held: int
    loads: int
    running: int
    quarantined: int
    alive: int
    entries: int
    waves: int
    transfers: int
    leased_blocks: int
    peers: int
    prepared: int
    sockets: int
    files: int
    tasks: int
    threads: list[str]
    broken: list[str]
    counts: dict[str, int]

    @property
    def under_way(self) -> dict[str, int]:
        """The counts above 0 of everything that must be returned."""
        return {name: count for name in _IN_HAND if (count := getattr(self, name))}


_IN_HAND = (
    *("leases", "held", "loads", "running", "quarantined", "alive"),
    *("entries", "waves", "transfers", "leased_blocks", "sockets"),
)
