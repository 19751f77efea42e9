"""The links of the benchmark of transfers: a paced read takes the time of its link, and its bytes are right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bench.transfer_engine import PRODUCED
from bench.transfer_links import PACED, PacedFabric, _consumer, _row
from bench.transfer_memory import Memory
from bench.transfer_shapes import MIB, equal_shards

POOL_BYTES = 12 * MIB
LINK_S = 0.05


def test_a_load_over_a_paced_link_takes_the_links_time_and_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PacedFabric, "gb_s", MIB / LINK_S / 1e9)
    target = Memory(POOL_BYTES, huge=True, device=torch.device("cpu"))
    with _consumer(PACED, equal_shards(16 << 10, MIB, POOL_BYTES, huge=True), target) as (bench, loads):
        target.tensor.zero_()
        link, request, *figures = _row(PACED, bench, loads, MIB, turns=1)
    assert (target.tensor.numpy() == PRODUCED).sum() == MIB
    assert set(np.unique(target.tensor.numpy())) == {0, PRODUCED}
    assert (link, request) == (PACED.name, "1 MiB, in place")
    with_stages_ms, ends_only_ms, gain, bare_ms, cpu_ms = (float(one) if one is not None else None for one in figures)
    assert with_stages_ms is not None
    assert ends_only_ms is not None
    assert gain is not None
    assert cpu_ms is not None
    assert min(with_stages_ms, ends_only_ms) >= LINK_S * 1e3
    assert bare_ms is None, "the bare loop has no paced link"
    assert cpu_ms < with_stages_ms / 2, "a read in flight is not polled without a backoff"
