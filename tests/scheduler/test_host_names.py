"""Host names are looked up without blocking the caller."""

from __future__ import annotations

import queue
import threading

import pytest

from kvferry.scheduler.side_channel.addresses import MAX_LOOKUPS, Found, HostNames, address_of, look_up


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::1", "::1"),
        ("[fe80::1]", "fe80::1"),
        ("localhost", None),
        ("1.2.3", None),
        ("", None),
    ],
)
def test_an_address_needs_no_look_up(host: str, address: str | None) -> None:
    assert address_of(host) == address


def test_localhost_is_the_address_that_a_listener_on_it_binds() -> None:
    assert look_up("localhost") == "127.0.0.1"


@pytest.mark.parametrize("host", ["no such host", "a" * 300, "é" * 70 + ".example", "..", "\udc80"])
def test_a_host_that_does_not_exist_has_no_address(host: str) -> None:
    assert look_up(host) is None


def test_calls_during_a_look_up_share_it_and_later_ones_look_up_again() -> None:
    asked: list[str] = []
    answer = threading.Event()
    reported: queue.SimpleQueue[Found] = queue.SimpleQueue()

    def ask(host: str) -> str | None:
        asked.append(host)
        answer.wait(30)
        return "10.0.0.9"

    names = HostNames(reported.put, ask)
    for _ in range(5):
        names.find("peer")
    answer.set()
    assert reported.get(timeout=10) == Found("peer", "10.0.0.9")
    names.find("peer")
    assert reported.get(timeout=10) == Found("peer", "10.0.0.9")
    assert reported.empty()
    assert asked == ["peer", "peer"]


def test_without_a_free_thread_a_look_up_fails_and_a_later_one_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    reported: queue.SimpleQueue[Found] = queue.SimpleQueue()
    names = HostNames(reported.put, lambda _: "10.0.0.9")
    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", none_left)
        names.find("peer")
        assert reported.get(timeout=10) == Found("peer", None)
    names.find("peer")
    assert reported.get(timeout=10) == Found("peer", "10.0.0.9")


def test_no_more_threads_than_allowed_look_names_up() -> None:
    answer = threading.Event()
    reported: queue.SimpleQueue[Found] = queue.SimpleQueue()
    names = HostNames(reported.put, lambda host: str(answer.wait(30)) and None)
    before = threading.active_count()
    for number in range(MAX_LOOKUPS + 10):
        names.find(f"slow-{number}")
    assert threading.active_count() - before <= MAX_LOOKUPS
    assert {reported.get(timeout=10).host for _ in range(10)} == {
        f"slow-{MAX_LOOKUPS + number}" for number in range(10)
    }
    answer.set()
    for _ in range(MAX_LOOKUPS):
        assert reported.get(timeout=10).address is None
