"""A queue that its reader waits for together with sockets: nothing is lost, and nothing wakes it for ever."""

from __future__ import annotations

import queue
import select
import threading

import pytest

from kvferry.scheduler.side_channel.inbox import WakingQueue

WRITERS, EACH = 4, 2000


def test_everything_that_many_threads_put_arrives_in_each_ones_order() -> None:
    waking: WakingQueue[tuple[int, int]] = WakingQueue()

    def write(writer: int) -> None:
        for number in range(EACH):
            waking.put((writer, number))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(WRITERS)]
    for thread in threads:
        thread.start()
    last = [-1] * WRITERS
    for _ in range(WRITERS * EACH):
        while True:
            try:
                writer, number = waking.get()
                break
            except queue.Empty:
                assert not waking.empty() or select.select([waking], [], [], 30.0)[0], "a put has not woken the reader"
        assert number == last[writer] + 1
        last[writer] = number
    for thread in threads:
        thread.join()
    assert last == [EACH - 1] * WRITERS
    waking.close()


def test_an_empty_queue_is_not_readable_after_its_reader_has_looked() -> None:
    waking: WakingQueue[int] = WakingQueue()
    for number in range(3):
        waking.put(number)
    assert select.select([waking], [], [], 0)[0]
    assert [waking.get() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(queue.Empty):
        waking.get()
    assert not select.select([waking], [], [], 0)[0], "its reader would spin"
    waking.close()


def test_a_reader_that_is_awake_is_not_woken_again() -> None:
    waking: WakingQueue[int] = WakingQueue()
    for number in range(100):
        waking.put(number)
    assert len(waking._readable.recv(1000)) == 1
    waking.close()


def test_a_put_between_two_looks_of_the_reader_wakes_it_again() -> None:
    waking: WakingQueue[int] = WakingQueue()
    for number in range(3):
        waking.put(number)
        assert select.select([waking], [], [], 0)[0], "the reader would not be woken for it"
        assert waking.get() == number
        with pytest.raises(queue.Empty):
            waking.get()
    waking.close()


def test_a_put_after_close_has_no_effect() -> None:
    waking: WakingQueue[int] = WakingQueue()
    waking.close()
    for number in range(3):
        waking.put(number)
    assert waking.get() == 0


def test_puts_that_are_never_taken_do_not_wait() -> None:
    """The wake-up socket fills up; the queue does not."""
    waking: WakingQueue[int] = WakingQueue()
    for number in range(5000):
        waking.put(number)
    assert [waking.get() for _ in range(5000)] == list(range(5000))
    waking.close()
