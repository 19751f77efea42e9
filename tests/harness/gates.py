"""A fabric whose data reads can be held up: before, in the middle of, or after the moment in which they read.

    fabric.hold = lambda: Hold(gate.is_set)                # nothing is read before the gate is open
    fabric.hold = lambda: Hold(gate.is_set, at_once=0.5)   # half of the descriptors now, the rest when it is open
    fabric.hold = lambda: Hold(gate.is_set, at_once=1.0)   # reads at once, reports when it is open

The reads themselves are those of the fabric behind it, so of a real one what arrives is what the memory held then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from kvferry.plan.blocks import UnitPairs
from kvferry.plan.tokens import TokenMap
from kvferry.worker.fabric.port import (
    Fabric,
    Indices,
    LocalDescriptors,
    OpenHandles,
    RemoteDescriptors,
    Transfer,
    TransferState,
    TransferTelemetry,
)
from kvferry.worker.loads.load import DataReads
from kvferry.worker.loads.mapped_reads import MappedReads
from kvferry.worker.peers import mapped_route
from kvferry.worker.peers.mapped_route import MappedRoute
from tests.harness.fault_fabric import FaultFabric


@dataclass(frozen=True, eq=False)
class Hold:
    """How one read is held up.

    Attributes:
        is_open: asked until it says so, on the transfer thread.
        at_once: the share of the descriptors that are read at once.
    """

    is_open: Callable[[], bool]
    at_once: float = 0.0


class _Held(Transfer):
    """A read in two parts: `begun` is under way, `rest` is posted when the hold is over."""

    def __init__(
        self,
        hold: Hold,
        begun: list[Transfer],
        rest: Callable[[], Transfer] | None,
        peer: str,
    ) -> None:
        self.hold, self.begun, self.rest = hold, begun, rest
        self.peer = peer  # type: ignore[assignment]


@contextlib.contextmanager
def holding_copies() -> Iterator[None]:
    """Copies from mapped memory, of which the fabric knows nothing, are held up like the data reads of a fabric with a
    gate; each is unit by unit meanwhile, so that a share of them is at once."""
    read = DataReads.steps
    steps = MappedReads.steps
    launch_bytes = mapped_route.LAUNCH_BYTES
    gates: WeakKeyDictionary[MappedReads, GateFabric] = WeakKeyDictionary()

    def read_by_gate(data: DataReads, *what: Any) -> Any:
        if data.mapped is None:
            data.mapped = MappedReads(data.record)
        if isinstance(data.context.reader.fabric, GateFabric):
            gates[data.mapped] = data.context.reader.fabric
        return read(data, *what)

    def held_steps(
        reads: MappedReads,
        routes: Iterable[MappedRoute],
        units: Mapping[TokenMap, UnitPairs],
    ) -> Iterator[None]:
        mapped = list(routes)
        copying = steps(reads, mapped, units)
        gate = gates.get(reads)
        hold = gate.hold() if gate is not None and mapped else None
        if gate is not None and hold is not None:
            held = _Held(hold, [], None, "mapped")
            gate.waiting.add(held)
            for _ in range(round(sum(map(len, units.values())) * hold.at_once)):
                next(copying, None)
            while not hold.is_open():
                yield
            gate.waiting.discard(held)
        yield from copying

    mapped_route.LAUNCH_BYTES = 1
    DataReads.steps = read_by_gate  # type: ignore[method-assign, assignment]
    MappedReads.steps = held_steps  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DataReads.steps = read  # type: ignore[method-assign]
        mapped_route.LAUNCH_BYTES = launch_bytes
        MappedReads.steps = steps  # type: ignore[method-assign]


class GateFabric(FaultFabric):
    """A fabric whose data reads can be held up.

    Attributes:
        hold: asked for every read that is no slot read; None lets it pass.
        waiting: reads that are held up now.
    """

    def __init__(self, inner: Fabric) -> None:
        super().__init__(inner)
        self.hold: Callable[[], Hold | None] = lambda: None
        self.waiting: set[_Held] = set()
        self._held: set[_Held] = set()

    def held_by(self, hold: Hold) -> int:
        """Reads that `hold` holds up now; asked on any thread."""
        return sum(held.hold is hold for held in tuple(self.waiting))

    def post_read(
        self,
        local: LocalDescriptors,
        local_indices: Indices,
        remote: RemoteDescriptors,
        remote_indices: Indices,
    ) -> Transfer:
        hold = (
            None if self.is_slot_list(local) or not len(local_indices) else self.hold()
        )
        if hold is None:
            return super().post_read(local, local_indices, remote, remote_indices)
        cut = round(len(local_indices) * hold.at_once)
        begun, rest = [], None
        if cut:
            begun.append(
                super().post_read(
                    local, local_indices[:cut], remote, remote_indices[:cut]
                )
            )
        if cut < len(local_indices):
            late = (local, local_indices[cut:], remote, remote_indices[cut:])
            post = super().post_read
            rest = lambda: post(*late)  # noqa: E731 - a thunk for later
        held = _Held(hold, begun, rest, remote.peer)
        self.waiting.add(held)
        self._held.add(held)
        return held

    def poll(self, transfer: Transfer) -> TransferState:
        if not isinstance(transfer, _Held):
            return super().poll(transfer)
        states = [super(GateFabric, self).poll(part) for part in transfer.begun]
        if not transfer.hold.is_open():
            return TransferState.IN_FLIGHT
        self.waiting.discard(transfer)
        if transfer.rest is not None:
            rest, transfer.rest = transfer.rest, None
            transfer.begun.append(rest())
            return TransferState.IN_FLIGHT
        return (
            TransferState.DONE
            if all(x is TransferState.DONE for x in states)
            else TransferState.IN_FLIGHT
        )

    def telemetry(self, transfer: Transfer) -> TransferTelemetry | None:
        return None if isinstance(transfer, _Held) else super().telemetry(transfer)

    def release(self, handle: Transfer | LocalDescriptors | RemoteDescriptors) -> None:
        if not isinstance(handle, _Held):
            super().release(handle)
            return
        self.waiting.discard(handle)
        self._held.discard(handle)
        for part in handle.begun:
            super().release(part)

    def open_handles(self) -> OpenHandles:
        """A read in two parts is one."""
        inner = super().open_handles()
        return replace(
            inner,
            transfers=inner.transfers + sum(1 - len(one.begun) for one in self._held),
        )
