"""A step that has nothing to compute may wait for a load that is under way, and for nothing else."""

from __future__ import annotations

import threading
import time

from kvferry.worker.loads.results import StepResults
from tests.harness.engine import Engine, OrderedLoad
from tests.harness.rig import Rig

LONG_S = 30.0


def _stalled_load(rig: Rig) -> tuple[Engine, OrderedLoad, threading.Event]:
    """A load that goes on when the event is set."""
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    may_go_on = threading.Event()

    def stall() -> None:
        may_go_on.wait(LONG_S)

    consumer.fabric.on_data_read = stall
    return consumer, consumer.load(producer.prefill(10, 2).params), may_go_on


def test_a_step_with_a_timeout_reports_a_load_that_ends_meanwhile(rig: Rig) -> None:
    consumer, load, may_go_on = _stalled_load(rig)
    taken: list[StepResults] = []
    step = threading.Thread(target=lambda: taken.append(consumer.worker.take_results(LONG_S)))
    step.start()
    rig.engines[0].step()  # the producer's, by which the lease is ready
    may_go_on.set()
    step.join(LONG_S)
    assert [results.loaded for results in taken] == [{load.request_id}]


def test_a_step_does_not_wait_when_no_load_is_under_way(rig: Rig) -> None:
    producer, consumer = rig.pair()
    rig.transfer(producer, consumer)
    started_s = time.monotonic()
    consumer.worker.take_results(LONG_S)
    producer.worker.take_results(LONG_S)
    assert time.monotonic() - started_s < LONG_S / 2
