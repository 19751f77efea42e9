"""The result of `kvferry plan` as one frozen value, from which the JSON, the tables and the picture are made.

The field names are those of `--json`, documented in docs/cli.md. Bytes and descriptors are those of the prompt unless
their name says otherwise; merging by NIXL is not counted. What a flow, a worker and the whole pair cost, in bytes and
in time, is added up from their reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import astuple

from kvferry.cli.plan.prompt import Groups, Units, count_units, prompt_tokens
from kvferry.plan.cost import Costs
from kvferry.plan.engine_shape import EngineShape, layer_order, natural, shown_tensors
from kvferry.plan.refusals import Reason
from kvferry.plan.runs import Bundle
from kvferry.plan.staged_layout import StagedSource
from kvferry.plan.tokens import TokenMap
from kvferry.plan.transfer_plan import Placing, Route, TransferPlan
from kvferry.protocol.geometry import Interleave, Place, Range, Topology
from kvferry.protocol.handshake import CacheGroup, EngineDescription

PLAN_VERSION = 1


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """The part that one worker holds: layers and heads as half-open ranges over the model, and the tokens."""

    place: Place
    layers: Range
    heads: Range
    interleave: Interleave
    cache_bytes: int


class PlanSide(msgspec.Struct, frozen=True, kw_only=True):
    """One engine."""

    engine_id: str
    topology: Topology
    layers: int
    heads: int
    dtypes: tuple[str, ...]
    groups: tuple[CacheGroup, ...]
    workers: tuple[Shard, ...]


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors that are read in the same way from one producer worker."""

    group: int
    policy: str
    kinds: tuple[str, ...]
    layers: int
    first_layer: str
    last_layer: str
    layer_range: Range
    heads: tuple[Range, ...]
    unit_tokens: int
    run_bytes: int
    unit_runs: int
    placing: str
    reason: str
    conversion: str
    bytes: int
    runs: int


class StagedRead(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of the producer that are read into the staging pool."""

    reading: str
    run_bytes: int
    link_bytes: int
    descriptors: int


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Reads of one consumer worker from one producer worker; without `reads` it only sends its release."""

    producer: Place
    producer_worker: int
    expected: int
    bytes_per_token: float
    bytes_per_request: int
    bytes: int
    link_bytes: int
    descriptors: int
    reads: tuple[Read, ...]
    staged: tuple[StagedRead, ...]

    def bytes_by_placing(self) -> Counter[str]:
        """The bytes of the prompt that are direct, staged and mapped."""
        placed = Counter[str]()
        for read in self.reads:
            placed[read.placing] += read.bytes
        return placed


class ReadingWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One consumer worker: its line in the log, those at DEBUG of what that has no room for, and its reads."""

    place: Place
    log: str
    log_debug: tuple[str, ...]
    bytes: int
    link_bytes: int
    descriptors: int
    predicted_ms: float
    flows: tuple[Flow, ...]


class Slowest(msgspec.Struct, frozen=True, kw_only=True):
    """The worker whose link determines the time."""

    side: str
    place: Place


class PlanSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A workable pair."""

    kvferry_plan: int = PLAN_VERSION
    workable: bool = True
    producer: PlanSide
    consumer: PlanSide
    tokens: int
    link_gb_s: float
    bytes_per_token: float
    bytes: int
    link_bytes: int
    descriptors: int
    predicted_ms: float
    slowest: Slowest
    workers: tuple[ReadingWorker, ...]


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An unworkable pair."""

    kvferry_plan: int = PLAN_VERSION
    workable: bool = False
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """The link of every worker, for the predicted time.

    Attributes:
        gb_s: its bandwidth, GB/s.
        costs: of descriptors, of the relayout and of copies from mapped memory.
    """

    gb_s: float
    costs: Costs

    def sends_s(self, flows: Sequence[Flow]) -> float:
        """The time of a producer worker's link for these flows."""
        link_s = sum(flow.link_bytes for flow in flows) / (self.gb_s * 1e9)
        descriptors = sum(flow.descriptors for flow in flows)
        return link_s + descriptors * self.costs.descriptor_s

    def reads_s(self, flows: Sequence[Flow]) -> float:
        """The time of a consumer worker for its flows: of its link, and of what it does itself."""
        placed = Counter[str]()
        for flow in flows:
            placed += flow.bytes_by_placing()
        relayout_s = self.costs.relayout_s(placed[Placing.STAGED])
        mapped_s = self.costs.mapped_s(placed[Placing.MAPPED])
        return self.sends_s(flows) + (relayout_s + mapped_s)


def side_of(engine: EngineDescription) -> PlanSide:
    """One engine, as it is displayed."""
    shape = EngineShape.from_engine(engine)
    order = layer_order(engine)
    shards = []
    for worker in engine.workers:
        held = [tensor for tensor in worker.tensors if len(tensor.heads)]
        layers = [order[tensor.layer] for tensor in held]
        heads = Range(0, 0)
        interleave = Interleave()
        for tensor in shown_tensors(engine, held)[:1]:
            heads = tensor.heads
            interleave = tensor.interleave
        shard = Shard(
            place=worker.place,
            layers=Range(min(layers, default=0), max(layers, default=-1) + 1),
            heads=heads,
            interleave=interleave,
            cache_bytes=sum(tensor.blocks * tensor.block_bytes for tensor in held),
        )
        shards.append(shard)
    return PlanSide(
        engine_id=engine.engine_id,
        topology=shape.topology,
        layers=shape.layers,
        heads=shape.heads,
        dtypes=shape.dtypes,
        groups=shape.groups,
        workers=tuple(shards),
    )


def summarise(
    consumer: EngineDescription,
    producer: EngineDescription,
    plans: Sequence[TransferPlan],
    link: Link,
    tokens: int | None,
) -> PlanSummary:
    """Sum up the plans of all consumer workers for a prompt.

    A worker's time is that of its own link, on either side; the predicted time is that of the slowest worker.

    Args:
        tokens: of the prompt; None for as many as `prompt_tokens` chooses.

    Raises:
        InvalidArgument: the prompt does not fit into a cache.
    """
    # Workers share most token maps, and counting one takes as long as pairing a request.
    token_maps = {tokens for plan in plans for tokens in plan.token_maps}
    length = prompt_tokens(tokens, token_maps, consumer.groups, producer.groups)
    units = {
        token_map: count_units(token_map, consumer.groups, length)
        for token_map in token_maps
    }
    order = layer_order(consumer)
    sent: list[list[Flow]] = [[] for _ in producer.workers]
    links = []
    workers = []
    for plan in plans:
        flows = tuple(
            _flow(route, units, consumer.groups, order) for route in plan.routes
        )
        for flow in flows:
            sent[flow.producer_worker].append(flow)
        log, *debug = plan.describe_all()
        worker = ReadingWorker(
            place=plan.place,
            log=log,
            log_debug=tuple(debug),
            **_sums(flows),
            predicted_ms=_ms(link.reads_s(flows)),
            flows=flows,
        )
        workers.append(worker)
        links.append((worker.predicted_ms, Slowest(side="consumer", place=plan.place)))
    for sender, flows_of_sender in zip(producer.workers, sent, strict=True):
        slow = Slowest(side="producer", place=sender.place)
        links.append((_ms(link.sends_s(flows_of_sender)), slow))
    # All links work at the same time, so the slowest one decides.
    predicted_ms, slowest = max(links, key=lambda timed: timed[0])
    all_flows = [flow for worker in workers for flow in worker.flows]
    return PlanSummary(
        producer=side_of(producer),
        consumer=side_of(consumer),
        tokens=length,
        link_gb_s=link.gb_s,
        bytes_per_token=sum(flow.bytes_per_token for flow in all_flows),
        **_sums(all_flows),
        predicted_ms=predicted_ms,
        slowest=slowest,
        workers=tuple(workers),
    )


def _sums(flows: Sequence[Flow]) -> dict[str, Any]:
    names = ("bytes", "link_bytes", "descriptors")
    return {name: sum(getattr(flow, name) for flow in flows) for name in names}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _flow(
    route: Route,
    units: Mapping[TokenMap, Units],
    groups: Groups,
    order: Mapping[str, int],
) -> Flow:
    reads = tuple(
        _read(route, bundle, units[bundle.tokens].units, groups, order)
        for bundle in route.bundles
    )
    staged = tuple(
        _staged_read(source, units[source.tokens]) for source in route.sources
    )
    # Staged bytes are over the link as `staged` reads them, mapped ones are not over it.
    direct = [read for read in reads if read.placing == Placing.DIRECT]
    return Flow(
        producer=route.place,
        producer_worker=route.worker,
        expected=route.expected,
        bytes_per_token=sum(item.token_bytes for item in route.slices),
        bytes_per_request=sum(item.state_bytes for item in route.slices),
        bytes=sum(read.bytes for read in reads),
        link_bytes=sum(read.bytes for read in direct)
        + sum(read.link_bytes for read in staged),
        descriptors=sum(read.runs for read in direct)
        + sum(read.descriptors for read in staged),
        reads=reads,
        staged=staged,
    )


def _read(
    route: Route,
    bundle: Bundle,
    units: int,
    groups: Groups,
    order: Mapping[str, int],
) -> Read:
    slices = [
        route.slices[member] for of_place in bundle.members for member in of_place
    ]
    layers = sorted({item.local.layer for item in slices}, key=natural)
    group = bundle.tokens.group
    return Read(
        group=group,
        policy=groups[group].policy,
        kinds=tuple(dict.fromkeys(item.local.kind for item in slices)),
        layers=len(layers),
        first_layer=layers[0],
        last_layer=layers[-1],
        layer_range=Range(order[layers[0]], order[layers[-1]] + 1),
        heads=tuple(sorted({item.heads for item in slices}, key=astuple)),
        unit_tokens=bundle.tokens.unit_tokens,
        run_bytes=bundle.run_bytes,
        unit_runs=bundle.unit_runs,
        placing=slices[0].placing.value,
        reason=slices[0].reason,
        conversion="".join(map(str, bundle.conversions[:1])),
        bytes=units * bundle.unit_bytes,
        runs=units * bundle.unit_runs,
    )


def _staged_read(source: StagedSource, units: Units) -> StagedRead:
    # The producer's runs, of units or of whole blocks.
    times = units.blocks if source.whole_blocks else units.units
    return StagedRead(
        reading=source.reading.value,
        run_bytes=source.bundle.run_bytes,
        link_bytes=times * source.bundle.unit_bytes,
        descriptors=times * source.bundle.unit_runs,
    )
