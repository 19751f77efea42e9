"""The replacements of guards' functions that are switched off; see `tests.faults.guards`.

This module imports nothing of the product before that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Function = Callable[..., Any]


@dataclass(frozen=True)
class Guard:
    """One guard.

    Attributes:
        key: its name on a command line.
        text: what it is.
        promises: those of the nine that it keeps.
        target: `module:qualified name` of what is replaced: a function, or a bound.
        off: from that to what takes its place.
        tests: tests that fail without it, with all their parameters or those that stand in brackets.
    """

    key: str
    text: str
    promises: tuple[int, ...]
    target: str
    off: Callable[[Function], Function]
    tests: tuple[str, ...]


class _Reached:
    """A device that is said to have finished."""

    def reached(self) -> bool:
        return True


class _AnyBoot(str):
    """Equal to every boot."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, _: object) -> bool:
        return True

    def __ne__(self, _: object) -> bool:
        return False


def nothing(_: Function) -> Function:
    return lambda *_args, **_options: None


def always(value: object) -> Callable[[Function], Function]:
    return lambda _: lambda *_args, **_options: value


def never(_: Function) -> Any:
    """In the place of a property."""
    return property(lambda _: False)


def bound_of(value: int) -> Callable[[Any], Any]:
    """In the place of a constant."""
    return lambda _: value


def by_name(_: Function) -> Function:
    return lambda _, request: request.lora_name


def no_steps(_: Function) -> Function:
    return lambda *_args: iter(())


def computing_will_do(check: Function) -> Function:
    def lenient(fence: Any, peer: Any) -> Any:
        from kvferry.worker.loads.state import LoadFailed

        try:
            yield from check(fence, peer)
        except LoadFailed:
            reads = fence.lease_reads
            words = [int(reads.slot_reads.words[entry]) for entry in reads.entries]
            if any(word >> 4 != fence.epoch for word in words):
                raise

    return lenient


def slot_stays(clear: Function) -> Function:
    def forgetful(table: Any, slot: int) -> None:
        word = table.words[slot]
        clear(table, slot)
        table.words[slot] = word

    return forgetful


def ready_at_once(advance: Function) -> Function:
    def hasty(table: Any) -> Any:
        for lease in table.pending.values():
            lease.mark = _Reached()
        return advance(table)

    return hasty


def end_nothing(_: Function) -> Function:
    return lambda _table: []


def report_at_once(take_tokens: Function) -> Function:
    def hasty(stream: Any) -> Any:
        for number, (tokens, _) in enumerate(stream.steps):
            stream.steps[number] = (tokens, _Reached())
        return take_tokens(stream)

    return hasty


def load_at_once(steps: Function) -> Function:
    def hasty(load: Any) -> Any:
        load.mark = _Reached()
        return steps(load)

    return hasty


def always_safe(settle: Function) -> Function:
    def careless(load: Any) -> bool:
        settle(load)
        return True

    return careless


def pin_nothing(_: Function) -> Function:
    from kvferry.scheduler.consumer.ledger import PinnedBlocks

    def careless(quarantined: Any, _pool: Any, request_id: str, _now_s: float) -> None:
        quarantined.pinned[request_id] = PinnedBlocks((), 0.0)

    return careless


def count_messages(done: Function) -> Function:
    def gullible(table: Any, message: Any) -> Any:
        import msgspec

        lease = table._find(message.slot, message.epoch)
        notifications = (
            lease.reports.get(message.consumer) if lease is not None else None
        )
        received = notifications.workers.bit_count() if notifications is not None else 0
        return done(table, msgspec.structs.replace(message, worker=received))

    return gullible


def any_epoch(_: Function) -> Function:
    return lambda table, slot, _epoch: table._leases.get(slot)


def skip_the_boot_check(_: Function) -> Function:
    def receive(leases: Any, messages: Any, _boot: str) -> None:
        from kvferry.protocol.handshake import Release

        for received in messages:
            (leases.release if received.kind is Release else leases.renew)(
                received.name
            )

    return receive


def accept_any_boot(plan: Function) -> Function:
    return lambda contact, key, frame: plan(
        contact, key._replace(boot=_AnyBoot(key.boot)), frame
    )


def renew_nothing(_: Function) -> Function:
    def renew(ledger: Any, name: Any, _received_s: float | None = None) -> bool:
        from kvferry.scheduler.requests import LeaseState

        lease = ledger.slots.find(name)
        return lease is not None and lease.state is not LeaseState.ENDING

    return renew


def count_sleep(_: Function) -> Function:
    def wind(clock: Any, now_s: float) -> float:
        before_s = now_s if clock._last_s is None else clock._last_s
        clock.awake_s += max(0.0, now_s - before_s)
        clock._last_s = now_s
        return float(clock.awake_s)

    return wind


def whatever_comes(_: Function) -> Function:
    return lambda _prompt, _chain, num_tokens: num_tokens


def unguarded(_: Function) -> Function:
    return lambda _listener, serve: serve()


def prefixes_go_last(rank_of: Function) -> Function:
    def lenient(lease: Any, clock_s: float, heartbeat_s: float) -> Any:
        from kvferry.scheduler.producer.eviction_order import Rank

        rank = rank_of(lease, clock_s, heartbeat_s)
        return Rank.CLAIMED_PROMPT if rank is Rank.PREFIX else rank

    return lenient


def all_that_is_listed(_: Function) -> Function:
    return lambda index, chain: list(index._chunks.values())[: len(chain) // 16]


def whatever_blocks_have(_: Function) -> Function:
    def trusting(cache: Any, block_ids: Any, _hashes: Any) -> bool:
        pool = cache._bound.block_pool
        pool.touch([pool.blocks[block] for block in block_ids])
        return True

    return trusting


def take_all_at_once(go_on: Function) -> Function:
    def greedy(leases: Any, taking: Any, _num_blocks: int, *, computes: bool) -> Any:
        return go_on(leases, taking, 1 << 30, computes=computes)

    return greedy


def return_all_at_once(return_some: Function) -> Function:
    def hasty(references: Any) -> None:
        references.are_blocks_short = True
        return_some(references)

    return hasty


def count_no_recomputes(add: Function) -> Function:
    def silent(counters: Any, metric: str, *args: Any, **options: Any) -> None:
        if metric != "local_recomputes":
            add(counters, metric, *args, **options)

    return silent
