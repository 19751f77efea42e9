"""Plans, tables of descriptors and index arrays of one consumer worker.

    python -m bench.plan            # 100,000 blocks; writes results/plan.json
    python -m bench.plan --quick    # 1,000 blocks, seconds

One consumer worker of a Llama of 80 layers, tensor parallel 8 to 4 and 4 to 8, heads or tokens outermost in a block.
Times are processor time of the thread, the best of some repetitions: on a shared machine anything else says more about
the neighbours. Everything measured here runs on one thread, so on an idle machine it is the time on the wall.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from bench.command import quick_or_whole
from bench.figures import Results, Table, Target
from bench.llama import BLOCK_TOKENS, llama
from kvferry.plan.blocks import RequestBlocks, descriptor_pairs, pair_request
from kvferry.plan.descriptors import DescriptorTable, route_table
from kvferry.plan.planner import plan_transfer
from kvferry.plan.transfer_plan import Placing, TransferPlan
from kvferry.plan.waves import (
    SourceTable,
    Window,
    source_table,
    source_units,
    window_reads,
)
from kvferry.protocol.handshake import EngineDescription

MAX_PLAN_MS, MAX_PLAN_MB, MAX_REQUEST_MS = 50.0, 16.0, 1.0
"""Limits of a consumer worker's time and memory, per peer and per request."""
REQUEST_TOKENS = 8192
_WHAT = (
    "What one worker of a decode engine prepares when it meets a prefill engine, and for every request: the plan, the "
    "tables of descriptors, the index arrays. A Llama of 80 layers, tensor parallel 8 to 4 and 4 to 8, {blocks:,} "
    "blocks in every worker's cache."
)
_COLUMNS = ("pair", "placed", "plan and tables, ms", "memory, MB", "a request, ms")

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Case:
    """One pair of engines."""

    producer_tp: int
    consumer_tp: int
    layout: str
    blocks: int

    def __str__(self) -> str:
        return f"{self.layout} TP {self.producer_tp} → TP {self.consumer_tp}"

    def engines(self) -> tuple[EngineDescription, EngineDescription]:
        """Consumer and producer."""
        consumer = llama(
            "D", tp=self.consumer_tp, layout=self.layout, blocks=self.blocks
        )
        return consumer, llama(
            "P", tp=self.producer_tp, layout=self.layout, blocks=self.blocks
        )

    def request(self) -> RequestBlocks:
        """A request of at most `REQUEST_TOKENS` tokens, its blocks all over both caches."""
        draw = np.random.default_rng(1)
        count = min(REQUEST_TOKENS // BLOCK_TOKENS, self.blocks - 1)
        local, remote = (
            draw.permutation(np.arange(1, self.blocks))[:count].tolist()
            for _ in range(2)
        )
        return RequestBlocks(
            [local], [remote], 0, count * BLOCK_TOKENS, count * BLOCK_TOKENS
        )


@dataclass(frozen=True)
class Prepared:
    """A worker's state for a peer: its plan, tables for direct reads, and for staged ones."""

    plan: TransferPlan
    direct: tuple[DescriptorTable, ...]
    staged: tuple[tuple[SourceTable, ...], ...]

    @classmethod
    def of(cls, consumer: EngineDescription, producer: EngineDescription) -> Prepared:
        """Prepare the state of the consumer's first worker."""
        plan = plan_transfer(consumer, 0, producer)
        tables = (route_table(route, 0, 0, Placing.DIRECT) for route in plan.routes)
        direct = tuple(table for table in tables if table is not None)
        staged = tuple(
            tuple(source_table(source, 0) for source in route.sources)
            for route in plan.routes
        )
        return cls(plan, direct, staged)

    @property
    def placing(self) -> str:
        return "+".join(
            sorted(
                {
                    item.placing.value
                    for route in self.plan.routes
                    for item in route.slices
                }
            )
        )

    def index_arrays(
        self,
        consumer: EngineDescription,
        producer: EngineDescription,
        request: RequestBlocks,
    ) -> int:
        """Everything that a request needs before it is posted; returns the descriptors that it reads."""
        units = pair_request(self.plan, consumer.groups, producer.groups, request)
        count = sum(len(descriptor_pairs(table, units).remote) for table in self.direct)
        for table in (table for of in self.staged for table in of):
            found = source_units(table.source, units[table.source.tokens])
            count += len(
                window_reads(table, found, Window(0, table.runs, 0, len(found)))
            )
        return count


@dataclass(frozen=True)
class Measured:
    """Figures of one case."""

    placing: str
    plan_and_tables_ms: float
    peak_mb: float
    request_ms: float


def best_of(repeats: int, what: Callable[[], _Result]) -> tuple[float, _Result]:
    """Processor seconds of the best repetition, and the last result."""
    best_s = float("inf")
    for _ in range(repeats):
        start_s = time.thread_time()
        result = what()
        best_s = min(best_s, time.thread_time() - start_s)
    return best_s, result


def measure(case: Case, repeats: int) -> Measured:
    """Plan, prepare and index, for the first worker of the consumer."""
    consumer, producer = case.engines()
    both_s, prepared = best_of(repeats, lambda: Prepared.of(consumer, producer))
    tracemalloc.start()
    kept = Prepared.of(consumer, producer)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    request = case.request()
    request_s, _ = best_of(
        repeats * 4, lambda: kept.index_arrays(consumer, producer, request)
    )
    return Measured(
        placing=prepared.placing,
        plan_and_tables_ms=both_s * 1e3,
        peak_mb=peak_bytes / 1e6,
        request_ms=request_s * 1e3,
    )


def run(blocks: int, repeats: int, *, quick: bool) -> Results:
    """All cases."""
    sizes = ((8, 4), (4, 8))
    cases = [Case(*tp, layout, blocks) for layout in ("HND", "NHD") for tp in sizes]
    return results_of([(case, measure(case, repeats)) for case in cases], quick=quick)


def results_of(found: Sequence[tuple[Case, Measured]], *, quick: bool) -> Results:
    """A table and the limits."""
    plan_ms, index_ms = (
        max(one.plan_and_tables_ms for _, one in found),
        max(one.request_ms for _, one in found),
    )
    rows = [
        (str(case), one.placing, one.plan_and_tables_ms, one.peak_mb, one.request_ms)
        for case, one in found
    ]
    return Results(
        command="python -m bench.plan" + " --quick" * quick,
        what=_WHAT.format(blocks=found[0][0].blocks),
        tables=(Table("One consumer worker and one peer", _COLUMNS, rows),),
        targets=(
            Target.at_most(
                "plan and tables of a peer, the slowest case",
                plan_ms,
                MAX_PLAN_MS,
                "ms",
            ),
            Target.at_most(
                "memory for that, the most",
                max(one.peak_mb for _, one in found),
                MAX_PLAN_MB,
                "MB",
            ),
            Target.at_most(
                "index arrays of an 8,192-token request, the slowest case",
                index_ms,
                MAX_REQUEST_MS,
                "ms",
            ),
        ),
        notes=(
            "Times are processor time of the one thread that works, the best of several.",
        ),
        quick=quick,
    )


def main() -> int:
    """Measure, print, write."""
    blocks = {False: 100_000, True: 1000}
    return quick_or_whole(
        "plan",
        __doc__,
        "1,000 blocks",
        lambda quick: run(blocks[quick], repeats=7, quick=quick),
    )


if __name__ == "__main__":
    raise SystemExit(main())
