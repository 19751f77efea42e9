"""`--svg`: a well-formed picture with every rank, and bands with widths in proportion to their bytes."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cli.plan.picture import arrange, draw
from kvferry.cli.plan.summary import Link, PlanSummary, summarise
from kvferry.plan.cost import PUBLISHED
from kvferry.plan.planner import plan_engine
from tests.cli.plan.forms import read_pair, short_forms
from tests.draws import draws

SVG = "{http://www.w3.org/2000/svg}"
LARGE = "layers=8,heads=8,dim=64"
PAIRS = {
    "TP 8 to TP 4": (f"{LARGE},tp=8", f"{LARGE},tp=4"),
    "pipelines": (f"{LARGE},tp=2,pp=2", f"{LARGE},stages=3+5"),
    "MLA replicas": ("layers=4,mla=64,tp=8", "layers=4,mla=64,tp=2"),
    "context parallel": (
        "layers=4,mla=64,tp=4,dcp=4",
        "layers=4,mla=64,tp=4,dcp=2,pcp=2",
    ),
    "states": (
        "layers=4,heads=4,dim=8,tp=2,state_layers=0-2,ssm=4x8,conv=x8+B4*",
        "layers=4,heads=4,dim=8,tp=4,state_layers=0-2,ssm=4x8,conv=x8+B4*,conv_layout=DS",
    ),
    "only states": (
        "layers=2,state_layers=*,ssm=4x8",
        "layers=2,state_layers=*,ssm=4x8,tp=2",
    ),
    "64 ranks": (f"{LARGE},tp=64", f"{LARGE},tp=32,pp=2"),
    "staged": (f"{LARGE},layout=NHD", f"{LARGE},block=32"),
}


def summary_of(producer: str, consumer: str) -> PlanSummary:
    there, here = read_pair(producer, consumer)
    plans = plan_engine(here, there)
    return summarise(here, there, plans, Link(50.0, PUBLISHED), None)


@pytest.fixture(params=list(PAIRS.values()), ids=list(PAIRS))
def summary(request: pytest.FixtureRequest) -> PlanSummary:
    return summary_of(*request.param)


def texts_of(svg: str) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(svg).iter(f"{SVG}text")]  # noqa: S314 - our own


def test_direct_staged_and_released_bands_differ() -> None:
    staged, direct = (
        draw(summary_of(*PAIRS["staged"])),
        draw(summary_of(*PAIRS["TP 8 to TP 4"])),
    )
    assert "staged, then put in place" in texts_of(staged)
    assert staged.count('fill="url(#hatch)"') == 2, "the band and its key"
    assert "url(#hatch)" not in direct
    replicas = draw(summary_of(*PAIRS["MLA replicas"]))
    assert replicas.count("stroke-dasharray") == 6 + 1
    assert "release only" in texts_of(replicas)


def test_bands_are_as_wide_as_their_bytes_and_fit_their_cards(
    summary: PlanSummary,
) -> None:
    cards, bands = arrange(summary)
    widths = {band.width / band.num_bytes for band in bands if band.width > 1.0}
    assert max(widths, default=0) == pytest.approx(min(widths, default=0))
    for card in cards:
        ends = [(band.left_top, band) for band in bands if band.producer is card]
        ends += [(band.right_top, band) for band in bands if band.consumer is card]
        ends.sort(key=lambda end: end[0])
        for top, band in ends:
            assert top >= card.top - len(ends)
            assert top + band.width <= card.top + card.height + len(ends)
        for (above, band), (below, _) in itertools.pairwise(ends):
            assert below >= above + band.width - 1e-6


def test_names_with_markup_do_not_break_the_picture() -> None:
    summary = summary_of(*PAIRS["TP 8 to TP 4"])
    for name in ('<script>alert("x")</script>', "a&b", "]]>", "\ufffe\uffff", "\ud800"):
        side = msgspec.structs.replace(summary.producer, engine_id=name)
        svg = draw(msgspec.structs.replace(summary, producer=side))
        root = ElementTree.fromstring(svg.encode())  # noqa: S314 - our own
        assert not list(root.iter(f"{SVG}script"))


@given(st.data())
@settings(max_examples=draws(30))
def test_any_engine_can_be_drawn(data: st.DataObject) -> None:
    form = data.draw(short_forms())
    svg = draw(summary_of(form, form))
    assert ElementTree.fromstring(svg).tag == f"{SVG}svg"  # noqa: S314 - our own
    assert "nan" not in svg
