"""The counters of engines: `/metrics` as numbers, and the prompt tokens that the log says were computed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

Key = tuple[str, tuple[tuple[str, str], ...]]
_STEP = re.compile(rb"Iteration\(\d+\): (\d+) context requests, (\d+) context tokens")


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one moment, or the difference of two: (name, sorted labels) → value."""

    samples: Mapping[Key, float] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """Sum over all samples of that name with these labels. Counters end in `_total`, histograms in `_sum` …"""
        wanted = set(labels.items())
        return sum(
            value
            for (sample, pairs), value in self.samples.items()
            if sample == name and wanted <= set(pairs)
        )

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Totals by the values of one label, without zeroes."""
        found: dict[str, float] = {}
        for (sample, pairs), value in self.samples.items():
            if sample == name:
                key = dict(pairs).get(label, "")
                found[key] = found.get(key, 0.0) + value
        return {value: total for value, total in found.items() if total}

    def label(self, name: str, label: str) -> str | None:
        """The value of one label of the first sample of that name."""
        return next(
            (
                dict(pairs).get(label)
                for sample, pairs in self.samples
                if sample == name
            ),
            None,
        )

    def __sub__(self, earlier: Scrape) -> Scrape:
        """The increase since an earlier scrape."""
        return Scrape(
            {
                key: value - earlier.samples.get(key, 0.0)
                for key, value in self.samples.items()
            }
        )


def parse_metrics(text: str) -> Scrape:
    """Parse the exposition format."""
    families = text_string_to_metric_families(text)
    samples = [
        sample
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    return together(
        Scrape({(each.name, tuple(sorted(each.labels.items()))): each.value})
        for each in samples
    )


def scrape(base_url: str, timeout_s: float = 30.0) -> Scrape:
    """Ask one engine.

    Raises:
        httpx.HTTPError: it did not answer.
    """
    answer = httpx.get(base_url + "/metrics", timeout=timeout_s, trust_env=False)
    answer.raise_for_status()
    return parse_metrics(answer.text)


def together(scrapes: Iterable[Scrape]) -> Scrape:
    """The sum of several engines' samples."""
    samples: dict[Key, float] = {}
    for each in scrapes:
        for key, value in each.samples.items():
            samples[key] = samples.get(key, 0.0) + value
    return Scrape(samples)


class IterationLog:
    """Counts the prompt tokens that an engine really computed, by what vLLM logs of each step
    (`--enable-logging-iteration-details`). `/metrics` has what was matched, this what was run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def computed(self) -> tuple[int, int]:
        """Requests whose prompt was computed since this was made, and their tokens, summed over steps: a prompt that is
        computed in one step counts once."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            steps = [
                (int(requests), int(tokens))
                for requests, tokens in _STEP.findall(file.read())
            ]
        return sum(requests for requests, _ in steps), sum(
            tokens for _, tokens in steps
        )
