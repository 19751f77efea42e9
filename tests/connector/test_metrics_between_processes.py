"""Several front ends of one engine: each gets some of its steps, and `/metrics` is made of what all of them wrote."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values
from prometheus_client.multiprocess import MultiProcessCollector

from kvferry.connector.metrics.prometheus import FerryPromMetrics
from kvferry.connector.metrics.tables import GAUGES
from tests.connector.step_stats import step_stats
from tests.harness.core.configs import vllm_config


class FrontEnds:
    """Two processes that write to one folder, as vLLM's API servers do; here they take turns in one process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
        self._folder = folder
        self._metrics = []
        config = vllm_config("NixlConnector", module="kvferry.connector")
        for process in (101, 102):
            identified = values.MultiProcessValue(
                process_identifier=lambda process=process: process
            )
            monkeypatch.setattr(values, "ValueClass", identified)
            registry = CollectorRegistry()
            types = {
                kind: functools.partial(kind, registry=registry)
                for kind in (Counter, Gauge, Histogram)
            }
            self._metrics.append(
                (
                    identified,
                    FerryPromMetrics(config, types, ["engine"], {0: ["0"], 1: ["1"]}),
                )
            )
        self._monkeypatch = monkeypatch

    def observe(
        self,
        process: int,
        counts: dict[tuple[str, str], float] | None = None,
        samples: dict[str, list[float]] | None = None,
        gauges: dict[str, float] | None = None,
        engine: int = 0,
    ) -> None:
        """A step of an engine reaches this process."""
        identified, metrics = self._metrics[process]
        self._monkeypatch.setattr(
            values, "ValueClass", identified
        )  # for children that are made now
        reported = step_stats(counts or {}, samples or {}, gauges or {})
        metrics.observe(reported.to_dict(), engine)

    def value(self, name: str, engine: int = 0, **labels: str) -> Any:
        """The result of a scrape, which does not depend on the process that answers."""
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(self._folder))
        return registry.get_sample_value(
            f"vllm:{name}", {"engine": str(engine), **labels}
        )


@pytest.fixture
def front_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FrontEnds:
    return FrontEnds(monkeypatch, tmp_path)


def test_counters_and_histograms_are_added_up_over_processes(
    front_ends: FrontEnds,
) -> None:
    front_ends.observe(
        0, {("loads", ""): 2, ("placed_loads", "staged"): 1}, {"queue_s": [0.1]}
    )
    front_ends.observe(
        1, {("loads", ""): 3, ("placed_loads", "staged"): 1}, {"queue_s": [0.2, 0.3]}
    )
    assert front_ends.value("kvferry_loads_total") == 5
    assert front_ends.value("kvferry_placed_loads_total", plan="staged") == 2
    assert front_ends.value("kvferry_load_queue_seconds_count") == 3
    assert front_ends.value("kvferry_loads_total", 1) == 0


@pytest.mark.parametrize("name", GAUGES)
def test_of_a_gauge_the_latest_word_counts_whichever_process_it_came_to(
    front_ends: FrontEnds, name: str
) -> None:
    exported = GAUGES[name].exported
    assert front_ends.value(exported) is None, "not 0, before the first report"
    for process, value in ((0, 7.0), (1, 5.0), (0, 6.0), (1, 0.0)):
        front_ends.observe(process, gauges={name: value})
        assert front_ends.value(exported) == value
    front_ends.observe(0, gauges={name: 9.0}, engine=1)
    assert (front_ends.value(exported), front_ends.value(exported, 1)) == (0.0, 9.0), (
        "engines have their own"
    )


def test_producers_that_appear_later_are_exported_and_added_up(
    front_ends: FrontEnds,
) -> None:
    front_ends.observe(0, {("peer_bytes", "10.0.0.1:5600"): 100})
    front_ends.observe(
        1, {("peer_bytes", "10.0.0.1:5600"): 20, ("peer_bytes", "10.0.0.2:5600"): 3}
    )
    assert front_ends.value("kvferry_peer_bytes_total", peer="10.0.0.1:5600") == 120
    assert front_ends.value("kvferry_peer_bytes_total", peer="10.0.0.2:5600") == 3
    assert front_ends.value("kvferry_peer_bytes_total", peer="other") == 0
