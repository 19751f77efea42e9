"""A prompt that an engine without a model computes part by part, as vLLM's scheduler and the connector drive it.

prefill = Prefill(producer, [producer.caches], "prefill-1", tokens=12, seed=7)
prefill.compute(4, (3,))       # with the next step
producer.step()
prefill.offer()                # a consumer has asked; it gets `prefill.params`
prefill.compute(4, (9,))       # from here on the blocks are listed, and read
producer.step()
prefill.compute(4, (5,))       # the last part: held from this step on
producer.step()
prefill.end()
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.protocol.params import RemotePrefill
from kvferry.scheduler.requests import KEEPS_BLOCKS, ProducerLease
from tests.harness.cache_engine import CacheEngine
from tests.harness.caches import PatternCaches


class Prefill:
    """One prompt of an engine with one cache group; its lease is opened with the next step.

    Args:
        memories: per worker the caches that it is written to.
        tokens: of the whole prompt.

    Attributes:
        blocks: of what is computed, in order of the tokens.
        done, computed: leading tokens that are computed; `done` includes those of the next step.
        params: a consumer's; None before `offer`, or, without it, before the step that computes the last part.

    Raises:
        AssertionError: the engine has no free slot.
    """

    def __init__(
        self,
        engine: CacheEngine,
        memories: Sequence[PatternCaches],
        request_id: str,
        tokens: int,
        seed: int,
    ) -> None:
        assert engine.leases.open(request_id)
        lease = engine.leases.running(request_id)
        assert lease is not None
        self.request_id, self.tokens, self.seed = request_id, tokens, seed
        self.blocks: tuple[int, ...] = ()
        self.done = self.computed = 0
        self.params: RemotePrefill | None = None
        self._engine, self._memories = engine, memories
        self._lease: ProducerLease = lease

    @property
    def is_complete(self) -> bool:
        """Whether a step has computed its last part, or the next one does."""
        return self.done == self.tokens

    @property
    def is_held(self) -> bool:
        """Whether it is complete, and the lease keeps its blocks, or has kept them."""
        return self._lease.state in KEEPS_BLOCKS

    def offer(self) -> None:
        """A consumer has asked for it: its blocks are listed from the next part on, those before included.

        Raises:
            AssertionError: the engine has no free row.
        """
        stream = self._engine.leases.streams.begin(self._lease)
        assert stream is not None
        self.params = self._engine.signed(self._lease, ((),), self.tokens, stream.row)

    def compute(self, tokens: int, blocks: Sequence[int]) -> None:
        """The next step computes so many more tokens.

        Args:
            blocks: those that it needs besides `self.blocks`.
        """
        first, stop = self.done, self.done + tokens
        self.done, self.blocks = stop, (*self.blocks, *blocks)
        leases, written = self._engine.leases, self.blocks
        if self._lease.stream is not None and not self._lease.ended_by:
            leases.streams.publish(self._lease, self._lease.stream, stop, (written,))
        if self.is_complete:
            leases.complete(self.request_id)
            self.params = self.params or self._engine.signed(
                self._lease, (written,), self.tokens
            )

        def write() -> None:
            for memory in self._memories:
                memory.write_into(
                    memory.memory, written, first, stop, self.seed, tail=None
                )
            self.computed = stop

        self._engine.launched.append(write)

    def preempt(self) -> tuple[int, ...]:
        """It begins again later. Returns its blocks: the next step may write another prompt into them."""
        if self._lease.stream is not None and not self._lease.ended_by:
            self._engine.leases.streams.restart(self._lease, self._lease.stream)
        return self._forget()

    def abort(self) -> tuple[int, ...]:
        """It has failed or was aborted. Returns the blocks that are free, none of a complete prompt: the lease has
        them until the workers have ended it."""
        if self.is_complete:
            self.end()
            if not self._lease.ended_by:
                self._engine.leases.end(self._lease, "abandoned")
            return ()
        self._engine.leases.abandon(self.request_id)
        return self._forget()

    def end(self) -> None:
        """Its request has ended, after its last part."""
        self._engine.leases.request_ended(self._lease)

    def _forget(self) -> tuple[int, ...]:
        free, self.blocks, self.done, self.computed = self.blocks, (), 0, 0
        return free
