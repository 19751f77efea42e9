"""The guards behind the eight promises, how each is switched off, and the tests that must then fail.

    KVFERRY_GUARD_OFF=mac python -m pytest -p tests.faults.guards_off tests/worker/engines/test_bad_orders.py

A guard is switched off by putting something else in the place of one function of the product. This module imports
nothing of the product before that.
"""

from __future__ import annotations

import functools
import importlib
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
        promises: those of the eight that it keeps.
        target: `module:qualified name` of what is replaced.
        off: from the function to what takes its place.
        tests: tests that fail without it, with all their parameters or those that stand in brackets.
    """

    key: str
    text: str
    promises: tuple[int, ...]
    target: str
    off: Callable[[Function], Function]
    tests: tuple[str, ...]


def switch_off(guard: Guard) -> None:
    """In this process, for good."""
    module, _, name = guard.target.partition(":")
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, importlib.import_module(module))
    setattr(owner, last, guard.off(getattr(owner, last)))


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


def _nothing(_: Function) -> Function:
    return lambda *_args, **_options: None


def _always(value: object) -> Callable[[Function], Function]:
    return lambda _: lambda *_args, **_options: value


def _only_one_reading(before: bool) -> Callable[[Function], Function]:
    def off(check: Function) -> Function:
        def one(load: Any, peer: Any, *, wait_until_ready: bool) -> Any:
            return check(load, peer, wait_until_ready=wait_until_ready) if wait_until_ready is before else iter(())

        return one

    return off


def _computing_will_do(check: Function) -> Function:
    def lenient(load: Any, peer: Any, *, wait_until_ready: bool) -> Any:
        from kvferry.protocol.ids import epoch_from_text
        from kvferry.worker.loads.load import LoadFailed

        try:
            yield from check(load, peer, wait_until_ready=wait_until_ready)
        except LoadFailed:
            epoch = epoch_from_text(load.order.source.kvferry.lease_epoch)
            if any(int(load.context.slot_reads.words[entry]) >> 4 != epoch for entry in load.entries):
                raise

    return lenient


def _slot_stays(clear: Function) -> Function:
    def forgetful(table: Any, slot: int) -> None:
        word = table.words[slot]
        clear(table, slot)
        table.words[slot] = word

    return forgetful


def _ready_at_once(advance: Function) -> Function:
    def hasty(table: Any) -> Any:
        for lease in table._pending.values():
            lease.mark = _Reached()
        return advance(table)

    return hasty


def _load_at_once(steps: Function) -> Function:
    def hasty(load: Any) -> Any:
        load.mark = _Reached()
        return steps(load)

    return hasty


def _always_safe(settle: Function) -> Function:
    def careless(load: Any) -> bool:
        settle(load)
        return True

    return careless


def _pin_nothing(_: Function) -> Function:
    def careless(quarantined: Any, _pool: Any, request_id: str, _now_s: float) -> None:
        quarantined._pinned[request_id] = (), 0.0

    return careless


def _count_messages(done: Function) -> Function:
    def gullible(table: Any, message: Any) -> Any:
        import msgspec

        lease = table._find(message.slot, message.epoch)
        notifications = lease.notifications.get(message.consumer) if lease is not None else None
        received = notifications.workers.bit_count() if notifications is not None else 0
        return done(table, msgspec.structs.replace(message, worker=received))

    return gullible


def _any_epoch(_: Function) -> Function:
    return lambda table, slot, _epoch: table._leases.get(slot)


def _skip_the_boot_check(_: Function) -> Function:
    def receive_messages(listener: Any, leases: Any, _boot: str, _counters: Any) -> None:
        from kvferry.protocol.handshake import Release

        for received in listener.inbox.take():
            (leases.release if received.kind is Release else leases.renew)(received.name)

    return receive_messages


def _accept_any_boot(handshake: Function) -> Function:
    return lambda contact, key: handshake(contact, key._replace(boot=_AnyBoot(key.boot)))


def _never_late(advance: Function) -> Function:
    def never_late(runner: Any, load: Any, steps: Any) -> Any:
        import time

        load.record.ordered_s = time.monotonic()
        return advance(runner, load, steps)

    return never_late


def _renew_nothing(_: Function) -> Function:
    def renew(ledger: Any, name: Any, _received_s: float | None = None) -> bool:
        from kvferry.scheduler.producer.lease import LeaseState

        lease = ledger._by_name.get(name)
        return lease is not None and lease.state is not LeaseState.ENDING

    return renew


def _count_sleep(_: Function) -> Function:
    def wind(clock: Any, now_s: float) -> float:
        before_s = now_s if clock._last_s is None else clock._last_s
        clock._awake_s += max(0.0, now_s - before_s)
        clock._last_s = now_s
        return float(clock._awake_s)

    return wind


def _whatever_comes(_: Function) -> Function:
    return lambda _prompt, _chain, num_tokens: num_tokens


def _unguarded(_: Function) -> Function:
    return lambda _listener, serve: serve()


def _count_no_recomputes(add: Function) -> Function:
    def silent(counters: Any, metric: str, *args: Any, **options: Any) -> None:
        if metric != "local_recomputes":
            add(counters, metric, *args, **options)

    return silent


_ENGINES = "tests/worker/engines"

GUARDS = (
    Guard(
        "fence-after",
        "the slot is read again after the data",
        (1, 2),
        "kvferry.worker.loads.load:Load._check_fence",
        _only_one_reading(before=True),
        (
            f"{_ENGINES}/test_fence.py::test_a_load_whose_blocks_were_given_away_during_the_read_is_never_good[nixl]",
            f"{_ENGINES}/test_fence.py::test_a_lease_that_computes_again_after_the_read_is_no_good_either",
        ),
    ),
    Guard(
        "fence-before",
        "the slot is read before the data",
        (2,),
        "kvferry.worker.loads.load:Load._check_fence",
        _only_one_reading(before=False),
        (f"{_ENGINES}/test_fence.py::test_a_lease_that_ended_before_the_read_is_not_read_from",),
    ),
    Guard(
        "fence-ready",
        "only READY is good after the data",
        (1,),
        "kvferry.worker.loads.load:Load._check_fence",
        _computing_will_do,
        (f"{_ENGINES}/test_fence.py::test_a_lease_that_computes_again_after_the_read_is_no_good_either",),
    ),
    Guard(
        "slot-cleared",
        "a slot is cleared before its blocks are given away",
        (1, 2),
        "kvferry.worker.leases:LeaseTable._clear",
        _slot_stays,
        (f"{_ENGINES}/test_fence.py::test_a_lease_that_ended_before_the_read_is_not_read_from[memory]",),
    ),
    Guard(
        "ready",
        "a slot says READY when the device has finished with the blocks, not earlier",
        (1,),
        "kvferry.worker.leases:LeaseTable.advance",
        _ready_at_once,
        (f"{_ENGINES}/test_good_loads.py::test_a_slot_says_ready_only_when_the_device_has_finished_with_the_blocks",),
    ),
    Guard(
        "device-mark",
        "nothing is read into blocks that the device may still write",
        (1,),
        "kvferry.worker.loads.load:Load.steps",
        _load_at_once,
        (f"{_ENGINES}/test_good_loads.py::test_nothing_is_read_into_blocks_that_the_device_may_still_write",),
    ),
    Guard(
        "digests",
        "matched tokens end at the last equal digest",
        (1,),
        "kvferry.connector.scheduler_side.intake:shared_tokens",
        _whatever_comes,
        (
            "tests/engine_core/test_consumer.py::"
            "test_one_params_object_over_a_batch_serves_only_the_prompt_that_it_was_made_for[b]",
            "tests/engine_core/test_consumer.py::test_a_turn_that_was_tokenised_anew_takes_what_it_certainly_shares",
        ),
    ),
    Guard(
        "mac",
        "params have the MAC of the engine that wrote them",
        (1,),
        "kvferry.worker.loads.load:check_params_mac",
        _nothing,
        (
            f"{_ENGINES}/test_bad_orders.py::test_params_that_a_client_has_changed_fail_by_their_mac",
            f"{_ENGINES}/test_bad_orders.py::test_tickets_that_a_client_has_changed_fail_by_their_mac",
        ),
    ),
    Guard(
        "epochs",
        "a lease is named by its slot and its epoch",
        (1, 6),
        "kvferry.worker.leases:LeaseTable._find",
        _any_epoch,
        (
            "tests/worker/test_lease_table.py::test_orders_of_a_former_lease_do_not_touch_the_next_one_of_the_slot",
            f"{_ENGINES}/test_notifications.py::test_a_guessed_epoch_among_a_thousand_frees_nothing",
        ),
    ),
    Guard(
        "tails",
        "what a load did not write of its blocks is zeroed",
        (1,),
        "kvferry.worker.loads.tail_zeroing:TailZeroing.zero",
        _nothing,
        (f"{_ENGINES}/test_good_loads.py::test_a_load_brings_every_byte_and_both_sides_are_notified_once",),
    ),
    Guard(
        "quarantine",
        "a failed load's blocks are named while anything may write them",
        (2,),
        "kvferry.worker.loads.load:Load.settle",
        _always_safe,
        (
            f"{_ENGINES}/test_deadlines.py::"
            "test_a_stuck_load_is_reported_at_once_and_its_blocks_are_named_until_its_read_has_ended",
        ),
    ),
    Guard(
        "pinned",
        "blocks that are named so are kept out of the pool",
        (2,),
        "kvferry.scheduler.consumer.quarantine:QuarantinedBlocks._pin",
        _pin_nothing,
        (
            "tests/engine_core/test_quarantined_blocks.py::test_the_blocks_stay_out_of_the_pool_until_the_transfer_is_dead",
        ),
    ),
    Guard(
        "distinct-done",
        "a worker that notifies twice counts once",
        (2,),
        "kvferry.worker.leases:LeaseTable.done",
        _count_messages,
        (
            "tests/worker/test_lease_table.py::test_a_worker_that_repeats_itself_does_not_stand_for_its_sibling",
            f"{_ENGINES}/test_notifications.py::"
            "test_one_worker_that_repeats_itself_does_not_free_what_its_sibling_still_reads",
        ),
    ),
    Guard(
        "expiry",
        "a lease without renewals ends",
        (3,),
        "kvferry.scheduler.state.clock:AwakeClock.wind",
        _always(0.0),
        (
            "tests/scheduler/test_lease_clock.py::"
            "test_the_clock_starts_when_the_workers_learn_that_the_blocks_are_held",
            "tests/scheduler/test_two_ends.py::test_everything_is_freed_within_a_lease_after_the_consumer_died",
        ),
    ),
    Guard(
        "deadline",
        "a load has a deadline",
        (3,),
        "kvferry.worker.loads.runner:LoadRunner._advance",
        _never_late,
        (
            f"{_ENGINES}/test_deadlines.py::"
            "test_a_load_of_a_producer_that_never_finishes_misses_its_deadline_and_leaves_nothing_alive",
        ),
    ),
    Guard(
        "former-lives",
        "state of an engine's former life is dropped when it comes back",
        (4,),
        "kvferry.worker.peers.registry:PeerRegistry._retire_former_lives",
        _nothing,
        (
            "tests/worker/test_peer_registry.py::test_a_former_life_is_kept_while_reads_from_it_are_under_way",
            f"{_ENGINES}/test_peers.py::"
            "test_an_engine_that_restarted_is_connected_anew_and_its_former_life_is_forgotten[nixl]",
        ),
    ),
    Guard(
        "lost-peers",
        "a peer that is lost is connected anew",
        (4,),
        "kvferry.worker.peers.registry:PeerRegistry.lost",
        _nothing,
        (f"{_ENGINES}/test_peers.py::test_a_peer_that_dies_during_a_read_fails_the_load_at_once",),
    ),
    Guard(
        "boots",
        "params of a former life are refused",
        (4,),
        "kvferry.worker.peers.first_contact:FirstContact.handshake",
        _accept_any_boot,
        (f"{_ENGINES}/test_peers.py::test_params_of_a_former_life_are_refused_when_only_the_new_one_is_known",),
    ),
    Guard(
        "boots-received",
        "messages to a former life are ignored",
        (4, 6),
        "kvferry.scheduler.step:receive_messages",
        _skip_the_boot_check,
        ("tests/scheduler/test_step.py::test_messages_to_another_boot_are_counted_and_change_nothing",),
    ),
    Guard(
        "renewals",
        "a renewal gives a lease its full time again",
        (5,),
        "kvferry.scheduler.producer.ledger:ProducerLedger.renew",
        _renew_nothing,
        (
            "tests/scheduler/test_lease_clock.py::test_a_renewal_gives_the_full_time_again",
            "tests/scheduler/test_lease_clock.py::"
            "test_a_consumer_that_stalls_for_less_than_the_lease_minus_one_heartbeat_loses_nothing",
        ),
    ),
    Guard(
        "awake",
        "a lease's clock stands while its producer does",
        (5,),
        "kvferry.scheduler.state.clock:AwakeClock.wind",
        _count_sleep,
        ("tests/scheduler/test_lease_clock.py::test_a_pause_of_the_producer_does_not_expire_leases",),
    ),
    Guard(
        "listener",
        "nothing that arrives ends the listener's thread",
        (6,),
        "kvferry.scheduler.side_channel.guarded_socket:GuardedSocket.guarded",
        _unguarded,
        ("tests/scheduler/test_listener.py::test_an_unexpected_exception_is_counted_and_the_next_asker_is_answered",),
    ),
    Guard(
        "curve-auth",
        "with a secret, only peers that have it are admitted",
        (6,),
        "kvferry.scheduler.side_channel.curve_auth:CurveAuth._admits",
        _always(True),
        ("tests/scheduler/test_secrets.py::test_a_key_that_is_not_of_a_listed_secret_is_not_admitted",),
    ),
    Guard(
        "allowed-hosts",
        "nothing is sent to a host that is not listed",
        (6,),
        "kvferry.connector.scheduler_side.intake:RequestIntake._may_connect",
        _always(True),
        (
            "tests/engine_core/test_allowed_hosts.py::"
            "test_whatever_names_a_host_that_is_not_listed_leads_to_no_connection_and_no_look_up[a prompt-127.0.0.1]",
            "tests/engine_core/test_allowed_hosts.py::"
            "test_whatever_names_a_host_that_is_not_listed_leads_to_no_connection_and_no_look_up[a turn-localhost]",
        ),
    ),
    Guard(
        "refusals",
        "another model is refused by the field that differs",
        (7,),
        "kvferry.plan.planner:_model_reasons",
        _always(()),
        ("tests/plan/test_refusals.py::test_another_model_is_refused_by_the_fact_that_differs",),
    ),
    Guard(
        "recomputes",
        "a prompt that is computed locally instead is counted",
        (8,),
        "kvferry.scheduler.state.counters:Counters.add",
        _count_no_recomputes,
        ("tests/engine_core/test_metrics.py::test_outcomes_of_remote_prompts_are_in_prometheus_by_reason",),
    ),
)
