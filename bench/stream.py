"""Prompts that are read while they are computed, over a link that needs most of the prefill's time: half a minute.

    python -m bench.stream            # results/stream.json
    python -m bench.stream --quick

A prompt of eight chunks, which end where blocks end, is computed in 0.4 s; its bytes take 0.32 s over the link. All of
kvferry is real, NIXL too, but for what computes the blocks, and a read is reported when the link could have carried it
(`tests/harness/link.py`). In turn with it, the same prompt is read when it is complete, as with `"streaming": "off"`.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.command import quick_or_whole
from bench.figures import Results, Table, Target, spread
from kvferry.worker.fabric.nixl import NixlFabric
from kvferry.worker.settings import WorkerSettings
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.engine import Engine
from tests.harness.link import LinkFabric
from tests.waiting import step_until

CHUNKS, CHUNK_TOKENS, CHUNK_S = 8, 128, 0.05
LINK_SHARE = 0.8
"""Of the prefill's time, that the whole prompt takes over the link."""
SHAPE = CacheShape(layers=16, heads=2, blocks=160, block_tokens=16, cell_bytes=128)
TOKENS = CHUNKS * CHUNK_TOKENS
LINK_S = LINK_SHARE * CHUNKS * CHUNK_S
BYTES_PER_S = SHAPE.layers * SHAPE.heads * SHAPE.cell_bytes * TOKENS / LINK_S
LEAST_EARLY, MOST_MS = 0.8, 1e3 * LINK_S / CHUNKS + 5.0
"""Limits: the share of the bytes that is read before the prefill ends, and the time after it."""
STREAMED, OFF = "while it is computed", "when it is complete"
PLACINGS = {
    "in place": (SHAPE, replace(SETTINGS, staging_pool_bytes=0)),
    "staged": (replace(SHAPE, axes="bth"), replace(SETTINGS, direct_min_bytes=1 << 20)),
}


@dataclass(frozen=True)
class Loaded:
    """One load.

    Attributes:
        after_ms: from the end of the prefill to the last byte.
        early: the share of the bytes that was read before the prefill had ended.
        chunks: its reads.
    """

    after_ms: float
    early: float
    chunks: int


Pace = Callable[[Engine, Engine, int], None]
"""Called after every chunk but the last with both engines, and how many chunks have been computed."""


def at_once(*_: object) -> None:
    """The next chunk is computed whatever the consumer has read."""


def handover(
    producer: Engine, consumer: Engine, seed: int, pace: Pace, *, streamed: bool
) -> Loaded:
    """Compute one prompt and load it, and compare its bytes.

    Raises:
        RuntimeError: the load has failed.
    """
    prefill = producer.begin_prefill(TOKENS, seed)
    load = None
    for chunk in range(CHUNKS):
        if streamed and not chunk:
            prefill.offer()
        producer.compute(prefill, CHUNK_TOKENS)
        begin_s = time.monotonic()
        producer.launched.append(
            lambda begin_s=begin_s: time.sleep(
                max(0.0, begin_s + CHUNK_S - time.monotonic())
            )  # type: ignore[misc]
        )
        if load is None and prefill.params is not None:
            load = consumer.load(prefill.params)
        producer.step()
        if streamed and chunk + 1 < CHUNKS:
            pace(producer, consumer, chunk + 1)
    ended_s = time.monotonic()
    prefill.end()
    assert load is not None
    request_id = load.request_id
    step_until(lambda: consumer.seen.is_over(request_id), "the load is over", consumer)
    if request_id in consumer.seen.failed:
        raise RuntimeError(
            f"the load has failed: {consumer.seen.failed[request_id].value}"
        )
    consumer.check_bytes(load, seed)
    step_until(
        lambda: prefill.request_id in producer.seen.sent,
        "the blocks are free",
        producer,
    )
    consumer.free(load)
    record = consumer.seen.totals[-1]
    after_ms = 1e3 * (record.ended_s[record.stage] - ended_s)
    return Loaded(
        after_ms, record.early_bytes / record.planned_bytes, len(record.chunks)
    )


def measure(
    shape: CacheShape, settings: WorkerSettings, turns: int, pace: Pace = at_once
) -> dict[str, list[Loaded]]:
    """Loads of both kinds in turn, without the first of each."""
    rows = replace(SETTINGS, row_blocks=(TOKENS // SHAPE.block_tokens,))
    found: dict[str, list[Loaded]] = {STREAMED: [], OFF: []}
    with contextlib.ExitStack() as stack:
        producer = stack.enter_context(
            contextlib.closing(Engine("P", NixlFabric, shape=SHAPE, settings=rows))
        )
        consumer = stack.enter_context(
            contextlib.closing(
                Engine(
                    "C",
                    lambda name: LinkFabric(NixlFabric(name), BYTES_PER_S),
                    shape=shape,
                    settings=settings,
                )
            )
        )
        for turn in range(turns + 1):
            for kind, loads in found.items():
                is_streamed = kind == STREAMED
                loads.append(
                    handover(producer, consumer, turn, pace, streamed=is_streamed)
                )
    return {kind: loads[1:] for kind, loads in found.items()}


def results_of(found: dict[str, dict[str, list[Loaded]]], *, quick: bool) -> Results:
    """One table; the targets are those of the streamed loads."""
    rows, targets = [], []
    for placing, kinds in found.items():
        for kind, loads in kinds.items():
            all_ms, early = (
                [one.after_ms for one in loads],
                statistics.median(one.early for one in loads),
            )
            after_ms = statistics.median(all_ms)
            rows.append((placing, kind, len(loads), early, after_ms, spread(all_ms)))
            if kind == STREAMED:
                targets.append(
                    Target.at_least(
                        f"bytes read before its end, {placing}", early, LEAST_EARLY, ""
                    )
                )
                targets.append(
                    Target.at_most(
                        f"prefill ended → loaded, {placing}, p50",
                        after_ms,
                        MOST_MS,
                        "ms",
                    )
                )
    columns = (
        "blocks",
        "read",
        "loads",
        "bytes read early",
        "prefill ended → loaded, ms",
        "range, ms",
    )
    return Results(
        command=f"python -m bench.stream{' --quick' * quick}",
        what=(
            f"A prompt of {CHUNKS} chunks is computed in {CHUNKS * CHUNK_S:g} s, and its bytes take {LINK_S:g} s over "
            "the link: read chunk by chunk while it is computed, and, in turn, when it is complete."
        ),
        tables=(Table("Loads", columns, rows),),
        targets=targets,
        notes=(
            "At best 7 of 8 chunks are read before the prefill ends, and the last one after it.",
        ),
        quick=quick,
    )


def main() -> int:
    """Measure, print, write."""
    return quick_or_whole("stream", __doc__, "three loads of each kind", _run)


def _run(quick: bool) -> Results:
    logging.getLogger("kvferry").setLevel(logging.WARNING)
    found = {
        placing: measure(shape, settings, 3 if quick else 15)
        for placing, (shape, settings) in PLACINGS.items()
    }
    return results_of(found, quick=quick)


if __name__ == "__main__":
    raise SystemExit(main())
