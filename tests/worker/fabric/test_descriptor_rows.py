"""`DescriptorRows` accepts exactly the rows that can be memory: its numbers come from a peer's description."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.worker.fabric.errors import InvalidFabricRequest
from kvferry.worker.fabric.port import DescriptorRows, MemoryKind

END = 2**63 - 1
numbers = st.one_of(
    st.integers(-(2**63), END),
    st.integers(-2, 5),
    st.integers(2**61, END),
    st.sampled_from([END]),
)


def model_accepts(row: tuple[int, int, int, int, int]) -> bool:
    """By the definition, in Python's unbounded integers."""
    address, length, device, stride, count = row
    if min(address, device, stride) < 0 or min(length, count) < 1 or count > 2**31 - 1:
        return False
    return (count == 1 or stride >= length) and address + (
        count - 1
    ) * stride + length <= END


@given(st.tuples(numbers, numbers, numbers, numbers, numbers))
def test_a_row_is_accepted_exactly_if_all_its_descriptors_are_memory(
    row: tuple[int, int, int, int, int],
) -> None:
    try:
        accepted = DescriptorRows.from_tuples(MemoryKind.DRAM, [row])
    except InvalidFabricRequest:
        assert not model_accepts(row)
    else:
        assert model_accepts(row)
        assert accepted.rows.tolist() == [list(row)]
        assert accepted.count == row[4]


@pytest.mark.parametrize(
    "row",
    [
        (0, 8, 0, 2**62, 5),  # NIXL itself takes this one: 4·2⁶² wraps around to 0
        (END - 1, 2, 0, 0, 1),
        (0, 0, 0, 0, 1),
        (0, 1, 0, 0, 0),
        (5, 8, 0, 4, 2),
        (0, 1, 0, 1, 2**31),
    ],
)
def test_rows_that_are_no_memory_are_refused_among_good_ones(
    row: tuple[int, int, int, int, int],
) -> None:
    with pytest.raises(InvalidFabricRequest):
        DescriptorRows.from_tuples(MemoryKind.DRAM, [(4096, 64, 0, 64, 4), row])


@pytest.mark.parametrize(
    "rows", [[], [(1, 2, 3)], [(2**64, 1, 0, 1, 1)], [("a", 1, 0, 1, 1)]]
)
def test_other_things_than_rows_of_five_integers_are_refused(
    rows: list[tuple[int, int, int, int, int]],
) -> None:
    with pytest.raises(InvalidFabricRequest):
        DescriptorRows.from_tuples(MemoryKind.DRAM, rows)


@pytest.mark.parametrize(
    "array",
    [np.zeros((2, 3), dtype=np.int64), np.ones((2, 5), dtype=np.float64), np.ones(5)],
)
def test_arrays_of_another_shape_or_dtype_are_refused(
    array: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
) -> None:
    with pytest.raises(InvalidFabricRequest, match="expected int64"):
        DescriptorRows(MemoryKind.DRAM, array)


def test_the_sum_of_all_rows_is_bounded_too() -> None:
    with pytest.raises(InvalidFabricRequest, match="descriptors in one list"):
        DescriptorRows.from_tuples(MemoryKind.DRAM, [(0, 1, 0, 1, 2**30)] * 2)
    assert (
        DescriptorRows.from_tuples(
            MemoryKind.DRAM, [(0, 1, 0, 1, 2**30), (0, 1, 0, 1, 2**30 - 1)]
        ).count
        == 2**31 - 1
    )
