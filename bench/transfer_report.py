"""Tables, charts and targets of `bench.transfer`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bench.figures import Cell as Shown
from bench.figures import Chart, Limit, Series, Table, Target
from bench.transfer_measure import BARE, BARES, FENCED, LOAD, LOADS, MEMCPY, READV, Cell, Measured
from bench.transfer_shapes import MIB, shown_bytes
from bench.transfer_split import STAGES

_NAMES = {
    LOAD: "kvferry, one load",
    LOADS: "kvferry, four at once",
    BARE: "bare NIXL",
    FENCED: "bare with fence and message",
    READV: "process_vm_readv",
    MEMCPY: "memcpy",
}
_SHARES = {"one / bare": (LOAD, BARE), "four / bare": (LOADS, BARES), "fenced / bare": (FENCED, BARE)}
_OF_BARE, _OF_MEMCPY = 0.95, 0.8
_MISSED = (
    "What is not transfer is in the table of the stages. Tried: all of a load in one turn of the thread, fewer calls "
    "of numpy, no backoff after a post that has copied, the result before the notification."
)


def tables(measured: Sequence[Measured]) -> list[Table]:
    """One of the grid, one of the stages."""
    columns = (
        "request",
        "runs",
        *(f"{name}, GB/s" for name in _NAMES.values()),
        "one / bare",
        "four / bare",
        "fenced / bare",
    )
    found = [Table(_title(one), columns, [_row(cell) for cell in one.cells]) for one in measured]
    split = [(one.scenario.name, size, stages) for one in measured for size, stages in one.split.items()]
    if split:
        rows: list[tuple[Shown, ...]] = [(stage, *(stages[stage] for _, _, stages in split)) for stage in STAGES]
        rows.append(("together", *(sum(stages.values()) for _, _, stages in split)))
        names = (f"{shown_bytes(size)}, {name}" for name, size, _ in split)
        found.append(Table("Where the time of one load goes, µs", ("stage", *names), rows))
    return found


def charts(measured: Sequence[Measured]) -> list[Chart]:
    """By run length, by request size, and what huge pages do."""
    equal = [one for one in measured if one.scenario.producer == one.scenario.consumer]
    huge, small = ([one for one in equal if one.scenario.huge is kind] for kind in (True, False))
    by_run = Chart(
        "Throughput by run length, the largest request of at most 64 MiB, huge pages",
        "bytes of a run",
        "GB/s",
        [series for name in _NAMES if (series := _by_run(_NAMES[name], name, huge)) is not None],
        x_log=True,
        y_log=True,
    )
    by_size = Chart(
        "One load, of the bare NIXL loop with the same descriptors",
        "bytes of the request",
        "ratio",
        [_by_size(one) for one in huge],
        x_log=True,
        limits=(Limit("promised", _OF_BARE),),
    )
    pages = Chart(
        "kvferry with and without huge pages, the largest request of at most 64 MiB",
        "bytes of a run",
        "GB/s",
        [
            series
            for name, some in (("huge pages", huge), ("pages of 4 KiB", small))
            if (series := _by_run(name, LOAD, some)) is not None
        ],
        x_log=True,
        y_log=True,
    )
    return [one for one in (by_run, by_size, pages) if one.series]


def targets(measured: Sequence[Measured]) -> list[Target]:
    """By request size the worst scenario that reads in place, and memcpy for the longest runs."""
    direct = [one for one in measured if not one.scenario.staged]
    found = []
    for size in sorted({cell.request_bytes for one in direct for cell in one.cells}):
        cells = [(one, cell) for one in direct for cell in one.cells if cell.request_bytes == size]
        for of, to, what in ((LOAD, BARE, "one load"), (LOADS, BARES, "four at once")):
            ratios = [(ratio, one) for one, cell in cells if (ratio := cell.ratio(of, to)) is not None]
            if not ratios:
                continue
            worst, where = min(ratios, key=lambda one: one[0])
            note = f"worst: {_title(where)}." + ("" if worst >= _OF_BARE else _why_missed(where, size))
            found.append(Target.at_least(f"{shown_bytes(size)}, {what}, of bare NIXL", worst, _OF_BARE, "", note))
    for one in direct:
        if one.scenario.huge and one.scenario.run_bytes >= MIB and one.cells:
            cell = one.cells[-1]
            ratio = cell.ratio(LOAD, MEMCPY)
            if ratio is not None:
                bare = cell.ratio(BARE, MEMCPY)
                name = f"{shown_bytes(cell.request_bytes)} in {shown_bytes(one.scenario.run_bytes)} runs, of memcpy"
                note = f"bare NIXL: {bare:.2f}" if bare is not None else ""
                found.append(Target.at_least(name, ratio, _OF_MEMCPY, "", note))
    return found


def _why_missed(where: Measured, size: int) -> str:
    """The part of the miss that no connector with a fence can avoid."""
    (cell,) = [cell for cell in where.cells if cell.request_bytes == size]
    floor = cell.ratio(FENCED, BARE)
    least = f" The bare loop with a fence and a message reaches {floor:.2f}." if floor is not None else ""
    return f"{least} {_MISSED}"


def raw(measured: Iterable[Measured]) -> list[dict[str, Any]]:
    """The samples, µs."""
    return [
        {
            "scenario": _title(one),
            "request_bytes": cell.request_bytes,
            "runs": cell.runs,
            "descriptors_by_nixl": cell.posted,
            "us": {name: [round(x * 1e6, 1) for x in samples] for name, samples in cell.seconds.items()},
            "until_result_us": [round(x * 1e6, 1) for x in cell.result_s],
        }
        for one in measured
        for cell in one.cells
    ]


def _title(one: Measured) -> str:
    return f"{one.scenario.name}, {'huge pages' if one.scenario.huge else 'pages of 4 KiB'}"


def _row(cell: Cell) -> tuple[Shown, ...]:
    rates = [cell.gb_s(name) for name in _NAMES]
    return (
        shown_bytes(cell.request_bytes),
        cell.runs,
        *rates,
        cell.ratio(LOAD, BARE),
        cell.ratio(LOADS, BARES),
        cell.ratio(FENCED, BARE),
    )


def _largest(one: Measured) -> Cell | None:
    return max((cell for cell in one.cells if cell.request_bytes <= 64 * MIB), key=_size, default=None)


def _size(cell: Cell) -> int:
    return cell.request_bytes


def _by_run(label: str, name: str, measured: Sequence[Measured]) -> Series | None:
    points = [
        (one.scenario.run_bytes, cell.request_bytes, cell.seconds[name])
        for one in measured
        if (cell := _largest(one)) is not None and cell.seconds.get(name)
    ]
    if not points:
        return None
    x = [run for run, _, _ in points]
    rates = [sorted(size / second / 1e9 for second in samples) for _, size, samples in points]
    middle = [rate[len(rate) // 2] for rate in rates]
    return Series(label, x, middle, low=[rate[0] for rate in rates], high=[rate[-1] for rate in rates])


def _by_size(one: Measured) -> Series:
    x = [cell.request_bytes for cell in one.cells]
    return Series(f"{shown_bytes(one.scenario.run_bytes)} runs", x, [cell.ratio(LOAD, BARE) for cell in one.cells])
