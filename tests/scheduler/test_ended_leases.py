"""The memory of ended leases against a model that keeps all of them."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from kvferry.link.commands import LeaseKey
from kvferry.protocol.ids import EPOCH_BITS, new_boot_id
from kvferry.protocol.slots import epoch_to_text, new_epoch
from kvferry.scheduler.consumer.ledger import MAX_ENDED_LEASES, EndedLeases

KEYS = st.tuples(
    st.sampled_from(["0" * 31 + "1", "f" * 32, "ab" * 16]),
    st.sampled_from([0, 1, 2**24 - 1]),
    st.sampled_from([1, 16, 2**EPOCH_BITS - 1]).map(epoch_to_text),
)


@given(st.lists(KEYS, max_size=40), st.integers(1, 8))
def test_the_last_leases_are_known_and_no_others(
    added: list[LeaseKey], limit: int
) -> None:
    ended, model = EndedLeases(limit), list[LeaseKey]()
    for key in added:
        ended.add(key)
        if key not in model:
            model = [*model, key][-limit:]
        assert len(ended) == len(model)
        assert all(
            (one in ended) == (one in model)
            for one in [*added, ("0" * 32, 0, "0" * 14 + "1")]
        )


def test_the_memory_does_not_grow_with_the_leases_that_were_forgotten() -> None:
    boot, limit = new_boot_id(), 4096
    keys = [(boot, slot, epoch_to_text(new_epoch())) for slot in range(10 * limit)]
    ended = EndedLeases(limit)
    tracemalloc.start()
    try:
        for key in keys:
            ended.add(key)
        assert len(ended) == limit
        assert tracemalloc.get_traced_memory()[0] * MAX_ENDED_LEASES / limit < 28e6
    finally:
        tracemalloc.stop()
