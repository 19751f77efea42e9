"""The consumer's ledger: requests that wait for blocks of a producer, and their leases there. No I/O, no clock.

It remembers leases that have ended (`EndedLeases`), has the workers shake hands with producers before the first load
from them is ordered (`PrewarmQueue`), and pins blocks of failed loads that a worker may still write
(`QuarantinedBlocks`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from kvferry.link.commands import (
    ForgetLease,
    LeaseCommand,
    LeaseKey,
    ReleaseLease,
    RemoteLease,
    RenewLease,
)
from kvferry.link.counters import Counters
from kvferry.link.limits import has_share
from kvferry.protocol.errors import LocalProtocolError
from kvferry.protocol.hosts import one_spelling
from kvferry.protocol.orders import NO_LOADS, LoadOrder, LoadOrders, Prewarm
from kvferry.protocol.params import RemotePrefill
from kvferry.protocol.transitions import cannot_happen
from kvferry.scheduler.block_pool import BlockPool
from kvferry.scheduler.requests import (
    CLAIMING,
    IN_FLIGHT,
    LOAD_OVER,
    REMOTE_PROMPT_TRANSITIONS,
    PromptKind,
    RemotePrompt,
    RemotePromptEvent,
    RemotePromptState,
    RequestTable,
)

_LOADS_OF_KIND = {PromptKind.TURN: "turn_loads", PromptKind.PREFIX: "prefix_loads"}

MAX_ENDED_LEASES = 1 << 16
"""Most leases remembered: at most 26 MB. A replay of an older one is tried, and fails at the producer's fence."""


class LoadObserver:
    """What a `ConsumerLedger` reports to. Its methods must neither raise nor wait."""

    def recomputed(self, prompt: RemotePrompt, reason: str) -> None:
        """An offered prompt is computed here; `reason` is the label of `local_recomputes`."""


class ConsumerLedger:
    """All remote prompts of one engine.

    Args:
        counters: counts `loads`, those of turns and of prefixes also as `turn_loads` and `prefix_loads`, by reason
            `local_recomputes` and, for prefixes, `prefixes_not_pulled`, and `failed_requests`.
        recompute_threshold: fewer tokens of a turn than this are computed instead of loaded.
        pool: the engine's block pool, see `QuarantinedBlocks`.
        recomputes: whether vLLM computes the prompt of a failed load; otherwise the request fails.
        requests: this engine's; the producer's ledger has the same.
        max_ended: leases that are remembered after their end, see `EndedLeases`.

    Attributes:
        claims: the leases of all prompts in a state of `CLAIMING`, so that a second request with the same params is
            known. The prompts that are not in flight wait until their loads are decided.
        in_flight: loads that were ordered and have not ended.
        loading: those of them whose requests have not ended either.
        prewarms: producers for the workers to prewarm before a load is ordered.
        quarantine: blocks of failed loads that may still be written.
        observer: called for offered prompts that are computed here; None at first.
    """

    def __init__(
        self,
        counters: Counters,
        recompute_threshold: int = 0,
        *,
        pool: BlockPool | None = None,
        recomputes: bool = False,
        requests: RequestTable | None = None,
        max_ended: int = MAX_ENDED_LEASES,
    ) -> None:
        if requests is None:
            requests = RequestTable()
        self._requests = requests
        self._counters = counters
        self.recompute_threshold = recompute_threshold
        self._recomputes = recomputes
        self.claims: set[LeaseKey] = set()
        self._ended = EndedLeases(max_ended)
        self.prewarms = PrewarmQueue()
        self._orders: list[LoadOrder] = []
        self._cancels: list[str] = []
        self._commands: list[LeaseCommand] = []
        self.in_flight = 0
        self.loading = 0
        self.quarantine = QuarantinedBlocks(pool)
        self.observer: LoadObserver | None = None

    def __len__(self) -> int:
        """The number of requests that are not over."""
        return sum(1 for _ in self._prompts())

    def get(self, request_id: str) -> RemotePrompt | None:
        """A request that is not over; None when it is not a remote prompt."""
        record = self._requests.get(request_id)
        if record is None:
            return None
        return record.prompt

    def state(self, request_id: str) -> RemotePromptState | None:
        """The state of a request; None when it is not a remote prompt."""
        prompt = self.get(request_id)
        if prompt is None:
            return None
        return prompt.state

    def requests(self, *states: RemotePromptState) -> list[str]:
        """Requests in one of these states."""
        return [
            prompt.request_id for prompt in self._prompts() if prompt.state in states
        ]

    def offer(
        self,
        request_id: str,
        source: RemotePrefill,
        shared_tokens: int,
        now_s: float,
        *,
        kind: PromptKind = PromptKind.HANDOVER,
        min_tokens: int = 0,
    ) -> str | None:
        """A request has arrived with usable params.

        Args:
            min_tokens: of a prefix; fewer missing tokens are computed instead.

        Returns:
            None when the request takes the lease; otherwise why it is computed here.

        Raises:
            LocalProtocolError: it was offered before.
        """
        if self.get(request_id) is not None:
            raise LocalProtocolError(f"req={request_id}: offered twice")
        lease = RemoteLease.from_params(source)
        # A lease serves one request. A second one with its params (a sibling of `n > 1`, another prompt of the same
        # batch) is computed here, and must not touch the lease of the first: that one may be reading.
        if lease.key in self.claims:
            return "lease_in_use"
        if lease.key in self._ended:
            return "lease_over"
        if shared_tokens <= 0:
            return "other_prompt"
        if request_id in self.quarantine.pinned:
            # Clients choose ids, and use them again. Workers name loads by them: if this load failed as well, their
            # report would name the same id once, and the blocks of this request would not be pinned.
            self._end_claim(ReleaseLease(lease))
            return "blocks_pinned"
        if kind is PromptKind.TURN:
            min_tokens = self.recompute_threshold
        record = self._requests.enter(request_id)
        record.prompt = RemotePrompt(
            request_id=request_id,
            source=source,
            lease=lease,
            shared_tokens=shared_tokens,
            offered_s=now_s,
            kind=kind,
            min_tokens=min_tokens,
        )
        self.claims.add(lease.key)
        # From the request's arrival on: it may wait for its turn for longer than the lease lives.
        self._commands.append(RenewLease(lease, at_once=kind is PromptKind.TURN))
        # The workers connect the producer while the request waits.
        self.prewarms.expect(Prewarm.from_params(source), now_s)
        return None

    def decline(self, source: RemotePrefill) -> None:
        """Nothing is loaded with these params: release their lease, unless a request holds or held it."""
        if not self.knows(source):
            self._end_claim(ReleaseLease(RemoteLease.from_params(source)))

    def knows(self, source: RemotePrefill) -> bool:
        """Whether a request holds or held the lease of these params."""
        key = RemoteLease.from_params(source).key
        return key in self.claims or key in self._ended

    def matched_tokens(self, request_id: str, local_tokens: int) -> int:
        """The number of tokens beyond the local prefix hit to load; 0 when nothing is to be loaded."""
        prompt = self.get(request_id)
        if prompt is None or prompt.state is not RemotePromptState.OFFERED:
            return 0
        prompt.local_tokens = local_tokens
        num_missing = prompt.shared_tokens - local_tokens
        if num_missing < prompt.min_tokens:
            return 0
        return max(0, num_missing)

    def allocated(
        self, request_id: str, count: int, local_blocks: Sequence[Sequence[int]]
    ) -> None:
        """vLLM has allocated blocks; `count` tokens after the local hit are to be loaded into them.

        Args:
            local_blocks: per cache group the request's blocks from its first token on.

        Raises:
            LocalProtocolError: more tokens than were matched.
        """
        prompt = self.get(request_id)
        if prompt is None:
            if count:
                raise LocalProtocolError(
                    f"req={request_id}: {count} tokens to load, none were offered"
                )
            return
        if count <= 0:
            # vLLM reports every later allocation too; there is nothing to load then.
            if prompt.state not in LOAD_OVER:
                self._load_nothing(prompt)
            return
        stop_token = prompt.local_tokens + count
        if stop_token > prompt.shared_tokens:
            raise LocalProtocolError(
                f"req={request_id}: load up to token {stop_token}, matched {prompt.shared_tokens}"
            )
        self._advance(prompt, RemotePromptEvent.LOAD)
        prompt.loading_tokens = count
        self._counters.add("loads")
        also_counted = _LOADS_OF_KIND.get(prompt.kind)
        if also_counted is not None:
            self._counters.add(also_counted)
        self._orders.append(
            LoadOrder(
                request_id=request_id,
                source=prompt.source,
                local_blocks=tuple(map(tuple, local_blocks)),
                first_token=prompt.local_tokens,
                stop_token=stop_token,
            )
        )

    def loaded(self, request_id: str) -> RemotePrompt | None:
        """All workers have loaded it and notified the producer. None for a request that is not a remote prompt."""
        prompt = self.get(request_id)
        if prompt is not None:
            self._advance(prompt, RemotePromptEvent.LOADED)
            # Not released: every worker has sent its own `done`.
            self._end_claim(ForgetLease(prompt.lease))
        return prompt

    def failed(self, request_id: str) -> RemotePrompt | None:
        """A worker could not load it, or has ended the load since its request was aborted."""
        prompt = self.get(request_id)
        if prompt is None:
            return None
        self._advance(prompt, RemotePromptEvent.FAILED)
        # Released, not forgotten: some producer workers were not notified.
        self._end_claim(ReleaseLease(prompt.lease))
        if prompt.state is RemotePromptState.ABORTED:
            # Nobody computes it, and nothing is wrong with its producer.
            return prompt
        self.prewarms.forget(Prewarm.from_params(prompt.source))
        if self._recomputes:
            self._recompute(prompt, "load_failed")
        else:
            self._counters.add("failed_requests")
        return prompt

    def finished(self, request_id: str, *, by_error: bool = False) -> bool:
        """The request has ended or was aborted.

        Args:
            by_error: vLLM ended it. With the policy `fail` it does so before it passes on that the load has failed.

        Returns:
            True if a load is under way. It is cancelled, and vLLM keeps the blocks until every worker has reported.
        """
        prompt = self.get(request_id)
        if prompt is None:
            return False
        is_cancelled = prompt.state is RemotePromptState.LOADING
        if is_cancelled:
            self.cancel(request_id)
        if is_cancelled and by_error:
            self.prewarms.forget(Prewarm.from_params(prompt.source))
            self._counters.add("failed_requests")
        self._leave(prompt, RemotePromptEvent.FINISH)
        return is_cancelled

    def cancel(self, request_id: str) -> None:
        """Have the workers end this request's load, and report once that it is over, also if it is over already."""
        self._cancels.append(request_id)

    def decline_offered(self, reason: str) -> None:
        """Decline all loads that have not begun: their prompts are computed here."""
        for request_id in self.requests(RemotePromptState.OFFERED):
            self.compute_here(request_id, reason)

    def compute_here(self, request_id: str, reason: str) -> None:
        """Load nothing for this request, if its load has not begun."""
        prompt = self.get(request_id)
        if prompt is not None and prompt.state is RemotePromptState.OFFERED:
            self._leave(prompt, RemotePromptEvent.DECLINE)
            self._recompute(prompt, reason)

    def give_all_back(self) -> None:
        """Release all leases at the shutdown of this engine, also those that workers are reading."""
        for prompt in list(self._prompts()):
            if prompt.state in CLAIMING:
                self._end_claim(ReleaseLease(prompt.lease))
            self._forget(prompt)
        self.in_flight = 0
        self.loading = 0

    def take_orders(self) -> LoadOrders:
        """Since the last call: the loads, those whose requests were aborted, and the producers to prewarm."""
        if not (self._orders or self._cancels or self.prewarms.waiting):
            return NO_LOADS
        prewarms: tuple[Prewarm, ...] = ()
        if self.prewarms.waiting:
            prewarms = self.prewarms.take()
        orders = LoadOrders(tuple(self._orders), tuple(self._cancels), prewarms)
        self._orders.clear()
        self._cancels.clear()
        return orders

    def take_commands(self) -> tuple[LeaseCommand, ...]:
        """Commands for the side channel since the last call, in order."""
        commands = tuple(self._commands)
        self._commands.clear()
        return commands

    def snapshot(self) -> frozenset[LeaseKey]:
        """The leases that no other request may claim now."""
        return frozenset(self.claims)

    def _prompts(self) -> Iterator[RemotePrompt]:
        for record in self._requests.values():
            if record.prompt is not None:
                yield record.prompt

    def _forget(self, prompt: RemotePrompt) -> None:
        record = self._requests.enter(prompt.request_id)
        record.prompt = None
        self._requests.drop_if_over(record)

    def _advance(self, prompt: RemotePrompt, event: RemotePromptEvent) -> None:
        before = prompt.state
        try:
            after = REMOTE_PROMPT_TRANSITIONS[before, event]
        except KeyError:
            raise cannot_happen(prompt, before, event) from None
        # Here alone, so that no transition is missed.
        self.loading += after is RemotePromptState.LOADING
        self.loading -= before is RemotePromptState.LOADING
        self.in_flight += after in IN_FLIGHT
        self.in_flight -= before in IN_FLIGHT
        if after is None:
            self._forget(prompt)
        else:
            prompt.state = after

    def _leave(self, prompt: RemotePrompt, event: RemotePromptEvent) -> None:
        """End a prompt that is not loaded any more. If its load had not begun, its lease is released."""
        was_offered = prompt.state is RemotePromptState.OFFERED
        self._advance(prompt, event)
        if was_offered:
            self._end_claim(ReleaseLease(prompt.lease))

    def _load_nothing(self, prompt: RemotePrompt) -> None:
        self._leave(prompt, RemotePromptEvent.DECLINE)
        num_missing = prompt.shared_tokens - prompt.local_tokens
        if num_missing <= 0:
            if prompt.kind is PromptKind.PREFIX:
                self._recompute(prompt, "local_hit")
            return
        if num_missing < prompt.min_tokens:
            self._recompute(prompt, "below_threshold")
        else:
            self._recompute(prompt, "not_wanted")

    def _recompute(self, prompt: RemotePrompt, reason: str) -> None:
        # Nobody has promised a prefix, so it is no fault of a handover that there is none.
        metric = "local_recomputes"
        if prompt.kind is PromptKind.PREFIX:
            metric = "prefixes_not_pulled"
        self._counters.add(metric, reason)
        if self.observer is not None:
            self.observer.recomputed(prompt, reason)

    def _end_claim(self, command: ForgetLease | ReleaseLease) -> None:
        self.claims.discard(command.lease.key)
        self._ended.add(command.lease.key)
        self._commands.append(command)


class EndedLeases(OrderedDict[LeaseKey, None]):
    """The last `limit` leases that ended, to recognise a replay of old params; the oldest is dropped first.

    A lease serves one request once. A later request with the same params is computed here at once, without a read that
    the producer's fence would refuse.
    """

    def __init__(self, limit: int = MAX_ENDED_LEASES) -> None:
        super().__init__()
        self._limit = limit

    def add(self, key: LeaseKey) -> None:
        """Remember a lease; adding it again does not change its age."""
        self.setdefault(key)
        if len(self) > self._limit:
            self.popitem(last=False)


PREWARM_AGAIN_S = 10.0
"""Interval between prewarms of a producer. For a known one they cost a worker one table lookup."""
MAX_PREWARMED = 4096
"""Most producers remembered; the least recently named is dropped. Clients choose what params name."""
MAX_PREWARMS = 64
"""Most prewarms in the orders of one step, static peers apart; of one host no more than are free, so that others get
some. Loads from producers that are left out begin with a handshake."""


class PrewarmQueue:
    """Producers that the workers prewarm before the first load from them is ordered.

    The handshake (a description, a plan, a first read) then proceeds while the request waits. A worker that drops a
    producer does not report it here: so the next request that names it queues it again after `PREWARM_AGAIN_S`, or
    after a load from it has failed.

    Attributes:
        waiting: for the next step's orders.
    """

    def __init__(self) -> None:
        # When each was queued last; the one that was named last is last. The workers may have dropped one since without
        # a word, so it is queued again after `PREWARM_AGAIN_S`.
        self._named_s: dict[Prewarm, float] = {}
        self.waiting: list[Prewarm] = []
        # Of those that clients have named: static peers have no share.
        self._by_host: Counter[str] = Counter()

    def expect(self, producer: Prewarm, now_s: float) -> None:
        """A request will read from this producer, or a static peer has answered. `now_s` is of any monotonic clock."""
        # One entry, whether an operator or a client has named it.
        named = msgspec.structs.replace(producer, is_static=False)
        # A static peer has no share: the operator has listed it, so there are few, and each is wanted.
        if not producer.is_static:
            named_s = self._named_s.get(named)
            was_prewarmed = named_s is not None and now_s < named_s + PREWARM_AGAIN_S
            if was_prewarmed or not self._take_place(named.host):
                return
        self.waiting.append(producer)
        self.forget(named)
        self._named_s[named] = now_s
        if len(self._named_s) > MAX_PREWARMED:
            del self._named_s[next(iter(self._named_s))]

    def forget(self, producer: Prewarm) -> None:
        """The workers may have lost it: the next request names it again."""
        self._named_s.pop(producer, None)

    def _take_place(self, named_host: str) -> bool:
        """Take a place for a producer that a client has named. False if its host has no share left."""
        host = one_spelling(named_host)
        if not has_share(self._by_host[host], self._by_host.total(), MAX_PREWARMS):
            return False
        self._by_host[host] += 1
        return True

    def take(self) -> tuple[Prewarm, ...]:
        """The producers to prewarm since the last call."""
        waiting = tuple(self.waiting)
        self.waiting.clear()
        self._by_host.clear()
        return waiting


NOTHING_PINNED: Mapping[str, float] = {
    "quarantined_requests_now": 0,
    "quarantined_blocks_now": 0,
    "oldest_quarantine_s": 0.0,
}
"""The gauges of pinned requests and blocks, at nearly all times."""


class PinnedBlocks(NamedTuple):
    """The blocks of one failed load, and since when they are pinned."""

    blocks: tuple[int, ...]
    since_s: float


class QuarantinedBlocks:
    """Pins the blocks of failed loads, by request, until no worker reports that they may still be written.

    To release a transfer does not stop it: NIXL may write as long as its handle lives. But vLLM frees a failed
    request's blocks at once. So one more reference is taken on each block before that.

    Args:
        pool: the engine's; without it nothing is pinned.

    Attributes:
        pool: as given.
        num_blocks: pinned blocks.
        pinned: by request, as workers name loads; it may have ended. The oldest is first.
    """

    def __init__(self, pool: BlockPool | None) -> None:
        self.pool = pool
        self.num_blocks = 0
        # By worker, its latest report: not every worker reports in every step.
        self._still_written: dict[int, frozenset[str]] = {}
        self.pinned: dict[str, PinnedBlocks] = {}

    def update(self, still_written: Mapping[int, frozenset[str]], now_s: float) -> None:
        """Take the requests whose blocks may still be written, by worker, before vLLM frees blocks of the step."""
        if self.pool is None:
            return
        self._still_written.update(still_written)
        named = frozenset().union(*self._still_written.values())
        for request_id in named - self.pinned.keys():
            self._pin(self.pool, request_id, now_s)
        for request_id in self.pinned.keys() - named:
            pin = self.pinned.pop(request_id)
            self.num_blocks -= len(pin.blocks)
            self.pool.give_back(pin.blocks)

    def gauges(self, now_s: float) -> Mapping[str, float]:
        """The gauges of pinned requests and blocks."""
        if not self.pinned:
            return NOTHING_PINNED
        oldest = next(iter(self.pinned.values()))
        return {
            "quarantined_requests_now": len(self.pinned),
            "quarantined_blocks_now": self.num_blocks,
            "oldest_quarantine_s": now_s - oldest.since_s,
        }

    def snapshot(self) -> Mapping[str, PinnedBlocks]:
        """The pinned blocks now, by request."""
        return dict(self.pinned)

    def _pin(self, pool: BlockPool, request_id: str, now_s: float) -> None:
        blocks = pool.loaded_into(request_id)
        pool.keep(blocks)
        self.pinned[request_id] = PinnedBlocks(blocks, now_s)
        self.num_blocks += len(blocks)
