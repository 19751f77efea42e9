"""All reports of an engine's workers, joined as vLLM's aggregator joins them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kvferry.protocol.orders import FailureReason
from kvferry.worker.loads.results import LoadRecord, StepResults


@dataclass(frozen=True)
class Over:
    """Requests that a report has brought to their end."""

    sent: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@dataclass
class Seen:
    """All reports of an engine's workers.

    Attributes:
        sent, loaded: requests that every worker has reported, in order.
        failed: requests that a worker has reported as failed, and the reason of the first one.
        sent_by: the workers that have reported a request as sent.
        reports: per load, by worker: None when it is good there, or the reason.
        alive_at: by worker, failed requests whose blocks may still be written.
        counts: what the workers have counted besides.
    """

    sent: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    failed: dict[str, FailureReason] = field(default_factory=dict)
    sent_by: dict[str, set[int]] = field(default_factory=dict)
    reports: dict[str, dict[int, FailureReason | None]] = field(default_factory=dict)
    alive_at: dict[int, frozenset[str]] = field(default_factory=dict)
    load_records: list[LoadRecord] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def alive(self) -> frozenset[str]:
        """Failed requests whose blocks some worker may still write."""
        return frozenset().union(*self.alive_at.values())

    @property
    def totals(self) -> list[LoadRecord]:
        """Records of the good loads."""
        return [load for load in self.load_records if load.reason is None]

    def is_over(self, request_id: str) -> bool:
        """Whether a load is good on all workers, or failed on one."""
        return request_id in self.failed or request_id in self.loaded

    def add(self, index: int, workers: int, results: StepResults) -> Over:
        """The results of one of so many workers. The first failure ends a load, the last good report completes it.

        Raises:
            AssertionError: the worker has reported one of the requests before.
        """
        over = Over()
        self.load_records += results.load_records
        if results.still_written is not None:
            self.alive_at[index] = results.still_written
        self.counts.update(results.counts)
        for request_id in results.sent:
            by = self.sent_by.setdefault(request_id, set())
            assert index not in by, f"worker {index} reports {request_id} as sent again"
            by.add(index)
            if len(by) == workers:
                over.sent.append(request_id)
        for request_id, reason in [
            *dict.fromkeys(results.loaded).items(),
            *results.failed.items(),
        ]:
            reports = self.reports.setdefault(request_id, {})
            assert index not in reports, (
                f"worker {index} reports the load of {request_id} again"
            )
            reports[index] = reason
            if reason is not None and request_id not in self.failed:
                self.failed[request_id] = reason
                over.failed.append(request_id)
            elif request_id not in self.failed and len(reports) == workers:
                over.loaded.append(request_id)
        self.sent += over.sent
        self.loaded += over.loaded
        return over
