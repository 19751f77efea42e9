"""One record of a request: all that the engine's thread knows of it without vLLM, in one table; and its parts.

The ledgers, the open queries and the list of prompts for others each own one field of the record, and find a request
here and nowhere else. A record outlives its request: blocks are held when a prefill has ended, and an aborted load is
known until its workers have reported. It is dropped when nothing is left of it.

Two parts have states, with a table of their transitions that their ledger executes. The producer's is the lease, one
request's claim on a slot. Its blocks are freed when every worker has acknowledged its end:

               open                complete         end (expiry, release)           sent
    INTENDED ───────→ COMPUTING ───────────→ HELD ────────────────────→ ENDING ───────────→ (gone)
        │ abandon         │ abandon            │ sent
        ↓                 ↓                    ↓
      (gone)            (gone)               (gone)

The consumer's is the remote prompt. One that is LOADED, FAILED or DECLINED is never loaded again: after a preemption or
a failure its request is computed here:

      offer               load                loaded
    ───────→ OFFERED ───────────→ LOADING ─────────────→ LOADED ─┐
                │ decline            │ failed                    │
                ├──────→ DECLINED ─┐ ├───────→ FAILED ───────────┤ finish
                │ finish           │ │ finish                    ↓
                └───────→ (gone) ←─┘ └───────→ ABORTED ──────→ (gone)
                                                 loaded, failed
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvferry.link.commands import Producer, RemoteLease
from kvferry.protocol.digests import GrowingChain, Prompt
from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.orders import LeaseEnd, LeaseHold
from kvferry.protocol.params import Blocks, RemotePrefill
from kvferry.protocol.queries import (
    NO_PARAMS,
    Answer,
    PromptProgress,
    PromptQuery,
    encode_params,
)
from kvferry.protocol.transitions import TableEnum


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request, and what is left of an earlier one with its id.

    Attributes:
        is_unfinished: whether the engine has the request.
        lease: on its blocks; also after its end, while they are held. Owned by `ProducerLedger`.
        prompt: its prompt in another engine's cache; also after its end, while its load is aborted. Owned by
            `ConsumerLedger`.
        query: the open query about its prompt that it waits for. Owned by `PendingQueries`.
        search: which engines have the first part of its prompt, as long as it waits to hear. Owned by
            `PrefixSearches`.
        listed: its prompt, for other engines that query it. Owned by `PromptDirectory`.
    """

    request_id: str
    is_unfinished: bool = False
    lease: ProducerLease | None = None
    prompt: RemotePrompt | None = None
    query: PendingQuery | None = None
    search: PrefixSearch | None = None
    listed: ListedPrompt | None = None

    @property
    def waits_for_answer(self) -> bool:
        """True if the request waits for what another engine says."""
        return self.query is not None or self.search is not None


class RequestTable(dict[str, RequestRecord]):
    """The records of one engine, by request id, of requests that have ended too. Used on the engine's thread only."""

    def enter(self, request_id: str) -> RequestRecord:
        """The record of a request, a new one if nothing was known of it."""
        record = self.get(request_id)
        if record is None:
            record = RequestRecord(request_id)
            self[request_id] = record
        return record

    def drop_if_over(self, record: RequestRecord) -> None:
        """Forget a record of which nothing is left. Called whenever a field of it has been cleared."""
        is_over = (
            not record.is_unfinished
            and record.lease is None
            and record.prompt is None
            and record.query is None
            and record.search is None
            and record.listed is None
        )
        if is_over:
            self.pop(record.request_id, None)


# A lease on its blocks.


class LeaseState(TableEnum):
    """States of a lease."""

    INTENDED = "intended"
    """The request has arrived, and gets a slot when it is scheduled."""
    COMPUTING = "computing"
    """The request runs; the slot is COMPUTING in every worker's lease table."""
    HELD = "held"
    """Its blocks are complete, or will be when the next step ends, and are kept; the deadline counts once the request
    has ended, is preempted, or is kept by a pause."""
    ENDING = "ending"
    """Reads are not allowed any more; the workers clear their slots and report."""


KEEPS_BLOCKS = (LeaseState.HELD, LeaseState.ENDING)
"""States in which the lease has references on the request's blocks."""


class LeaseEvent(TableEnum):
    """Events of a lease."""

    OPEN = "open"
    COMPLETE = "complete"
    ABANDON = "abandon"
    END = "end"
    SENT = "sent"


# HELD → (gone) without an end: all workers of a consumer have said that they are done, and each worker here has cleared
# its slot by itself. Every other way out of HELD waits in ENDING for the workers: vLLM gives a block away in the step
# that frees it, and a reader that had seen READY would take the next request's bytes for the prompt's.
LEASE_TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], LeaseState | None] = {
    (LeaseState.INTENDED, LeaseEvent.OPEN): LeaseState.COMPUTING,
    (LeaseState.INTENDED, LeaseEvent.ABANDON): None,
    (LeaseState.COMPUTING, LeaseEvent.COMPLETE): LeaseState.HELD,
    (LeaseState.COMPUTING, LeaseEvent.ABANDON): None,
    (LeaseState.HELD, LeaseEvent.END): LeaseState.ENDING,
    (LeaseState.HELD, LeaseEvent.SENT): None,
    (LeaseState.ENDING, LeaseEvent.SENT): None,
}


class LeaseUse(TableEnum):
    """The use of a lease; the value is the prefix of the names of its counters."""

    PROMPT = "leases"
    """A prompt that was prefilled here, for the engine that decodes it: read soon, or never."""
    TURN = "turns"
    """A prompt and its answer decoded here, for the prefill of the conversation's next turn: at an unknown time."""
    PREFIX = "prefixes"
    """The first tokens of a prompt that are in the cache anyway, for an engine that has found them: read at once."""


@dataclass(slots=True, eq=False)
class PublishedStream:
    """The part of one lease's prompt that was published under its present epoch.

    Attributes:
        row: where the workers list its blocks.
        tokens: leading tokens that the workers have reported as complete, or will.
        blocks: per cache group the blocks in the row.
    """

    row: int
    tokens: int = 0
    blocks: tuple[Sequence[int], ...] = ()

    def goes_on_with(self, blocks: Sequence[Sequence[int]]) -> bool:
        """True if these blocks of the request, per cache group, begin with the published ones."""
        pairs = zip(self.blocks, blocks, strict=False)
        return all(now[: len(published)] == published for published, now in pairs)


_NO_SLOT = LeaseName(slot=-1, epoch="")


@dataclass(slots=True, eq=False)
class ProducerLease:
    """All that is known of one request's lease.

    Attributes:
        slot: in the lease table; -1 while INTENDED.
        name: its present name in messages and orders: the slot, and the epoch.
        origin: its first name, by which consumers know it as long as it lasts. `name` has another epoch if its stream
            restarted.
        is_running: whether its request has not ended.
        held_s: when it was held and the request had ended, on the ledger's clock; until then when it was held.
        deadline_s: on the same clock; infinite until the request has ended, is preempted, or is kept by a pause.
        claimed_until_s: on the same clock; until then a consumer waits for it, since it has renewed the lease.
        block_ids: the request's blocks, each once, on which the lease has a reference; () until HELD.
        acks: workers that have acknowledged its end.
        ended_by: why the lease ends (`release`, `expired`, …), set when that is decided.
        stream: of a prompt that is read, or was, while it is computed.
    """

    request_id: str
    use: LeaseUse = LeaseUse.PROMPT
    state: LeaseState = LeaseState.INTENDED
    slot: int = -1
    name: LeaseName = _NO_SLOT
    origin: LeaseName = _NO_SLOT
    is_running: bool = True
    held_s: float = 0.0
    deadline_s: float = math.inf
    claimed_until_s: float = 0.0
    block_ids: tuple[int, ...] = ()
    acks: set[int] = field(default_factory=set)
    ended_by: str = ""
    stream: PublishedStream | None = None

    def hold_order(self, blocks: Blocks) -> LeaseHold:
        """The order to the workers that its blocks are held; those that must copy them get them."""
        return LeaseHold(
            request_id=self.request_id,
            slot=self.slot,
            epoch=self.name.epoch,
            blocks=blocks,
        )

    def end_order(self) -> LeaseEnd:
        """The order to the workers to clear its slot."""
        return LeaseEnd(
            request_id=self.request_id, slot=self.slot, epoch=self.name.epoch
        )

    def __str__(self) -> str:
        return f"req={self.request_id} slot={self.slot}"


# Its prompt, for other engines that query it.


Claimant = tuple[str, int]
"""Engine id of a client, and the number of its query."""

Whole = tuple[int, str]
"""The length of a prompt, and the last of its digests."""


@dataclass(frozen=True, slots=True)
class PromptState:
    """How far a prompt is. Replaced as a whole, since two threads read it.

    Attributes:
        params: of the ticket, not encoded.
        lease: by which the prompt may be read, as long as that has not ended.
        cached_tokens: see `Answer`.
    """

    progress: PromptProgress
    params: object = None
    lease: ProducerLease | None = None
    reason: str = ""
    cached_tokens: int | None = None


QUEUED = PromptState(PromptProgress.QUEUED)


@dataclass(slots=True, eq=False)
class ListedPrompt:
    """One prompt.

    Attributes:
        state: set by the engine's thread, as `is_over` is.
        claimant: whose query it answers. Set after `spans` and `digests`, by the listener's thread.
        spans: of the claimant (`PromptQuery`).
        digests: of the whole prompt; () until a query is compared with them.
        is_known_over: whether the listener's thread knows that it is over.
        is_dropped: whether the listener's thread has forgotten it.
        encoded: the params of a state, as they are sent.
    """

    request_id: str
    key: str
    prompt: Prompt
    num_tokens: int
    state: PromptState = QUEUED
    is_over: bool = False
    claimant: Claimant | None = None
    spans: tuple[int, ...] = ()
    digests: tuple[str, ...] = ()
    is_known_over: bool = False
    is_dropped: bool = False
    encoded: tuple[PromptState, msgspec.Raw] | None = None

    @property
    def whole(self) -> Whole:
        """What a query must agree with. The prompt must have been digested."""
        return self.num_tokens, self.digests[-1]

    def answer(self, number: int) -> Answer:
        """The answer to the query of this number, by the present state."""
        # Read once: the engine's thread may replace it at any moment.
        state = self.state
        if state.lease is not None and state.lease.ended_by:
            reason = state.reason or "no_lease"
            return Answer(number=number, progress=PromptProgress.OVER, reason=reason)
        return Answer(
            number=number,
            progress=state.progress,
            params=self._params_of(state),
            reason=state.reason,
            cached_tokens=state.cached_tokens,
        )

    def _params_of(self, state: PromptState) -> msgspec.Raw:
        if state.params is None:
            return NO_PARAMS
        # Kept, since a query is answered again every time that it is repeated.
        if self.encoded is None or self.encoded[0] is not state:
            self.encoded = (state, encode_params(state.params))
        _, params = self.encoded
        return params


# Its prompt in another engine's cache.


class PromptKind(enum.Enum):
    """What is read of another engine."""

    HANDOVER = "handover"
    """A whole prompt, to be decoded here."""
    TURN = "turn"
    """The answer to the conversation's last turn, and its prompt; the rest is computed here."""
    PREFIX = "prefix"
    """The first part of a prompt, which that engine has for requests of its own; the rest is computed here."""


class RemotePromptState(TableEnum):
    """States of a remote prompt."""

    OFFERED = "offered"
    """The request waits; its blocks are held by the producer."""
    LOADING = "loading"
    """The workers read into blocks that are allocated for the request."""
    LOADED = "loaded"
    FAILED = "failed"
    DECLINED = "declined"
    """Nothing is loaded: the prompt was in the local cache, or is computed here."""
    ABORTED = "aborted"
    """The request is gone and its load cancelled: its blocks stay allocated until the workers have reported that."""


class RemotePromptEvent(TableEnum):
    """Events of a remote prompt."""

    LOAD = "load"
    DECLINE = "decline"
    LOADED = "loaded"
    FAILED = "failed"
    FINISH = "finish"


IN_FLIGHT = (RemotePromptState.LOADING, RemotePromptState.ABORTED)
"""States in which workers read."""
CLAIMING = (RemotePromptState.OFFERED, *IN_FLIGHT)
"""States in which a request has a claim on its lease."""
LOAD_OVER = (
    RemotePromptState.LOADED,
    RemotePromptState.FAILED,
    RemotePromptState.DECLINED,
)
"""States of a prompt that is never loaded again."""

# LOADING ends through the workers' report alone, also when the request is gone: until then a read may write into its
# blocks, and vLLM keeps them.
REMOTE_PROMPT_TRANSITIONS: dict[
    tuple[RemotePromptState, RemotePromptEvent], RemotePromptState | None
] = {
    (RemotePromptState.OFFERED, RemotePromptEvent.LOAD): RemotePromptState.LOADING,
    (RemotePromptState.OFFERED, RemotePromptEvent.DECLINE): RemotePromptState.DECLINED,
    (RemotePromptState.OFFERED, RemotePromptEvent.FINISH): None,
    (RemotePromptState.LOADING, RemotePromptEvent.LOADED): RemotePromptState.LOADED,
    (RemotePromptState.LOADING, RemotePromptEvent.FAILED): RemotePromptState.FAILED,
    (RemotePromptState.LOADING, RemotePromptEvent.FINISH): RemotePromptState.ABORTED,
    (RemotePromptState.ABORTED, RemotePromptEvent.LOADED): None,
    (RemotePromptState.ABORTED, RemotePromptEvent.FAILED): None,
    **{(state, RemotePromptEvent.FINISH): None for state in LOAD_OVER},
}


@dataclass(slots=True)
class RemotePrompt:
    """One request whose prompt, or the beginning of it, is in the cache of another engine.

    Attributes:
        source: the params that name it.
        offered_s: when it arrived, on a monotonic clock.
        min_tokens: fewer missing tokens are computed instead.
        shared_tokens: leading tokens of this prompt that the producer's blocks certainly hold.
        local_tokens: the local prefix hit: of the last call of `matched_tokens`, then of the admission.
        loading_tokens: those that were ordered to be loaded.
        ordered_s: when, on a monotonic clock; 0 before that.
    """

    request_id: str
    source: RemotePrefill
    lease: RemoteLease
    shared_tokens: int
    offered_s: float
    kind: PromptKind = PromptKind.HANDOVER
    min_tokens: int = 0
    state: RemotePromptState = RemotePromptState.OFFERED
    local_tokens: int = 0
    loading_tokens: int = 0
    ordered_s: float = 0.0

    def __str__(self) -> str:
        return f"req={self.request_id}"


# What it waits to hear from other engines.


@dataclass(slots=True, eq=False)
class PendingQuery:
    """One query that has no ticket yet.

    Attributes:
        host: of the producer that the request names, in one spelling.
        waits: whether its request waits for the answer; False when it has ended.
        unknown_why: what a producer has said that does not know of it, as a label of metrics.
        known_by: the producer that was the last to say that it has the prompt in its queue; None once it does not.
        is_crowded_out: it was given up for the query of another host.
    """

    request_id: str
    host: str
    query: PromptQuery
    waits: bool = True
    unknown_why: str = ""
    known_by: Producer | None = None
    is_crowded_out: bool = False


@dataclass(slots=True, eq=False)
class PrefixSearch:
    """A request waits until engines have said what they have of its prompt, or its time is over.

    Attributes:
        number: of the query, the same for all engines that are asked.
        chain: the digests of the prompt. The side channel's thread makes them; the step thread reads them once there is
            a ticket.
        most_tokens: what the query covers: the whole chunks of the prompt.
        min_tokens: a shorter prefix is not worth a load.
        begun_s: when it began, on a monotonic clock.
        until_s: when the request stops waiting.
        unanswered: the engines that have not said what they have.
        queued: those of them that have something, and will have a ticket.
        best: the ticket with the most tokens so far.
        best_from: the engine that sent it.
        reason: why there is no ticket, as a label of metrics.
    """

    request_id: str
    number: int
    chain: GrowingChain
    most_tokens: int
    min_tokens: int
    begun_s: float
    until_s: float
    unanswered: set[Producer]
    queued: set[Producer]
    best: RemotePrefill | None = None
    best_from: Producer | None = None
    reason: str = "no_answer"
