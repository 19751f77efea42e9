"""What kvferry sends through vLLM's own channels between scheduler and workers. All of it is pickled by vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.protocol.geometry import Place
from kvferry.protocol.handshake import WorkerDescription, decode_worker, encode
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
    """Workers' descriptions, encoded.

    vLLM keeps one of these per pipeline stage and tensor-parallel rank, whichever replica of prefill context
    parallelism sent it: so each carries all of them.
    """

    frames: tuple[bytes, ...]

    @classmethod
    def of(cls, place: Place, workers: Iterable[WorkerDescription]) -> FerryHandshake:
        """What the worker at a place hands over: itself and its replicas, out of all workers of the engine."""
        return cls(tuple(encode(one) for one in workers if (one.place.pp, one.place.tp) == (place.pp, place.tp)))


def workers_of(handshakes: Iterable[object]) -> tuple[WorkerDescription, ...]:
    """The workers that described themselves, each once, in the order of `worker_index`.

    Raises:
        InvalidMessage: a description cannot be read.
    """
    frames = [frame for one in handshakes if isinstance(one, FerryHandshake) for frame in one.frames]
    by_place = {worker.place: worker for worker in map(decode_worker, frames)}
    places = sorted(by_place, key=lambda place: (place.pp, place.pcp, place.tp))
    return tuple(by_place[place] for place in places)


@dataclass
class FerryWorkerMetadata(KVConnectorWorkerMetadata):
    """Requests whose blocks may still be written after their load failed, by worker; a worker that is not named has
    nothing new to say."""

    alive: dict[int, frozenset[str]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> FerryWorkerMetadata:
        if isinstance(other, FerryWorkerMetadata):
            self.alive.update(other.alive)
        return self
