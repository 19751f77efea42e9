"""Step metadata: the orders of the scheduler to every worker of its own engine in one step.

Orders: once a step that has any.

    scheduler                                                         every worker of its engine
    OrdersHead{version, boot, opens, loads, fails, cancels, marks} ─► step thread: opens leases before the step goes on
    StepOrders{version, boot, opens, holds, progress, completions,
               ends, loads, fails, cancels, prewarms} ──────────────► transfer thread: the rest, in this order

Prewarming: the handshake with a producer that a waiting request or the configuration names, before the first load.

    consumer's scheduler                 its workers                  producer's scheduler
    Hello{engine_id: ?, …} ─────────────────────────────────────────► only to `prewarm_peers`: which engine is there?
        ◄────────────────────────────────── EngineDescription{engine_id, boot, …}
    StepOrders{prewarms: [Prewarm{host, port, engine_id, boot, is_static}], …} ─►
                                         Hello{…} ──────────────────►
                                             ◄────── EngineDescription{…}, from which it plans; it reads one slot

A worker opens leases as soon as it has the orders. Every order for a lease names its epoch, so a slot that is reused
within one step ends up with its new lease.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, Literal

import msgspec

from kvferry.protocol.convert import decode
from kvferry.protocol.errors import InvalidMessage
from kvferry.protocol.ids import (
    Count,
    Hex128,
    HexEpoch,
    Port,
    Positive,
    SlotIndex,
    Text,
)
from kvferry.protocol.params import Blocks, RemotePrefill
from kvferry.protocol.slots import RowIndex

ORDERS_VERSION: Final = 1
_MAX_BYTES = 1 << 30


class LeaseEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Clear the slot; if the request was held and not yet reported, report it sent."""

    # Request ids have no bound here, as elsewhere on the wire: a client may choose one of any length, vLLM accepts it,
    # and orders that a worker refused would stop its engine.
    request_id: str
    slot: SlotIndex
    epoch: HexEpoch


class LeaseOpen(msgspec.Struct, frozen=True, kw_only=True):
    """Write `epoch | COMPUTING` into the slot.

    Attributes:
        row: of a lease that continues under a new epoch, since its request was preempted: its header gets `origin` and
            the new epoch before the slot does.
        origin: with a row, the first epoch of the lease.
    """

    slot: SlotIndex
    epoch: HexEpoch
    row: RowIndex | None = None
    # The row's header has the first epoch already, unless the `LeaseProgress` that writes it was not carried out yet.
    origin: HexEpoch | None = None


class LeaseHold(msgspec.Struct, frozen=True, kw_only=True):
    """The request's blocks are held: write `epoch | READY` when the device has written them.

    Attributes:
        blocks: per cache group its scheduler blocks, for workers that must copy them first; empty for the others.
    """

    request_id: str
    slot: SlotIndex
    epoch: HexEpoch
    blocks: Blocks = ()


class LeaseProgress(msgspec.Struct, frozen=True, kw_only=True):
    """This step computes more of a prompt that is read meanwhile.

    The worker writes the new blocks into the prompt's row now, and the tokens into its slot when the step has ended.

    Attributes:
        epoch: the present one; a worker whose slot has another epoch ignores the order.
        origin: the first epoch of the lease, which its consumers know.
        tokens: leading tokens that are complete when the step has ended.
        first_blocks: per cache group the position of the first of `blocks` in the request's table.
        blocks: per cache group the blocks that the row does not have yet.
    """

    slot: SlotIndex
    epoch: HexEpoch
    row: RowIndex
    origin: HexEpoch
    tokens: Positive
    first_blocks: tuple[Count, ...]
    blocks: Blocks


class LoadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Load tokens `[first_token, stop_token)` of a request into local blocks.

    Attributes:
        source: the params that locate them.
        local_blocks: per cache group the scheduler blocks of the request, from its first token on.
    """

    request_id: str
    source: RemotePrefill
    local_blocks: Blocks
    first_token: Count
    stop_token: Count


class Prewarm(msgspec.Struct, frozen=True, kw_only=True):
    """Connect to this producer, before a load from it is ordered.

    Attributes:
        is_static: the configuration names it, not a waiting request: keep the connection, and retry after failures.
    """

    host: Text
    port: Port
    engine_id: Text
    boot: Hex128
    is_static: bool = False

    @classmethod
    def from_params(cls, source: RemotePrefill) -> Prewarm:
        """The producer that params name."""
        return cls(
            host=source.remote_host,
            port=source.remote_port,
            engine_id=source.engine_id,
            boot=source.kvferry.boot,
        )


class StepOrders(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that changed since the last step.

    Attributes:
        holds: of requests whose blocks were written in earlier steps.
        progress: of prompts that this step computes a part of, the last part of completions included.
        completions: of requests whose prompt this step completes: their blocks are written when it has ended.
        ends: of leases that are over, also of some that this step holds.
        fails: requests to be reported as failed loads without a read: their prefill has failed.
        cancels: loads, of earlier steps or of this one, whose requests were aborted. A load that has not ended posts
            no more reads and is reported at once, as failed; one that has been reported is not reported again.
    """

    version: Literal[1] = ORDERS_VERSION
    boot: Hex128
    opens: tuple[LeaseOpen, ...] = ()
    holds: tuple[LeaseHold, ...] = ()
    progress: tuple[LeaseProgress, ...] = ()
    completions: tuple[LeaseHold, ...] = ()
    ends: tuple[LeaseEnd, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    fails: tuple[str, ...] = ()
    cancels: tuple[str, ...] = ()
    prewarms: tuple[Prewarm, ...] = ()

    @classmethod
    def join(
        cls,
        boot: str,
        leases: LeaseOrders,
        loads: LoadOrders,
        fails: tuple[str, ...] = (),
    ) -> StepOrders:
        """The orders of both ledgers, for every worker of the engine of this `boot`."""
        return cls(
            boot=boot,
            opens=tuple(leases.opens),
            holds=tuple(leases.holds),
            progress=tuple(leases.progress),
            completions=tuple(leases.completions),
            ends=tuple(leases.ends),
            loads=loads.loads,
            fails=fails,
            cancels=loads.cancels,
            prewarms=loads.prewarms,
        )

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        has_leases = (
            self.ends or self.opens or self.holds or self.progress or self.completions
        )
        has_loads = self.loads or self.fails or self.cancels or self.prewarms
        return bool(has_leases or has_loads)


# What no step has sent yet.


@dataclass(slots=True)
class LeaseOrders:
    """Lease orders that no step has sent yet."""

    opens: list[LeaseOpen] = field(default_factory=list)
    holds: list[LeaseHold] = field(default_factory=list)
    progress: list[LeaseProgress] = field(default_factory=list)
    completions: list[LeaseHold] = field(default_factory=list)
    ends: list[LeaseEnd] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(
            self.opens or self.holds or self.progress or self.completions or self.ends
        )

    def take(self) -> LeaseOrders:
        """All orders; this object is empty then."""
        # The object stays the same one: the ledger and its streams both add to it.
        taken = LeaseOrders(
            self.opens, self.holds, self.progress, self.completions, self.ends
        )
        self.opens = []
        self.holds = []
        self.progress = []
        self.completions = []
        self.ends = []
        return taken

    def withdraw(self, slot: int) -> bool:
        """Drop the orders that were not sent for the lease of a slot, which is over.

        Returns:
            True if an order for this lease was or will be sent; the caller must then send an end.
        """
        self.progress = [order for order in self.progress if order.slot != slot]
        opened_at = self._first_open_of(slot)
        if opened_at is None:
            return True
        # Orders before it stay: they are of an earlier lease of the slot, which the workers know and end.
        kept = self.opens[:opened_at]
        for order in self.opens[opened_at:]:
            if order.slot != slot:
                kept.append(order)
        self.opens = kept
        return False

    def _first_open_of(self, slot: int) -> int | None:
        """The position of the order that opens the present lease of a slot; None if it was sent already."""
        for position in reversed(range(len(self.opens))):
            order = self.opens[position]
            # Only the first open of a lease has no row: the others give a stream that restarted another epoch.
            if order.slot == slot and order.row is None:
                return position
        return None


@dataclass(frozen=True, slots=True)
class LoadOrders:
    """Orders of the consumer's ledger; the fields are those of `StepOrders`."""

    loads: tuple[LoadOrder, ...] = ()
    cancels: tuple[str, ...] = ()
    prewarms: tuple[Prewarm, ...] = ()


NO_LOADS = LoadOrders()
"""Of most steps."""


# What a worker needs before its step goes on.


class OrdersHead(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a step's orders that a worker needs before its step goes on.

    Attributes:
        opens: as in `StepOrders`.
        loads: ids of the requests to be loaded.
        fails, cancels: as in `StepOrders`.
        marks: whether there are `progress` or `completions`: the end of the step must be marked.
    """

    version: Literal[1] = ORDERS_VERSION
    boot: Hex128
    opens: tuple[LeaseOpen, ...] = ()
    # Ids only: the head's size must not grow with the blocks to be loaded, since the step waits while it is decoded.
    loads: tuple[str, ...] = ()
    fails: tuple[str, ...] = ()
    cancels: tuple[str, ...] = ()
    marks: bool = False


class FailureReason(str, enum.Enum):
    """Why a load failed: the label of the metric and the word in the log.

    `STAGING`: failed reads may still write into the staging pool, and leave this load no part of it. `ABORTED`: its
    request was aborted; that is no fault, and has a metric of its own. `WITHDRAWN`: this engine sleeps, or is about to.
    """

    HANDSHAKE = "handshake"
    REFUSED = "refused"
    MAC = "mac"
    PARAMS = "params"
    PLAN = "plan"
    FENCE = "fence"
    TRANSFER = "transfer"
    DEADLINE = "deadline"
    PREFILL = "prefill"
    ORDERS = "orders"
    STAGING = "staging"
    ABORTED = "aborted"
    WITHDRAWN = "withdrawn"


_decoder: msgspec.msgpack.Decoder[StepOrders] = msgspec.msgpack.Decoder(StepOrders)
_head_decoder: msgspec.msgpack.Decoder[OrdersHead] = msgspec.msgpack.Decoder(OrdersHead)
_encoder = msgspec.msgpack.Encoder()
_request_id_of = attrgetter("request_id")


def encode_orders(orders: StepOrders) -> bytes:
    """The orders as they are sent to the workers; encoded once for all of them."""
    return _encoder.encode(orders)


def decode_orders(frame: bytes) -> StepOrders:
    """Inverse of `encode_orders`.

    Raises:
        InvalidMessage: the frame is not the result of `encode_orders`.
    """
    return decode(frame, _decoder, _MAX_BYTES, InvalidMessage)


def encode_head(orders: StepOrders) -> bytes:
    """The head of the orders, as it is sent to the workers."""
    head = OrdersHead(
        version=orders.version,
        boot=orders.boot,
        opens=orders.opens,
        loads=tuple(map(_request_id_of, orders.loads)),
        fails=orders.fails,
        cancels=orders.cancels,
        marks=bool(orders.progress or orders.completions),
    )
    return _encoder.encode(head)


def decode_head(frame: bytes) -> OrdersHead:
    """Decode the result of `encode_head`.

    Raises:
        InvalidMessage: the frame is not the result of `encode_head`.
    """
    return decode(frame, _head_decoder, _MAX_BYTES, InvalidMessage)
