"""Plans, prepared descriptors and index arrays, beside the published way of making descriptors.

    python -m bench.plan                    # the published figures: 100,000 blocks; writes results/plan.json; a minute
    python -m bench.plan --quick            # seconds, for orientation
    python -m bench.plan --no-results --blocks 1000 --published-blocks 200 --no-nixl

One consumer worker of a Llama of 80 layers, tensor parallel 8 to 4 and 4 to 8, heads or tokens outermost in a block.
Times are processor time of the thread, the best of some repetitions: on a shared machine anything else says more about
the neighbours. Everything measured here runs on one thread, so on an idle machine it is the time on the wall.
"""

from __future__ import annotations

import argparse
import statistics
import tracemalloc
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.cases import Case, best_of, request_of
from bench.figures import publish
from bench.llama import worker_bytes
from bench.nixl_prep import STAGING_BYTES, Registered
from bench.plan_report import results_of
from bench.provenance import begin
from bench.published import Published, measure_published
from kvferry.plan.blocks import RequestBlocks, pair_request
from kvferry.plan.descriptors import DescriptorTable, descriptor_pairs, route_tables
from kvferry.plan.planner import plan_transfer
from kvferry.plan.transfer_plan import Placing, TransferPlan
from kvferry.plan.waves import SourceTable, Window, source_table, source_units, window_reads
from kvferry.protocol.handshake import EngineDescription

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Prepared:
    """A worker's state for a peer: its plan, tables for direct reads, and for staged ones."""

    plan: TransferPlan
    direct: tuple[tuple[DescriptorTable, ...], ...]
    staged: tuple[tuple[SourceTable, ...], ...]

    @classmethod
    def of(cls, consumer: EngineDescription, producer: EngineDescription) -> Prepared:
        """Prepare the state of the consumer's first worker."""
        plan = plan_transfer(consumer, 0, producer)
        direct = tuple(route_tables(route, 0, 0, Placing.DIRECT) for route in plan.routes)
        staged = tuple(tuple(source_table(source, 0) for source in route.sources) for route in plan.routes)
        return cls(plan, direct, staged)

    @property
    def placing(self) -> str:
        return "+".join(sorted({item.placing.value for route in self.plan.routes for item in route.slices}))

    @property
    def remote_rows(self) -> list[Rows]:
        """Of every route, table by table."""
        tables = [table.remote_rows for of in self.direct for table in of]
        return tables + [table.rows for of in self.staged for table in of]

    def index_arrays(self, consumer: EngineDescription, producer: EngineDescription, request: RequestBlocks) -> int:
        """Everything that a request needs before it is posted; returns the descriptors that it reads."""
        units = pair_request(self.plan, consumer.groups, producer.groups, request)
        count = sum(len(descriptor_pairs(table, units).remote) for of in self.direct for table in of)
        for table in (table for of in self.staged for table in of):
            found = source_units(table.source, units[table.source.tokens])
            count += len(window_reads(table, found, Window(0, table.runs, 0, len(found))))
        return count


@dataclass(frozen=True)
class Ours:
    """Figures of kvferry for one case."""

    placing: str
    plan_ms: float
    plan_and_tables_ms: float
    median_ms: float
    kept_mb: float
    peak_mb: float
    rows: int
    descriptors: int
    request_ms: float
    request_descriptors: int
    nixl_prep_ms: float | None


def measure_ours(case: Case, repeats: int, registered: Registered | None = None) -> Ours:
    """Plan, prepare and index, for the first worker of the consumer."""
    consumer, producer = case.engines(registered.local if registered else None, registered.remote if registered else ())
    plan_s, _ = best_of(repeats, lambda: plan_transfer(consumer, 0, producer))
    both_s, prepared = best_of(repeats, lambda: Prepared.of(consumer, producer))
    tracemalloc.start()
    kept = Prepared.of(consumer, producer)
    kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    request = request_of(case.blocks, seed=1)
    request_s, count = best_of(repeats * 4, lambda: kept.index_arrays(consumer, producer, request))
    return Ours(
        placing=prepared.placing,
        plan_ms=plan_s[0] * 1e3,
        plan_and_tables_ms=both_s[0] * 1e3,
        median_ms=statistics.median(both_s) * 1e3,
        kept_mb=kept_bytes / 1e6,
        peak_mb=peak_bytes / 1e6,
        rows=sum(len(rows) for rows in prepared.remote_rows),
        descriptors=sum(int(rows[:, 4].sum()) for rows in prepared.remote_rows),
        request_ms=request_s[0] * 1e3,
        request_descriptors=count,
        nixl_prep_ms=_prepare_with_nixl(prepared, registered, repeats) if registered is not None else None,
    )


def _prepare_with_nixl(prepared: Prepared, registered: Registered, repeats: int) -> float:
    """NIXL's time for the rows of both sides, ms."""

    def prepare() -> None:
        for index, (tables, sources) in enumerate(zip(prepared.direct, prepared.staged, strict=True)):
            for table in tables:
                registered.prepare_local(table.local_rows)
                registered.prepare_remote(index, table.remote_rows)
            for source in sources:
                chunk = source.run_bytes
                chunks = np.array([[registered.staging, chunk, 0, chunk, STAGING_BYTES // chunk]], dtype=np.int64)
                registered.prepare_local(chunks)
                registered.prepare_remote(index, source.rows)

    seconds, _ = best_of(repeats, prepare)
    return seconds[0] * 1e3


def run(blocks: int, published_blocks: int, repeats: int, with_nixl: bool) -> list[dict[str, Any]]:
    """All cases; prints as it goes."""
    print(HEADER)
    found = []
    for layout in ("HND", "NHD"):
        for producer_tp, consumer_tp in ((8, 4), (4, 8)):
            case = Case(producer_tp, consumer_tp, layout, blocks)
            registered = Registered.try_to_make(
                worker_bytes(consumer_tp, blocks), worker_bytes(producer_tp, blocks), case.readers, with_nixl
            )
            ours = measure_ours(case, repeats, registered)
            # The published algorithm divides heads only where they are outermost: NHD is refused.
            theirs = measure_published(case, min(published_blocks, blocks), registered) if layout == "HND" else None
            if registered is not None:
                registered.close()
            print(_line(case, ours, theirs), flush=True)
            published = asdict(theirs) if theirs is not None else None
            found.append({"case": str(case), "blocks": blocks, "ours": asdict(ours), "published": published})
    return found


COLUMNS = (
    "pair",
    "placed",
    "plan and tables",
    "NIXL",
    "memory",
    "a request",
    "published: tables and NIXL",
    "memory",
    "a request",
    "ratio",
)
HEADER = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}"


def _line(case: Case, ours: Ours, theirs: Published | None) -> str:
    cells = [
        str(case),
        ours.placing,
        f"{ours.plan_and_tables_ms:.1f} ms",
        "–" if ours.nixl_prep_ms is None else f"{ours.nixl_prep_ms:.2f} ms",
        f"{ours.peak_mb:.2f} MB",
        f"{ours.request_ms:.2f} ms",
    ]
    if theirs is None:
        cells += ["refuses tokens outermost", "–", "–", "–"]
    else:
        total_s = (ours.plan_and_tables_ms + (ours.nixl_prep_ms or 0.0)) / 1e3
        scaled = "" if theirs.blocks == case.blocks else f", scaled from {theirs.blocks} blocks"
        cells += [
            f"{theirs.seconds_at:.1f} s{scaled}",
            f"{theirs.peak_mb_at:.0f} MB",
            f"{theirs.request_ms:.2f} ms",
            f"{theirs.seconds_at / total_s:.0f} ×",
        ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks of every worker's cache")
    parser.add_argument("--published-blocks", type=int, default=10_000, help="blocks that the published way is given")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-nixl", action="store_true", help="do not measure what NIXL takes")
    parser.add_argument("--no-results", action="store_true", help="do not write results/plan.json")
    parser.add_argument("--quick", action="store_true", help="1,000 blocks; writes results/quick/plan.json")
    chosen = parser.parse_args()
    started = begin()
    blocks, published = (1000, 200) if chosen.quick else (chosen.blocks, chosen.published_blocks)
    cases = run(blocks, published, chosen.repeats, not chosen.no_nixl)
    if not chosen.no_results:
        publish("plan", results_of(cases, chosen.quick), started)


if __name__ == "__main__":
    main()
