"""The benchmark of streamed prompts: a read takes as long as its link needs, and most of them are over early."""

from __future__ import annotations

import pytest
from bench.stream import CHUNKS, LINK_S, OFF, PLACINGS, STREAMED, measure, results_of

from tests.harness.engine import Engine
from tests.harness.integrity import snapshot_of
from tests.waiting import step_until


def when_it_is_read(producer: Engine, consumer: Engine, chunks: int) -> None:
    """A busy machine may compute a chunk in less time than it lets the consumer read the one before."""

    def is_read() -> bool:
        begun = snapshot_of(consumer.worker).begun
        return [len(load.chunks) for load in begun] == [chunks]

    # A chunk counts as computed when its step is over, which the next one says.
    step_until(is_read, f"{chunks} chunks are read", producer)


@pytest.mark.parametrize("placing", PLACINGS)
def test_a_streamed_prompt_is_read_early_and_another_one_needs_the_whole_link(
    placing: str,
) -> None:
    shape, settings = PLACINGS[placing]
    found = measure(shape, settings, turns=1, pace=when_it_is_read)
    (streamed,), (off,) = found[STREAMED], found[OFF]
    assert (off.early, off.chunks) == (0.0, 0)
    assert off.after_ms >= 1e3 * LINK_S, "the link carries every byte after the prefill"
    assert streamed.early == pytest.approx(1 - 1 / CHUNKS)
    assert streamed.chunks == CHUNKS
    assert streamed.after_ms >= 1e3 * LINK_S / CHUNKS, "the last chunk is read after it"
    results = results_of({placing: found}, quick=True)
    assert [target.measured for target in results.targets] == pytest.approx(
        [streamed.early, streamed.after_ms]
    )
    assert len(results.tables[0].rows) == 2
