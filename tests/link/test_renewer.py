"""The consumer's half of the side channel over real sockets: renewals, releases, and no delay by dead producers."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable

import pytest

from kvferry.link import host_names, limits
from kvferry.link import renewer as module
from kvferry.link.allowed_hosts import AllowedHosts
from kvferry.link.commands import (
    ForgetLease,
    ReleaseLease,
    RemoteLease,
    RenewLease,
)
from kvferry.link.counters import Counters
from kvferry.link.limits import HEARTBEATS_PER_LEASE
from kvferry.link.renewer import LeaseRenewer
from kvferry.link.secrets import Secrets
from kvferry.protocol.handshake import LeaseName, Release, Renew
from kvferry.protocol.rate_limited_log import RateLimitedLog
from tests.engine_core.step_count import StepCount
from tests.link.channel import HOST, RecordingListener, free_port, listening, renewing
from tests.link.secret_files import NEW, OLD
from tests.protocol.samples import BOOT
from tests.waiting import LONGEST_JOIN_S, wait_until

pytestmark = pytest.mark.slow

SHORT_S = 1.0
LONG_S = 3600.0


def lease(
    port: int,
    slot: int = 1,
    *,
    lease_s: float = SHORT_S,
    host: str = HOST,
    boot: str = BOOT,
) -> RemoteLease:
    return RemoteLease(
        host, port, boot, LeaseName(slot=slot, epoch=f"{slot + 1:015x}"), lease_s
    )


def received(listener: RecordingListener) -> list[Renew | Release]:
    messages = []
    while not listener.inbox.empty():
        messages.append(listener.inbox.get())
    return messages


def test_a_kept_lease_is_renewed_about_six_times_in_its_life_until_it_is_dropped(
    renewer: LeaseRenewer,
) -> None:
    with listening() as (listener, port):
        start_s = time.monotonic()
        renewer.submit([RenewLease(lease(port))])
        times = []
        for _ in range(6):
            assert listener.inbox.get(timeout=10) == Renew(
                boot=BOOT, leases=(lease(port).name,)
            )
            times.append(time.monotonic() - start_s)
        assert times[0] >= SHORT_S / HEARTBEATS_PER_LEASE * 0.9, (
            "renewed before anything was over"
        )
        assert times[-1] >= SHORT_S * 0.9
        renewer.submit(
            [
                ForgetLease(lease(port)),
                RenewLease(lease(port, 2, lease_s=LONG_S)),
                ReleaseLease(lease(port, 2, lease_s=LONG_S)),
            ]
        )
        while (message := listener.inbox.get(timeout=10)) != _release(port, 2):
            assert isinstance(message, Renew)
        time.sleep(SHORT_S)
        assert received(listener) == [], "a dropped lease is still renewed"


def _release(port: int, slot: int) -> Release:
    return Release(boot=BOOT, leases=(lease(port, slot).name,))


def test_more_leases_than_a_message_holds_are_renewed_in_several(
    renewer: LeaseRenewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.link.renewer.MAX_RENEWALS", 20)
    with listening() as (listener, port):
        renewer.submit(RenewLease(lease(port, slot)) for slot in range(50))
        renewals = [listener.inbox.get(timeout=10) for _ in range(3)]
        assert [len(renewal.leases) for renewal in renewals] == [20, 20, 10]
        assert {name.slot for renewal in renewals for name in renewal.leases} == set(
            range(50)
        )


def test_each_lease_of_a_producer_is_renewed_at_its_own_interval_however_short_a_forged_one(
    renewer: LeaseRenewer, counters: Counters
) -> None:
    """With the shortest interval for all, 500 leases beside one of 0.05 s were renewed 52,856 times a second."""
    with listening() as (listener, port):
        start_s = time.monotonic()
        renewer.submit(
            RenewLease(lease(port, slot, lease_s=LONG_S)) for slot in range(500)
        )
        renewer.submit(
            [RenewLease(lease(port, 501)), RenewLease(lease(port, 500, lease_s=0.05))]
        )
        for _ in range(6):
            renewal = listener.inbox.get(timeout=10)
            assert {name.slot for name in renewal.leases} == {500, 501}
        assert counters.total("heartbeats") <= 2 * (
            1 + (time.monotonic() - start_s) * HEARTBEATS_PER_LEASE
        )


def test_a_turn_looks_at_no_lease_that_is_not_due(renewer: LeaseRenewer) -> None:
    """Every abort makes a turn: with 16,000 leases it took the thread, and Python's lock, milliseconds."""
    counted = StepCount()
    counted.wrap(renewer, ["_renew_due"])

    def with_leases(count: int) -> float:
        for slot in range(count):
            renewer._carry_out(
                RenewLease(lease(1, slot, lease_s=LONG_S)), time.monotonic()
            )
        return counted.median(lambda: renewer._renew_due(time.monotonic()), 5)

    few = with_leases(10)
    assert with_leases(2000) == few


def test_after_a_bug_that_keeps_a_renewal_from_being_sent_the_thread_sleeps_and_still_releases(
    renewer: LeaseRenewer, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_interval_s", lambda lease: 1 / 0)
    monkeypatch.setattr(limits, "AFTER_BUG_S", 3600.0)
    with listening() as (listener, port):
        renewer.submit([RenewLease(lease(port), at_once=True)])
        wait_until(
            lambda: counters.total("side_channel_errors") == 1, "the renewal has failed"
        )
        renewer.submit([ReleaseLease(lease(port, 2))])
        assert listener.inbox.get(timeout=10) == _release(port, 2)
        assert counters.total("side_channel_errors") <= 3, (
            "one each turn, and a release costs two at most"
        )


def test_commands_that_cause_an_internal_error_do_not_fill_the_log(
    renewer: LeaseRenewer,
    counters: Counters,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(renewer.links, "to", fail)
    monkeypatch.setattr(
        renewer, "_bugs", RateLimitedLog(logging.getLogger("kvferry.test"), 3600.0)
    )
    renewer.submit(ReleaseLease(lease(1, number)) for number in range(20))
    wait_until(
        lambda: counters.total("side_channel_errors") == 20, "all of them have failed"
    )
    renewer.close()
    assert len(caplog.records) == 1


def test_a_lease_that_is_shorter_than_the_sleep_is_renewed_in_time(
    renewer: LeaseRenewer,
) -> None:
    with listening() as (listener, port):
        renewer.submit([RenewLease(lease(port, 1, lease_s=LONG_S))])
        wait_until(
            lambda: renewer.snapshot().is_up_to_date,
            "it has not been taken",
        )
        start_s = time.monotonic()
        renewer.submit([RenewLease(lease(port, 2))])
        renewal = listener.inbox.get(timeout=10)
        assert {name.slot for name in renewal.leases} == {2}
        assert time.monotonic() - start_s < LONG_S / HEARTBEATS_PER_LEASE


def test_submissions_that_wait_for_the_renewer_are_bounded(
    renewer: LeaseRenewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.link.limits.MAX_SUBMISSIONS", 100)
    port = free_port()
    renewer.submit([RenewLease(lease(port, lease_s=LONG_S))])
    wait_until(
        lambda: renewer.snapshot().is_up_to_date,
        "it has not been taken",
    )
    for slot in range(2, 102):
        renewer.submit([RenewLease(lease(port, slot, lease_s=LONG_S))])
    wait_until(lambda: not renewer.snapshot().submissions, "too much waits")


@pytest.mark.parametrize(
    "sleeps_until_s", [math.inf, 0.0], ids=["asleep", "a renewal was due"]
)
def test_what_is_submitted_just_after_the_thread_has_taken_the_rest_is_not_left_waiting(
    renewer: LeaseRenewer,
    counters: Counters,
    monkeypatch: pytest.MonkeyPatch,
    sleeps_until_s: float,
) -> None:
    take_all = renewer._take_all
    with listening() as (_, port):
        late = iter([ReleaseLease(lease(port, 2))])

        def take_all_then_submit() -> None:
            take_all()
            renewer._sleeps_until_s = sleeps_until_s
            renewer.submit(itertools.islice(late, 1))

        monkeypatch.setattr(renewer, "_take_all", take_all_then_submit)
        renewer.submit([ReleaseLease(lease(port))])
        wait_until(
            lambda: counters.total("leases_given_back") == 2, "both are carried out"
        )


@pytest.mark.parametrize(
    ("host", "theirs", "ours"),
    [(HOST, (), ()), ("localhost", (), ()), (HOST, (NEW,), (OLD, NEW))],
    ids=["address", "name", "second secret"],
)
def test_closing_sends_everything_that_was_submitted(
    host: str,
    theirs: Secrets,
    ours: Secrets,
    counters: Counters,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "JOIN_S", LONGEST_JOIN_S)
    with listening(secrets=theirs) as (listener, port):
        renewer = renewing(counters, ours)
        renewer.submit(ReleaseLease(lease(port, slot, host=host)) for slot in range(30))
        start_s = time.monotonic()
        renewer.close()
        renewer.close()
        assert time.monotonic() - start_s < LONGEST_JOIN_S / 2, "the thread ends itself"
        assert [
            listener.inbox.get(timeout=10).leases[0].slot for _ in range(30)
        ] == list(range(30))


def renewed_while(
    renewer: LeaseRenewer, disturb: Callable[[], None], secrets: Secrets = ()
) -> None:
    """A good producer's lease is renewed again and again while others never answer."""
    with listening(secrets=secrets) as (listener, port):
        renewer.submit([RenewLease(lease(port, lease_s=0.6))])
        disturb()
        for _ in range(5):
            assert isinstance(listener.inbox.get(timeout=60), Renew)


def test_dead_producers_delay_no_other(
    renewer: LeaseRenewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CONNECT_S", 3600.0)  # none of them is given up
    dead = [lease(free_port(), slot, lease_s=0.06) for slot in range(20)]
    renewed_while(renewer, lambda: renewer.submit(RenewLease(one) for one in dead))


def test_a_name_server_that_does_not_answer_delays_no_other_producer(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked up by ZMQ itself, three such names were measured to stop every renewal for minutes."""
    answer = threading.Event()
    looking: list[str] = []

    def never(host: str) -> str:
        looking.append(host)
        answer.wait()
        raise OSError("no such host")

    monkeypatch.setattr(host_names, "look_up", never)
    renewer = renewing(counters, allowed=AllowedHosts.from_entries(["*"]))
    try:
        lost = [
            lease(5600, slot, host=f"slow-{slot % 3}.example", lease_s=0.06)
            for slot in range(9)
        ]
        renewed_while(renewer, lambda: renewer.submit(RenewLease(one) for one in lost))
        assert set(looking) == {f"slow-{number}.example" for number in range(3)}
        assert len(looking) == 3, "a name is looked up twice at once"
    finally:
        answer.set()
        renewer.close()


@pytest.mark.parametrize(
    "host",
    [
        "no such host",
        "256.256.256.256",
        "*",
        "a" * 300,
        "é" * 70 + ".example",
        "host;1.2.3.4",
    ],
)
def test_a_hostile_host_is_counted_and_the_renewer_lives_on(
    renewer: LeaseRenewer, counters: Counters, host: str
) -> None:
    renewer.submit(
        [RenewLease(lease(5600, host=host)), ReleaseLease(lease(5600, host=host))]
    )
    wait_until(
        lambda: counters.total("side_channel_errors") >= 1,
        "the error is counted",
        timeout_s=30,
    )
    with listening() as (listener, port):
        renewer.submit([ReleaseLease(lease(port))])
        assert listener.inbox.get(timeout=10) == _release(port, 1)


@pytest.mark.parametrize(
    "secrets", [((), ()), ((OLD,), (NEW,))], ids=["plain", "with the next secret"]
)
def test_a_producer_that_restarts_at_its_address_is_renewed_again(
    secrets: tuple[Secrets, Secrets], counters: Counters
) -> None:
    port = free_port()
    renewer = renewing(counters, secrets[0] + secrets[1])
    try:
        for boot, theirs in zip((BOOT, "f" * 32), secrets, strict=True):
            renewer.submit([RenewLease(lease(port, lease_s=0.12, boot=boot))])
            listener = RecordingListener(HOST, port, Counters(), theirs)
            try:
                while listener.inbox.get(timeout=30.0).boot != boot:
                    pass
            finally:
                listener.close()
    finally:
        renewer.close()
