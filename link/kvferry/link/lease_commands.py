"""A lease of another engine, and what the ledger has done with it over the side channel."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.params import RemotePrefill

LeaseKey = tuple[str, int, str]
"""Boot, slot and epoch: a lease among all leases of all engines."""


@dataclass(frozen=True, slots=True)
class RemoteLease:
    """A lease of another engine, and the address of its side channel."""

    host: str
    port: int
    boot: str
    name: LeaseName
    lease_s: float

    @classmethod
    def from_params(cls, source: RemotePrefill) -> RemoteLease:
        """The lease that params name."""
        ticket = source.kvferry
        return cls(
            host=source.remote_host,
            port=source.remote_port,
            boot=ticket.boot,
            name=LeaseName(slot=ticket.lease_slot, epoch=ticket.lease_epoch),
            lease_s=ticket.lease_s,
        )

    @property
    def key(self) -> LeaseKey:
        return (self.boot, self.name.slot, self.name.epoch)


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Renew this lease from now on.

    Attributes:
        at_once: renew it now, not after the first interval: until a turn is renewed, its producer knows of no reader
            and may evict it.
    """

    lease: RemoteLease
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class ForgetLease:
    """Stop renewing; the workers have notified the producer themselves."""

    lease: RemoteLease


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """Stop renewing and release the lease: this engine does not read under it any more."""

    lease: RemoteLease


LeaseCommand = RenewLease | ForgetLease | ReleaseLease
