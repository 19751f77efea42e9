"""What kvferry sends through vLLM's own channels between scheduler and workers. All of it is pickled by vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.protocol.orders import LeaseHold, StepOrders, decode_orders


@dataclass(frozen=True)
class FerryMetadata(KVConnectorMetadata):
    """One step's orders, encoded; empty when there are none."""

    frame: bytes = b""

    def orders(self) -> StepOrders | None:
        """The orders, or None."""
        return decode_orders(self.frame) if self.frame else None

    @property
    def holds(self) -> tuple[LeaseHold, ...]:
        """Requests whose blocks are held from this step on."""
        orders = self.orders()
        return orders.holds if orders is not None else ()


@dataclass(frozen=True)
class FerryHandshake(KVConnectorHandshakeMetadata):
    """One worker's description, encoded."""

    frame: bytes


@dataclass
class FerryWorkerMetadata(KVConnectorWorkerMetadata):
    """Requests whose blocks may still be written after their load failed, by worker; a worker that is not named has
    nothing new to say."""

    alive: dict[int, frozenset[str]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> FerryWorkerMetadata:
        if isinstance(other, FerryWorkerMetadata):
            self.alive.update(other.alive)
        return self
