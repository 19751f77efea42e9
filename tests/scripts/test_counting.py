"""Reading `/metrics` and the log of iterations."""

from __future__ import annotations

from pathlib import Path

from scripts.accuracy.metrics import IterationLog

LINE = "(APIServer pid=1) INFO [loggers.py:1] Engine 000: Iteration(7): %d context requests, %d context tokens, 0 x\n"


def test_the_log_is_read_on_from_where_it_was_read_last(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text("before\n" + LINE % (9, 900))
    log = IterationLog(path)
    assert log.computed() == (0, 0)
    with path.open("a") as file:
        file.write(
            LINE % (1, 1)
            + LINE % (2, 30)
            + "other\n"
            + (LINE % (1, 5)).partition("kens")[0]
        )
    assert log.computed() == (3, 31)
    with path.open("a") as file:
        file.write("kens, 0 x\n")
    assert log.computed() == (4, 36)
