"""Folding of the plan's table: nothing is lost, nothing unlike is put together, and every line fits 80 columns."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cli.plan.tables import Pair, cells_of, fold
from kvferry.plan.transfer_plan import MAX_LINE
from kvferry.plan.wording import format_numbers, format_places
from kvferry.protocol.geometry import Place
from tests.cli.command import run
from tests.cli.plan.forms import short_forms
from tests.cli.plan.test_prediction import summary_of
from tests.draws import draws

MODEL = "layers=8,heads=8,dim=64,blocks=600"
STATES = "state_layers=0-5,ssm=24x64x128,conv=x1536+B128+C128"


def numbers_of(text: str) -> list[int]:
    """The numbers of `1, 4…6, 8…16 by 4`."""
    found: list[int] = []
    for part in text.split(", "):
        matched = re.fullmatch(r"(\d+)(?:…(\d+)(?: by (\d+))?)?", part)
        assert matched, text
        first, last, step = (int(number or 0) for number in matched.groups())
        found += range(first, (last or first) + 1, step or 1)
    return found


def test_every_set_of_numbers_can_be_read_back_or_is_counted() -> None:
    for size in range(1, 10):
        for numbers in itertools.combinations(range(9), size):
            text = format_numbers(numbers)
            assert text.count(", ") < 3
            if " of " in text:
                assert text == f"{size} of {numbers[0]}…{numbers[-1]}"
                assert not any(
                    numbers == tuple(range(numbers[0], numbers[-1] + 1, step))
                    for step in (1, 2, 3)
                )
            else:
                assert tuple(numbers_of(text)) == numbers


@given(st.data())
@settings(max_examples=draws(60), deadline=None)
def test_folded_rows_expanded_are_the_rows(data: st.DataObject) -> None:
    form = data.draw(short_forms(layers=4, kinds=("heads",)))
    stripped = re.sub(r"\b(tp|dcp|pcp|interleave)=\d+,?", "", form).strip(",")
    sizes = [f"{stripped},tp={data.draw(st.integers(1, 12))}" for _ in range(2)]
    summary = summary_of(*sizes)
    folded = fold(summary.workers, {})
    pairs = [pair for alike in folded.values() for pair in alike if pair.producer]
    wanted = []
    for reader in summary.workers:
        for flow in reader.flows:
            # A release has no heads.
            for heads in [read.heads for read in flow.reads] or [()]:
                wanted.append(Pair(reader.place, flow.producer, heads))
    assert sorted(map(str, pairs)) == sorted(map(str, wanted))
    num_bytes = sum(kind.num_bytes * len(alike) for kind, alike in folded.items())
    assert num_bytes == summary.bytes
    for kind, alike in folded.items():
        cells = cells_of(kind, alike, ())
        producers = [pair.producer for pair in alike if pair.producer]
        assert cells[">pairs"] == str(len(alike))
        assert cells["placed"] == kind.placed
        assert cells["consumer"] == format_places(pair.consumer for pair in alike)
        assert cells["producer"] == format_places(producers)


def test_staged_reads_of_a_pair_share_their_descriptors() -> None:
    model = "layers=4,heads=4,dim=16,window=64@0-2/2"
    summary = summary_of(f"{model},layout=NHD", f"{model},block=32")
    folded = fold(summary.workers, {})
    shown = [kind.descriptors for kind in folded]
    assert shown.count(None) == 1
    assert sum(descriptors or 0 for descriptors in shown) == summary.descriptors


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
    of_consumer = MODEL.replace("heads=8,", "") if "heads" in consumer else MODEL
    ran = run("plan", f"{MODEL},{producer}", f"{of_consumer},{consumer}")
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
    name = r"tp(\d+(?:…\d+)?)( by \d+)?(?:/pp(\d+(?:…\d+)?))?"
    for ranks, step, stages in re.findall(name, " ".join(lines)):
        for tp in range_of(ranks, step):
            found |= {Place(tp=tp, pp=pp) for pp in range_of(stages or "0")}
    return found


def range_of(text: str, step: str = "") -> range:
    first, _, last = text.partition("…")
    by = int(step.removeprefix(" by ") or 1)
    return range(int(first), int(last or first) + 1, by)
