"""`/metrics` as numbers: totals by name and labels, differences, quantiles of histograms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """The samples of one moment, or the difference of two."""

    samples: Mapping[Key, float] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """Sum over all samples of that name with these labels. Counters end in `_total`, histograms in `_sum` …"""
        wanted = set(labels.items())
        return sum(value for (sample, pairs), value in self.samples.items() if sample == name and wanted <= set(pairs))

    def has(self, name: str) -> bool:
        """Whether there is such a sample at all."""
        return any(sample == name for sample, _ in self.samples)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Totals by the values of one label, without zeroes."""
        found: dict[str, float] = {}
        for (sample, pairs), value in self.samples.items():
            if sample == name and value:
                found_at = dict(pairs).get(label, "")
                found[found_at] = found.get(found_at, 0.0) + value
        return found

    def label(self, name: str, label: str) -> str | None:
        """The value of one label of the first sample of that name."""
        return next((dict(pairs).get(label) for sample, pairs in self.samples if sample == name), None)

    def __sub__(self, earlier: Scrape) -> Scrape:
        """The increase since an earlier scrape."""
        return Scrape({key: value - earlier.samples.get(key, 0.0) for key, value in self.samples.items()})

    def quantile(self, name: str, share: float) -> float | None:
        """Estimate of a quantile from a histogram's buckets, linear within a bucket; None when it is empty.

        Example: buckets ≤ 1: 2 samples, ≤ 2: 4 samples; the quantile 0.75 is 1.5.
        """
        counts: dict[float, float] = {}
        for (sample, pairs), value in self.samples.items():
            if sample == f"{name}_bucket":
                edge = float(dict(pairs)["le"])
                counts[edge] = counts.get(edge, 0.0) + value
        edges = sorted(counts)
        if not edges or not counts[edges[-1]]:
            return None
        rank = share * counts[edges[-1]]
        low, below = 0.0, 0.0
        for edge in edges:
            if counts[edge] >= rank:
                if math.isinf(edge):
                    return low
                inside = counts[edge] - below
                return low + (edge - low) * ((rank - below) / inside if inside else 1.0)
            low, below = edge, counts[edge]
        return low


def parse_metrics(text: str) -> Scrape:
    """Parse the exposition format."""
    samples: dict[Key, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                key = (sample.name, tuple(sorted(sample.labels.items())))
                samples[key] = samples.get(key, 0.0) + sample.value
    return Scrape(samples)


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
