"""Workers notify when a load has ended; a scheduler relies on it once it has heard each of them."""

from __future__ import annotations

import select
import uuid
from collections.abc import Iterator
from contextlib import closing
from unittest import mock

import pytest

from kvferry.link.load_listener import INDEX_BYTES, LoadListener
from kvferry.worker.loads.results import LoadNotifier

BOOT = uuid.uuid4().hex


@pytest.fixture
def wakes() -> list[None]:
    return []


@pytest.fixture
def listener(wakes: list[None]) -> Iterator[LoadListener]:
    made = LoadListener(BOOT, 2, lambda: wakes.append(None))
    yield made
    made.close()


def notify(index: int, boot: str = BOOT, times: int = 1) -> None:
    with closing(LoadNotifier(index)) as notifier:
        notifier.boot = boot
        for _ in range(times):
            notifier.notify()


def is_readable(listener: LoadListener) -> bool:
    return bool(select.select([listener.fileno()], [], [], 0)[0])


def test_a_notification_wakes_and_all_workers_are_heard_when_each_has_notified(
    listener: LoadListener, wakes: list[None]
) -> None:
    for index, proven in ((0, False), (0, False), (1, True)):
        quiet = [listener.has_no_news]
        notify(index)
        assert is_readable(listener)
        listener.receive()
        assert [*quiet, listener.has_no_news] == [True, False]
        assert listener.hears_all_workers is proven
        listener.begin_step()
    assert len(wakes) == 3


def test_a_sender_without_end_does_not_hold_the_thread_that_receives(
    listener: LoadListener, wakes: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = iter([bytes(INDEX_BYTES)] * 100_000)
    monkeypatch.setattr(
        listener, "_socket", mock.Mock(recv=lambda _: next(endless), close=str)
    )
    listener.receive()
    assert len(wakes) == 1
    assert len(list(endless)) > 90_000


def test_there_is_no_news_again_when_the_steps_that_overlap_have_begun() -> None:
    listener = LoadListener(BOOT, 1, lambda: None, depth=3)
    notify(0)
    listener.receive()
    quiet = []
    for _ in range(4):
        quiet.append(listener.has_no_news)
        listener.begin_step()
    assert quiet == [False, False, False, True]
    listener.close()


def test_notifications_that_nobody_receives_block_no_worker_and_are_received_at_once(
    listener: LoadListener, wakes: list[None]
) -> None:
    notify(0, times=10_000)
    listener.receive()
    assert not is_readable(listener)
    assert len(wakes) == 1


def test_without_a_listener_a_worker_notifies_in_vain(listener: LoadListener) -> None:
    notify(0, boot=uuid.uuid4().hex)
    with closing(LoadNotifier(0)) as notifier:
        notifier.notify()
    assert not is_readable(listener)


def test_a_closed_notifier_tells_nobody(listener: LoadListener) -> None:
    notifier = LoadNotifier(0)
    notifier.boot = BOOT
    notifier.close()
    notifier.close()
    notifier.notify()
    assert not is_readable(listener)


def test_a_second_listener_of_the_same_boot_hears_nobody(
    listener: LoadListener,
) -> None:
    second = LoadListener(BOOT, 1, lambda: None)
    notify(0)
    second.receive()
    assert not second.hears_all_workers
    assert is_readable(listener)
    second.close()
