"""Host names are looked up without blocking the caller."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Sequence

import pytest

from kvferry.link import host_names, limits
from kvferry.link.host_names import HostNames, listening_address, look_up, plain_address
from kvferry.link.limits import MAX_LOOKUPS
from kvferry.protocol.errors import HandshakeFailed
from tests.link.channel import threads_named


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::1", "::1"),
        ("[fe80::1]", "fe80::1"),
        ("localhost", None),
        ("1.2.3", "1.2.0.3"),
        ("[::ffff:10.0.0.1]", "10.0.0.1"),
        ("fe80::1%eth0", None),
        ("", None),
    ],
)
def test_an_address_needs_no_look_up(host: str, address: str | None) -> None:
    assert plain_address(host) == address


def test_localhost_is_the_address_that_a_listener_on_it_binds() -> None:
    assert look_up("localhost") == "127.0.0.1"


@pytest.mark.parametrize(
    "host", ["no such host", "a" * 300, "é" * 70 + ".example", "..", "\udc80"]
)
def test_a_host_that_does_not_exist_has_no_address(host: str) -> None:
    with pytest.raises(OSError) as refused:  # noqa: PT011 - the system's text
        look_up(host)
    assert str(refused.value)


def test_the_systems_reason_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "the server does not answer")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    said = "cannot be looked up: the server does not answer"
    with pytest.raises(HandshakeFailed, match=said):
        asyncio.run(HostNames().address("peer"))
    with pytest.raises(OSError, match=said):
        listening_address("peer")


async def _found(names: HostNames, host: str) -> str | None:
    with contextlib.suppress(HandshakeFailed):
        return await names.address(host)
    return None


async def find(names: HostNames, hosts: Sequence[str]) -> list[str | None]:
    return await asyncio.gather(*(_found(names, host) for host in hosts))


def test_calls_during_a_look_up_share_it_and_later_ones_look_up_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def look_up(host: str) -> str:
        asked.append(host)
        return "10.0.0.9"

    async def run() -> None:
        names = HostNames()
        for _ in range(2):
            assert await find(names, ["peer"] * 5) == ["10.0.0.9"] * 5

    monkeypatch.setattr(host_names, "look_up", look_up)
    asyncio.run(run())
    assert asked == ["peer", "peer"]


def test_without_a_free_thread_a_look_up_fails_and_a_later_one_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        names = HostNames()
        with monkeypatch.context() as exhausted:
            exhausted.setattr(threading.Thread, "start", none_left)
            with pytest.raises(HandshakeFailed, match="no more threads"):
                await names.address("peer")
        assert await names.address("peer") == "10.0.0.9"

    monkeypatch.setattr(host_names, "look_up", lambda _: "10.0.0.9")
    asyncio.run(run())


def test_no_more_threads_than_allowed_look_names_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = threading.Event()
    before = threading.active_count()
    slow = [f"slow-{number}" for number in range(MAX_LOOKUPS)]

    def look_up(host: str) -> str:
        assert answer.wait(30)
        return host

    async def run() -> None:
        names = HostNames()
        waiting = asyncio.ensure_future(find(names, slow))
        await asyncio.sleep(0)
        assert (
            await find(names, [f"more-{number}" for number in range(10)]) == [None] * 10
        )
        assert threading.active_count() - before <= MAX_LOOKUPS
        answer.set()
        assert await waiting == slow

    monkeypatch.setattr(host_names, "look_up", look_up)
    asyncio.run(run())


def test_a_name_that_was_found_before_is_looked_up_however_many_names_a_client_has_made_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = threading.Event()

    def look_up(host: str) -> str:
        return "10.0.0.9" if host == "producer" else str(answer.wait(30))

    async def run() -> None:
        names = HostNames()
        assert await names.address("producer") == "10.0.0.9"
        waiting = asyncio.ensure_future(
            find(names, [f"slow-{number}" for number in range(MAX_LOOKUPS)])
        )
        await asyncio.sleep(0)
        assert await find(names, ["made-up", "producer"]) == [None, "10.0.0.9"]
        answer.set()
        await waiting

    monkeypatch.setattr(host_names, "look_up", look_up)
    asyncio.run(run())


def test_many_names_have_few_threads_as_long_as_they_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = [f"peer-{number}" for number in range(MAX_LOOKUPS)]
    answer = threading.Event()

    def look_up(host: str) -> str:
        assert answer.wait(60)
        return host

    async def run() -> None:
        looked_up = asyncio.ensure_future(find(HostNames(), hosts))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(threads_named("kvferry-host-name")) == limits.LOOKUPS_AT_ONCE
        answer.set()
        assert await looked_up == hosts

    monkeypatch.setattr(host_names, "look_up", look_up)
    monkeypatch.setattr(limits, "SLOW_LOOKUP_S", 60.0)
    asyncio.run(run())


def test_names_that_are_never_answered_keep_no_other_name_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = threading.Event()
    hanging = [f"slow-{number}" for number in range(MAX_LOOKUPS - 1)]

    def look_up(host: str) -> str:
        if host in hanging:
            assert answer.wait(60)
        return host

    async def run() -> None:
        names = HostNames()
        waiting = asyncio.ensure_future(find(names, hanging))
        await asyncio.sleep(0)
        assert await names.address("peer") == "peer"
        assert not waiting.done()
        answer.set()
        assert await waiting == hanging

    monkeypatch.setattr(host_names, "look_up", look_up)
    monkeypatch.setattr(limits, "SLOW_LOOKUP_S", 0.001)
    asyncio.run(run())
