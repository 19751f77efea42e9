"""Leases of prefixes: what other engines have found in this engine's prefix cache is held for them, step by step.

    admitted, ended    the request's tokens are listed (`PrefixDirectory`)
    every step         of what queries have found: check a part of the blocks, and take references on them; with the
                       last part open a lease, READY when the device has passed this step

The listener's thread has found the blocks a moment ago. A block is checked by its hash when its reference is taken, and
from then on vLLM gives it to nobody. vLLM hashes blocks when it schedules the step that fills them, so a lease is held
as one whose prompt this step completes.

Nothing here may make the engine's own requests wait. So prefixes have a share of the blocks and of the slots, are not
opened while little is free, and go first when blocks are needed (`eviction_order.py`).
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.connector.scheduler_side.drain import Drain
from kvferry.connector.scheduler_side.params_builder import ParamsBuilder, prompt_of
from kvferry.connector.scheduler_side.requests import EngineRequest, SchedulerContext
from kvferry.connector.scheduler_side.unsettled import TakeBacks
from kvferry.connector.vllm.loop import EngineLoop
from kvferry.connector.vllm.prefix_cache import PrefixCache
from kvferry.protocol.prefix_queries import PrefixRefusal
from kvferry.scheduler.producer.block_references import Reservation
from kvferry.scheduler.producer.prefix_directory import (
    PrefixDirectory,
    QueriedPrefix,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

BLOCKS_AT_ONCE = 384
"""Most references that are taken in one step: some 0.13 ms, of which vLLM's own count is half."""
SHARE = 4
"""Prefixes may keep 1/4 of the blocks and of the slots."""
RESERVED = 8
"""They are opened while 1/8 of the blocks and of the slots stays free."""


@dataclass(slots=True, eq=False)
class _Taking:
    """A prefix on whose blocks references are taken.

    Attributes:
        reservation: those of its blocks that have one, the first ones.
    """

    queried: QueriedPrefix
    reservation: Reservation = field(default_factory=Reservation)

    @property
    def num_taken(self) -> int:
        return len(self.reservation.block_ids)

    @property
    def blocks_left(self) -> int:
        return len(self.queried.found.block_ids) - self.num_taken


class PrefixLeases:
    """The engine's thread of `PrefixDirectory`.

    Args:
        take_backs: what vLLM may still take back is not held.
        cache: nothing is listed, and so nothing is found, until it is bound.
    """

    def __init__(
        self,
        context: SchedulerContext,
        cache: PrefixCache,
        take_backs: TakeBacks,
        builder: ParamsBuilder,
        drain: Drain,
        loop: EngineLoop,
        directory: PrefixDirectory,
    ) -> None:
        self._local = context.local
        self._leases = context.leases
        self._blocks = context.blocks
        self._cache = cache
        self._take_backs = take_backs
        self._builder = builder
        self._drain = drain
        self._loop = loop
        self._directory = directory
        self._taking: deque[_Taking] = deque()
        self._num_taken = 0
        self._model = ("", 0)
        # A client chooses the ids of requests, and must not choose that of a lease.
        self._name = f"prefix-{secrets.token_hex(8)}"
        self._num_opened = 0

    @property
    def needs_step(self) -> bool:
        """True if a step has something to do here."""
        return bool(self._taking) or self._directory.needs_step

    # A request.

    def admitted(self, entry: EngineRequest) -> None:
        """vLLM has given a request its first blocks."""
        directory = self._directory
        if not self._cache.hash_tokens:
            return
        # One more token than the prompt has: the list that grows with the answer.
        prompt = prompt_of(
            entry.request, entry.request.num_prompt_tokens + 1, self._local
        )
        if prompt is None:
            return
        # Also for what is not listed: it fills blocks, with hashes by which others may look for them.
        self._note_model(prompt.weights)
        listed = entry.listed_sequence
        is_listed = listed is not None and listed.generation == directory.generation
        if is_listed or entry.request.resumable or _may_change(entry.request):
            return
        entry.listed_sequence = directory.admitted(
            prompt, entry.request.block_hashes, entry.request.num_tokens
        )

    def ended(self, entry: EngineRequest) -> None:
        """A request has ended: its answer can be the beginning of a prompt, too."""
        if entry.listed_sequence is not None:
            self._directory.grown(entry.listed_sequence, entry.request.num_tokens)

    def reset(self) -> None:
        """vLLM's prefix cache is emptied, or the weights change."""
        self._directory.reset()
        while self._taking:
            self._drop(self._taking[0], PrefixRefusal.NO_PREFIX)

    def taken_back(self, not_filled: AbstractSet[int]) -> None:
        """vLLM has heard that these blocks do not have what their hashes said."""
        for taking in list(self._taking):
            if not not_filled.isdisjoint(taking.reservation.block_ids):
                self._drop(taking, PrefixRefusal.NO_PREFIX)

    # A step.

    def step(self, *, computes: bool) -> None:
        """A step was scheduled: hold what was found, as much of it as one step may.

        Args:
            computes: whether the step computes any token.
        """
        if not self.needs_step:
            return
        self._note_model(self._local.weights.version())
        self._end_given_up()
        self._taking.extend(map(_Taking, self._directory.take_wanted()))
        num_left = BLOCKS_AT_ONCE
        for taking in list(self._taking):
            if num_left <= 0:
                break
            num_left -= self._go_on(taking, num_left, computes=computes)

    def _go_on(self, taking: _Taking, num_blocks: int, *, computes: bool) -> int:
        """Take so many references at most, and open the lease if those were the last. Returns how many."""
        queried = taking.queried
        if queried.is_given_up:
            self._drop(taking, None)
            return 0
        refusal = self._why_not(taking)
        if refusal is not None:
            self._drop(taking, refusal)
            return 0
        found = queried.found
        first = taking.num_taken
        stop = min(first + num_blocks, len(found.block_ids))
        if not self._cache.keep(found.block_ids[first:stop], found.hashes[first:stop]):
            self._give_back(taking)
            self._directory.changed(queried)
            return stop - first
        references = self._leases.block_references
        references.reserve(taking.reservation, found.block_ids[first:stop])
        self._num_taken += stop - first
        if not taking.blocks_left and not self._take_backs.may_come(found.block_ids):
            self._open(taking, computes=computes)
        return stop - first

    def _open(self, taking: _Taking, *, computes: bool) -> None:
        queried = taking.queried
        found = queried.found
        self._forget(taking)
        self._num_opened += 1
        lease = self._leases.hold_prefix(
            f"{self._name}-{self._num_opened}",
            self._builder.worker_prefix_blocks(found),
            taking.reservation,
            is_computed=not computes,
        )
        self._directory.opened(queried, lease)
        logger.debug(
            "%s slot=%d holds a prefix of %d tokens",
            lease.request_id,
            lease.slot,
            found.num_tokens,
        )

    def _why_not(self, taking: _Taking) -> PrefixRefusal | None:
        """Why a prefix cannot be held now; None if it can."""
        if self._drain.is_requested or self._loop.is_paused:
            return PrefixRefusal.NO_PREFIX
        if taking.queried.generation != self._directory.generation:
            return PrefixRefusal.NO_PREFIX
        leases = self._leases
        num_slots = leases.slots.count
        if leases.num_prefixes >= max(1, num_slots // SHARE):
            return PrefixRefusal.NO_LEASE
        if leases.slots.free <= num_slots // RESERVED:
            return PrefixRefusal.NO_LEASE
        num_blocks = self._blocks.num_blocks
        num_kept = leases.num_prefix_blocks + self._num_taken + taking.blocks_left
        if num_kept > num_blocks // SHARE:
            return PrefixRefusal.NO_LEASE
        # As if none of its blocks were used by a request: to count them takes a look at each.
        if self._blocks.num_free - taking.blocks_left < num_blocks // RESERVED:
            return PrefixRefusal.NO_LEASE
        return None

    def _end_given_up(self) -> None:
        for queried in self._directory.take_given_up():
            lease = queried.lease
            if lease is not None and not lease.ended_by:
                self._leases.end(lease, "release")

    def _note_model(self, weights: str) -> None:
        # vLLM's hashes depend neither on the weights nor on what an adapter's files hold: what was listed with the old
        # ones would find blocks of the new.
        model = (weights, self._local.adapters.num_replaced)
        if model != self._model:
            self._model = model
            self.reset()

    def _drop(self, taking: _Taking, reason: PrefixRefusal | None) -> None:
        self._give_back(taking)
        if reason is not None:
            self._directory.refused(taking.queried, reason)

    def _give_back(self, taking: _Taking) -> None:
        self._forget(taking)
        self._leases.block_references.cancel(taking.reservation)

    def _forget(self, taking: _Taking) -> None:
        self._taking.remove(taking)
        self._num_taken -= taking.num_taken


def _may_change(request: Request) -> bool:
    """True if the request's adapter may be another one from one step to the next."""
    return request.lora_request is not None and request.lora_request.load_inplace
