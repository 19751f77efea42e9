"""Workers ring when a load has ended; a scheduler relies on it once each of them has rung."""

from __future__ import annotations

import select
import uuid
from collections.abc import Iterator

import pytest

from kvferry.protocol.load_notifier import LoadListener, LoadNotifier

BOOT = uuid.uuid4().hex


@pytest.fixture
def wakes() -> list[None]:
    return []


@pytest.fixture
def bell(wakes: list[None]) -> Iterator[LoadListener]:
    made = LoadListener(BOOT, 2, lambda: wakes.append(None))
    yield made
    made.close()


def ring(index: int, boot: str = BOOT, times: int = 1) -> None:
    rope = LoadNotifier(index)
    rope.tie(boot)
    for _ in range(times):
        rope.ring()


def is_readable(bell: LoadListener) -> bool:
    return bool(select.select([bell.fileno()], [], [], 0)[0])


def test_a_ring_wakes_and_the_bell_is_proven_when_each_worker_has_rung(
    bell: LoadListener, wakes: list[None]
) -> None:
    for index, proven in ((0, False), (0, False), (1, True)):
        silent = [bell.is_silent]
        ring(index)
        assert is_readable(bell)
        bell.take_rings()
        assert [*silent, bell.is_silent] == [True, False]
        assert bell.is_proven is proven
        bell.begin_step()
    assert len(wakes) == 3


def test_a_bell_is_silent_again_when_the_steps_that_overlap_have_begun() -> None:
    bell = LoadListener(BOOT, 1, lambda: None, depth=3)
    ring(0)
    bell.take_rings()
    silent = []
    for _ in range(4):
        silent.append(bell.is_silent)
        bell.begin_step()
    assert silent == [False, False, False, True]
    bell.close()


def test_rings_that_are_not_taken_block_no_worker_and_are_taken_at_once(
    bell: LoadListener, wakes: list[None]
) -> None:
    ring(0, times=10_000)
    bell.take_rings()
    assert not is_readable(bell)
    assert len(wakes) == 1


def test_without_a_bell_a_worker_rings_in_vain(bell: LoadListener) -> None:
    ring(0, boot=uuid.uuid4().hex)
    LoadNotifier(0).ring()
    assert not is_readable(bell)


def test_a_second_bell_of_the_same_boot_is_never_proven(bell: LoadListener) -> None:
    second = LoadListener(BOOT, 1, lambda: None)
    ring(0)
    second.take_rings()
    assert not second.is_proven
    assert is_readable(bell)
    second.close()
