"""The counts and predictions of `kvferry plan`, against a request that is paired and expanded."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kvferry.cli.plan.command import (
    POOL_BYTES_DRAM,
    POOL_BYTES_VRAM,
    longest_staged_run,
)
from kvferry.cli.plan.short_form import KEYS
from kvferry.cli.plan.summary import Link, PlanSummary, summarise
from kvferry.plan.blocks import RequestBlocks, pair_request
from kvferry.plan.copies import route_copies
from kvferry.plan.cost import PUBLISHED, Costs
from kvferry.plan.planner import plan_engine
from kvferry.plan.refusals import PlanRefused
from kvferry.plan.transfer_plan import Placing
from kvferry.plan.waves import source_table, source_units
from kvferry.protocol.handshake import EngineDescription
from tests.cli.command import run
from tests.cli.plan.forms import read_pair, short_forms
from tests.draws import draws

NHD = "layers=2,heads=4,dim=16,layout=NHD"
DENSE_OF_NHD = "layers=2,heads=4,dim=16,layout=HND"


def summary_of(*arguments: str) -> PlanSummary:
    ran = run("plan", *arguments, "--json")
    assert (ran.code, ran.err) == (0, "")
    return msgspec.json.decode(ran.out, type=PlanSummary)


def placings(summary: PlanSummary) -> set[str]:
    flows = [flow for worker in summary.workers for flow in worker.flows]
    return {read.placing for flow in flows for read in flow.reads}


def costs_of(consumer: EngineDescription) -> Costs:
    pool = POOL_BYTES_VRAM if consumer.workers[0].memory == "VRAM" else POOL_BYTES_DRAM
    return Costs(staged_run_bytes=longest_staged_run(pool))


def request_for(
    producer: EngineDescription, consumer: EngineDescription, tokens: int
) -> RequestBlocks:
    """Blocks 1, 2, 3, … of a prompt, without those outside its windows."""
    lists = []
    for engine in (consumer, producer):
        tensors = engine.workers[0].tensors
        ranks = max((tensor.interleave.ranks for tensor in tensors), default=1)
        of_engine = []
        for group in engine.groups:
            span = group.block_tokens * ranks
            ids = list(range(1, math.ceil(tokens / span) + 1))
            if group.policy == "window" and engine is consumer:
                gone = max(0, tokens - group.window_tokens + 1) // span
                ids[:gone] = [0] * gone
            of_engine.append([1] if group.policy == "state" else ids)
        lists.append(of_engine)
    return RequestBlocks(
        local=lists[0],
        remote=lists[1],
        first_token=0,
        stop_token=tokens,
        num_tokens=tokens,
    )


def pair_of_forms(data: st.DataObject, layers: int) -> tuple[str, str]:
    """Two forms that can often be paired: the second one has the model of the first, and a cache of its own."""
    kinds = data.draw(st.sampled_from([("mla",), ("heads", "cpu")]))
    first, second = (data.draw(short_forms(layers, kinds)) for _ in range(2))
    of_model = {name for name, key in KEYS.items() if key.of_model}
    left_out = of_model - {"dtype", "state_dtype"}
    if "conv=" not in first:
        left_out.add("conv_layout")
    if "state_layers=" not in first:
        left_out.add("state_dtype")
    pairs = second.split(",")
    own = [pair for pair in pairs if pair.partition("=")[0] not in left_out]
    return first, ",".join(own)


@given(st.data())
@settings(max_examples=draws(50))
def test_bytes_and_descriptors_are_those_of_a_request(data: st.DataObject) -> None:
    """The oracle pairs a request, expands every direct copy, and prepares every staged read."""
    layers = data.draw(st.integers(1, 4))
    producer, consumer = read_pair(*pair_of_forms(data, layers))
    costs = costs_of(consumer)
    try:
        plans = plan_engine(consumer, producer, costs)
    except PlanRefused:
        event("refused")
        return
    event("planned")
    summary = summarise(consumer, producer, plans, Link(50.0, costs), None)
    request = request_for(producer, consumer, summary.tokens)
    for plan, worker in zip(plans, summary.workers, strict=True):
        pairs = pair_request(plan, consumer.groups, producer.groups, request)
        for route, flow in zip(plan.routes, worker.flows, strict=True):
            copies = route_copies(route, pairs)
            direct = [one for one in copies if one.placing is Placing.DIRECT]
            event(f"{len(route.sources)} sources")
            runs = staged = 0
            for source in route.sources:
                table = source_table(source, 0)
                times = len(source_units(source, pairs[source.tokens]))
                runs += table.runs * times
                staged += table.runs * table.run_bytes * times
            if not any(read.conversion for read in flow.reads):
                assert flow.bytes == sum(int(one.num_bytes.sum()) for one in copies)
            all_runs = sum(len(one.src) for one in copies)
            assert sum(read.runs for read in flow.reads) == all_runs
            assert flow.descriptors == sum(len(one.src) for one in direct) + runs
            read_bytes = sum(int(one.num_bytes.sum()) for one in direct)
            assert flow.link_bytes == read_bytes + staged
            assert flow.expected == route.expected
        assert worker.bytes == sum(flow.bytes for flow in worker.flows)
    assert summary.bytes == sum(worker.bytes for worker in summary.workers)


MODEL = "layers=4,heads=4,dim=8"
OF_160 = ("--tokens", "160", "--link", "2")


def test_the_predicted_time_is_the_slowest_links_bytes_and_descriptors() -> None:
    summary = summary_of(f"{MODEL},tp=4", MODEL, *OF_160)
    descriptor_s = PUBLISHED.direct_min_bytes / 50e9
    (worker,) = summary.workers
    wanted_ms = (summary.bytes / 2e9 + summary.descriptors * descriptor_s) * 1000
    assert placings(summary) == {"direct"}
    assert summary.predicted_ms == pytest.approx(wanted_ms, abs=0.001)
    assert (summary.slowest.side, str(summary.slowest.place)) == ("consumer", "tp0")
    back = summary_of(MODEL, f"{MODEL},tp=4", *OF_160)
    assert (back.slowest.side, back.bytes) == ("producer", worker.bytes)


def test_only_the_consumer_pays_for_the_relayout_of_staged_bytes() -> None:
    together = summary_of(f"{NHD},tp=1", f"{DENSE_OF_NHD},tp=2", "--tokens", "1024")
    apart = summary_of(f"{NHD},tp=2", f"{DENSE_OF_NHD},tp=1", "--tokens", "1024")
    assert placings(together) == placings(apart) == {"staged"}
    for summary, relaid in ((together, 0), (apart, apart.bytes)):
        descriptors_s = summary.descriptors * PUBLISHED.descriptor_s
        relayout_s = PUBLISHED.relayout_s(relaid)
        wanted_ms = (summary.link_bytes / 50e9 + descriptors_s + relayout_s) * 1000
        assert summary.predicted_ms == pytest.approx(wanted_ms, abs=0.0006)
    assert (together.slowest.side, apart.slowest.side) == ("producer", "consumer")


def test_on_one_host_nothing_goes_over_a_link_whatever_the_layouts() -> None:
    pair = ("layers=2,heads=4,dim=16,tp=2", NHD)
    apart, together = summary_of(*pair), summary_of(*pair, "--same-host")
    assert placings(together) == {"mapped"}
    assert (together.link_bytes, together.descriptors) == (0, 0)
    assert together.bytes == apart.bytes == apart.link_bytes
    mapped_ms = PUBLISHED.mapped_s(together.bytes) * 1000
    assert together.predicted_ms == pytest.approx(mapped_ms, abs=0.001)
    assert together.slowest.side == "consumer"
    (worker,) = together.workers
    assert " mapped, " in worker.log
    assert not any(flow.staged for flow in worker.flows)
    assert run("plan", *pair, "--same-host").out.count(" 0  mapped (1)") == 1


def test_on_one_host_caches_of_two_dtypes_need_no_pool() -> None:
    pair = (NHD, f"{NHD},dtype=float16")
    no_pool = ("--staging-pool-bytes", "0")
    assert run("plan", *pair, *no_pool).code != 0
    assert placings(summary_of(*pair, *no_pool, "--same-host")) == {"mapped"}
