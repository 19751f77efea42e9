"""Results for the step thread, which may wait for a load if it has nothing else to do."""

from __future__ import annotations

import threading
import time

import pytest

from kvferry.protocol.orders import FailureReason
from kvferry.worker.loads.results import ResultBox

LONG_S = 30.0


def end_load(box: ResultBox, *, well: bool) -> None:
    with box as results:
        if well:
            results.loaded.add("one")
        else:
            results.failed["one"] = FailureReason.TRANSFER


@pytest.mark.parametrize("well", [True, False])
def test_who_waits_for_a_load_goes_on_when_one_has_ended(well: bool) -> None:
    box = ResultBox()
    ends = threading.Thread(target=end_load, args=(box,), kwargs={"well": well})
    started_s = time.monotonic()
    ends.start()
    box.wait_for_load(LONG_S)
    ends.join()
    assert time.monotonic() - started_s < LONG_S
    taken = box.take()
    assert taken.loaded | taken.failed.keys() == {"one"}


def test_an_ended_load_is_not_waited_for_again() -> None:
    box = ResultBox()
    end_load(box, well=True)
    box.wait_for_load(LONG_S)
    box.take()
    started_s = time.monotonic()
    box.wait_for_load(0.05)
    assert 0.05 <= time.monotonic() - started_s < LONG_S


def test_other_results_end_no_wait() -> None:
    box = ResultBox()
    with box as results:
        results.sent.add("lease")
    started_s = time.monotonic()
    box.wait_for_load(0.05)
    assert time.monotonic() - started_s >= 0.05
    assert box.take().sent == {"lease"}
