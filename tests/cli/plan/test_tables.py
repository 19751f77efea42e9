"""Folding of the plan's table: nothing is lost, nothing unlike is put together, and every line fits 80 columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cli.plan.tables import cells_of, fold, rows_of
from kvferry.plan.transfer_plan import MAX_LINE
from kvferry.plan.wording import format_numbers, format_places
from kvferry.protocol.geometry import Place
from tests.cli.command import run
from tests.cli.plan.forms import short_forms
from tests.cli.plan.test_prediction import summary_of

MODEL = "layers=8,heads=8,dim=64,blocks=600"
STATES = "state_layers=0-5,ssm=24x64x128,conv=x1536+B128+C128"


def numbers_of(text: str) -> list[int]:
    """The numbers of `1, 4…6, 8…16 by 4`."""
    found: list[int] = []
    for part in text.split(", "):
        matched = re.fullmatch(r"(\d+)(?:…(\d+)(?: by (\d+))?)?", part)
        assert matched, text
        first, last, step = int(matched[1]), int(matched[2] or matched[1]), int(matched[3] or 1)
        found += range(first, last + 1, step)
    return found


def test_every_set_of_numbers_can_be_read_back_or_is_counted() -> None:
    for size in range(1, 10):
        for numbers in itertools.combinations(range(9), size):
            text = format_numbers(numbers)
            assert text.count(", ") < 3
            if " of " in text:
                assert text == f"{size} of {numbers[0]}…{numbers[-1]}"
                assert not any(
                    numbers == tuple(range(numbers[0], numbers[-1] + 1, step)) for step in (1, 2, 3)
                )
            else:
                assert tuple(numbers_of(text)) == numbers


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_folded_rows_expanded_are_the_rows(data: st.DataObject) -> None:
    form = data.draw(short_forms(layers=4, kinds=("heads",)))
    ranks = ("tp", "dcp", "pcp", "interleave")
    stripped = ",".join(pair for pair in form.split(",") if pair.split("=")[0] not in ranks)
    sizes = [f"{stripped},tp={data.draw(st.integers(1, 12))}" for _ in range(2)]
    reasons: dict[str, int] = {}
    rows = list(rows_of(summary_of(*sizes).workers, reasons))
    folded = fold(rows)
    assert sorted(map(repr, itertools.chain(*folded))) == sorted(map(repr, rows))
    assert len({kind[0].kind for kind in folded}) == len(folded)
    for alike in folded:
        consumers, producers, pairs, *cells = cells_of(alike, ())
        assert int(pairs) == len(alike)
        for one in alike:
            *_, layers, _, num_bytes, descriptors, placed = cells_of([one], ())
            assert [layers, num_bytes, descriptors, placed] == [cells[0], *cells[2:]]
        assert consumers == format_places(row.consumer for row in alike)
        assert producers == (
            format_places(row.producer for row in alike if row.producer)
            if alike[0].producer
            else ""
        )


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        ("tp=64", "tp=1"),
        ("tp=3,pp=2", "tp=5"),
        ("tp=4,pp=2,layout=NHD", "tp=2,stages=5+3,block=64"),
        ("tp=4,window=64@0-6/2", "tp=2,window=64@0-6/2,block=64"),
        ("tp=8,dcp=2", "tp=4,pcp=2"),
        ("tp=2", "tp=2,heads=7"),
        (f"tp=4,{STATES}", f"tp=2,{STATES}"),
    ],
)
def test_the_output_fits_80_columns_with_at_most_three_significant_digits(
    producer: str, consumer: str
) -> None:
    ran = run(
        "plan",
        f"{MODEL},{producer}",
        f"{MODEL},{consumer}".replace("heads=8,", "", "heads=7" in consumer),
    )
    assert ran.err == ""
    assert max(map(len, ran.out.splitlines())) <= 80
    figures = ran.out.partition("\na prompt of")[2].partition("in the log")[0]
    for figure in re.findall(r"[\d.]+(?= ?[KMGT]?B|k|M| ms)", figures):
        assert len(figure.replace(".", "").lstrip("0").rstrip("0")) <= 3, figure


@pytest.mark.parametrize(
    "producer",
    [
        "tp=64",
        "tp=61,pp=4",
        "tp=8,pp=8,layout=NHD",
        "stages=1+2+3+4+5+6+7+8+9+10,tp=3",
        "tp=7,pp=5",
    ],
)
def test_a_workers_line_in_the_log_is_bounded_and_the_rest_is_said_in_lines_at_debug(
    producer: str,
) -> None:
    """Also where the workers that are read differ, as stages of ten sizes do. Every worker is named, with its heads."""
    model = "layers=55,heads=61,dim=8"
    (worker,) = summary_of(f"{model},{producer}", model).workers
    assert len(worker.log) < MAX_LINE + 60
    if worker.log_debug:
        assert worker.log.endswith(f"; {len(worker.log_debug)} more lines at DEBUG")
    assert all(len(line) < MAX_LINE for line in worker.log_debug)
    told = places_in([worker.log.partition("]: ")[2], *worker.log_debug])
    assert told == {flow.producer for flow in worker.flows}


def places_in(lines: Iterable[str]) -> set[Place]:
    """The workers that these lines name."""
    found = set()
    for ranks, step, stages in re.findall(
        r"tp(\d+(?:…\d+)?)( by \d+)?(?:/pp(\d+(?:…\d+)?))?", " ".join(lines)
    ):
        for tp in range_of(ranks, step):
            found |= {Place(tp=tp, pp=pp) for pp in range_of(stages or "0")}
    return found


def range_of(text: str, step: str = "") -> range:
    first, _, last = text.partition("…")
    return range(int(first), int(last or first) + 1, int(step.removeprefix(" by ") or 1))
