"""Renewals when producers are dead, silent, hostile, refuse, or come back: the others are renewed in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from kvferry.protocol.handshake import Renew
from kvferry.protocol.side_channel import host_names
from kvferry.protocol.side_channel.secrets import Secrets
from kvferry.scheduler.consumer.remote_prompt import ReleaseLease, RemoteLease, RenewLease
from kvferry.scheduler.side_channel.heartbeat import LeaseRenewer
from kvferry.scheduler.state import Counters
from tests.protocol.samples import BOOT
from tests.protocol.secret_files import NEW, OLD, OTHER
from tests.scheduler.channel import HOST, RecordingListener, free_port, listening
from tests.scheduler.test_renewer import _release, lease
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def renewed_on_time(renewer: LeaseRenewer, disturb: Callable[[], None], secrets: Secrets = ()) -> None:
    """A good producer's lease is renewed within its time, whatever happens to others."""
    with listening(secrets=secrets) as (listener, port):
        renewer.submit([RenewLease(lease(port, lease_s=3.0))])
        disturb()
        for _ in range(5):
            before_s = time.monotonic()
            assert isinstance(listener.inbox.get(timeout=10), Renew)
            assert time.monotonic() - before_s < 3.0, "the lease would have expired"


def test_dead_producers_delay_no_other(renewer: LeaseRenewer) -> None:
    dead = [lease(free_port(), slot, lease_s=0.06) for slot in range(20)]
    renewed_on_time(renewer, lambda: renewer.submit(RenewLease(one) for one in dead))


def test_producers_without_the_secret_delay_no_other(counters: Counters) -> None:
    renewer = LeaseRenewer(counters, (OLD, NEW))
    try:
        with listening(secrets=(OTHER,)) as (_, wrong), listening() as (_, plain):
            refused = [lease(port, slot, lease_s=0.06) for slot, port in enumerate([wrong, plain] * 10)]
            renewed_on_time(renewer, lambda: renewer.submit(RenewLease(one) for one in refused), (NEW,))
        assert counters.total("side_channel_errors") > 0
    finally:
        renewer.close()


def test_a_name_server_that_does_not_answer_delays_no_other_producer(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked up by ZMQ itself, three such names were measured to stop every renewal for minutes."""
    answer = threading.Event()
    looking: list[str] = []

    def never(host: str) -> str | None:
        looking.append(host)
        answer.wait(30)
        return None

    monkeypatch.setattr(host_names, "look_up", never)
    renewer = LeaseRenewer(counters)
    try:
        lost = [lease(5600, slot, host=f"slow-{slot % 3}.example", lease_s=0.06) for slot in range(9)]
        renewed_on_time(renewer, lambda: renewer.submit(RenewLease(one) for one in lost))
        assert set(looking) == {f"slow-{number}.example" for number in range(3)}
        assert len(looking) == 3, "a name is looked up twice at once"
    finally:
        answer.set()
        renewer.close()


@pytest.mark.parametrize(
    "host", ["no such host", "256.256.256.256", "*", "a" * 300, "é" * 70 + ".example", "host;1.2.3.4"]
)
def test_a_hostile_host_is_counted_and_the_renewer_lives_on(
    renewer: LeaseRenewer, counters: Counters, host: str
) -> None:
    renewer.submit([RenewLease(lease(5600, host=host)), ReleaseLease(lease(5600, host=host))])
    wait_until(lambda: counters.total("side_channel_errors") >= 1, "the error is counted", timeout_s=30)
    with listening() as (listener, port):
        renewer.submit([ReleaseLease(lease(port))])
        assert listener.inbox.get(timeout=10) == _release(port, 1)


def test_an_unexpected_exception_does_not_stop_it(renewer: LeaseRenewer, counters: Counters) -> None:
    broken = msgspec.structs.replace(lease(1).name, epoch=object())
    renewer.submit([ReleaseLease(RemoteLease(HOST, 1, BOOT, broken, 1.0))])
    wait_until(lambda: counters.total("side_channel_errors") == 1, "the error is counted")
    with listening() as (listener, port):
        renewer.submit([ReleaseLease(lease(port))])
        assert listener.inbox.get(timeout=10) == _release(port, 1)


@pytest.mark.parametrize("secrets", [((), ()), ((OLD,), (NEW,))], ids=["plain", "with the next secret"])
def test_a_producer_that_restarts_at_its_address_is_renewed_again(
    secrets: tuple[Secrets, Secrets], counters: Counters
) -> None:
    port = free_port()
    renewer = LeaseRenewer(counters, secrets[0] + secrets[1])
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
