"""Windows of staged reads. What goes through the pool in them is compared in test_any_pair."""

from __future__ import annotations

import pytest

from kvferry.plan.waves import Window, next_window


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (7, [(0, 3, 0, 2), (0, 3, 2, 4), (0, 3, 4, 5)]),
        (2, [w for u in range(5) for w in ((0, 2, u, u + 1), (2, 3, u, u + 1))]),
        (0, [(r, r + 1, u, u + 1) for u in range(5) for r in range(3)]),
        (99, [(0, 3, 0, 5)]),
    ],
)
def test_windows_cover_the_grid_of_the_example(
    chunks: int, expected: list[tuple[int, int, int, int]]
) -> None:
    found, window = [], next_window(3, 5, None, chunks)
    while window is not None:
        found.append(window)
        window = next_window(3, 5, window, chunks)
    assert found == [Window(*one) for one in expected]
