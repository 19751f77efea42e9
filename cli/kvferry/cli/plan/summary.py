"""The result of `kvferry plan` as one frozen value, from which the tables, the JSON and the picture are made.

The field names are those of `--json`, documented in docs/cli.md. Bytes and descriptors are those of the prompt, unless
their name says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import msgspec

from kvferry.cli.plan.engine import PlanSide, side_of
from kvferry.cli.plan.prediction import (
    Effort,
    Units,
    bundle_effort,
    count_units,
    prompt_tokens,
    source_effort,
)
from kvferry.plan.cost import Costs
from kvferry.plan.engine_shape import layer_order, natural
from kvferry.plan.refusals import Reason
from kvferry.plan.runs import Bundle
from kvferry.plan.tokens import TokenMap
from kvferry.plan.transfer_plan import Route, TransferPlan
from kvferry.protocol.geometry import Place, Range
from kvferry.protocol.handshake import CacheGroup, EngineDescription

PLAN_VERSION = 1


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


class ReadingWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One consumer worker: its line in the log, those at DEBUG of what that has no room for, and its reads."""

    place: Place
    log: str
    log_debug: tuple[str, ...] = ()
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


def summarise(
    consumer: EngineDescription,
    producer: EngineDescription,
    plans: Sequence[TransferPlan],
    costs: Costs,
    *,
    tokens: int | None,
    link_gb_s: float,
) -> PlanSummary:
    """Sum up the plans of all consumer workers for a prompt.

    A worker's time is that of its own link, on either side; the predicted time is that of the slowest worker.

    Raises:
        InvalidArgument: the prompt does not fit into a cache.
    """
    length = prompt_tokens(tokens, plans, consumer.groups, producer.groups)
    order = layer_order(consumer)

    @cache  # workers share most maps
    def units(tokens: TokenMap) -> Units:
        return count_units(tokens, consumer.groups, producer.groups, length)

    def milliseconds(effort: Effort) -> float:
        return round(effort.seconds(costs, link_gb_s) * 1000, 3)

    read = [Effort()] * len(consumer.workers)
    sent = [Effort()] * len(producer.workers)
    readers = []
    for plan in plans:
        flows = []
        for route in plan.routes:
            flow, effort = _flow(route, units, consumer.groups, order)
            read[plan.worker] += effort
            sent[route.worker] += replace(effort, staged_bytes=0)
            flows.append(flow)
        mine = read[plan.worker]
        log, *debug = plan.describe_all()
        readers.append(
            ReadingWorker(
                place=plan.place,
                log=log,
                log_debug=tuple(debug),
                bytes=mine.num_bytes,
                link_bytes=mine.link_bytes,
                descriptors=mine.descriptors,
                predicted_ms=milliseconds(mine),
                flows=tuple(flows),
            )
        )
    links = [
        ("consumer", worker.place, effort)
        for worker, effort in zip(consumer.workers, read, strict=True)
    ]
    links += [
        ("producer", worker.place, effort)
        for worker, effort in zip(producer.workers, sent, strict=True)
    ]
    side, place, slowest = max(links, key=lambda one: one[2].seconds(costs, link_gb_s))
    return PlanSummary(
        producer=side_of(producer),
        consumer=side_of(consumer),
        tokens=length,
        link_gb_s=link_gb_s,
        bytes_per_token=sum(flow.bytes_per_token for reader in readers for flow in reader.flows),
        bytes=sum(reader.bytes for reader in readers),
        link_bytes=sum(reader.link_bytes for reader in readers),
        descriptors=sum(reader.descriptors for reader in readers),
        predicted_ms=milliseconds(slowest),
        slowest=Slowest(side=side, place=place),
        workers=tuple(readers),
    )


def _flow(
    route: Route,
    units: Callable[[TokenMap], Units],
    groups: Sequence[CacheGroup],
    order: Mapping[str, int],
) -> tuple[Flow, Effort]:
    placed = [bundle_effort(route, bundle, units(bundle.tokens)) for bundle in route.bundles]
    staged = [source_effort(source, units(source.tokens)) for source in route.sources]
    whole = sum((*placed, *staged), Effort())
    flow = Flow(
        producer=route.place,
        producer_worker=route.worker,
        expected=route.expected,
        bytes_per_token=sum(item.token_bytes for item in route.slices),
        bytes_per_request=sum(item.state_bytes for item in route.slices),
        bytes=whole.num_bytes,
        link_bytes=whole.link_bytes,
        descriptors=whole.descriptors,
        reads=tuple(
            _read(route, bundle, units(bundle.tokens), groups, order) for bundle in route.bundles
        ),
        staged=tuple(
            StagedRead(
                reading=source.reading.value,
                run_bytes=source.bundle.run_bytes,
                link_bytes=effort.link_bytes,
                descriptors=effort.descriptors,
            )
            for source, effort in zip(route.sources, staged, strict=True)
        ),
    )
    return flow, whole


def _read(
    route: Route,
    bundle: Bundle,
    found: Units,
    groups: Sequence[CacheGroup],
    order: Mapping[str, int],
) -> Read:
    slices = [route.slices[member] for of_place in bundle.members for member in of_place]
    names = sorted({item.local.layer for item in slices}, key=natural)
    return Read(
        group=bundle.tokens.group,
        policy=groups[bundle.tokens.group].policy,
        kinds=tuple(dict.fromkeys(item.local.kind for item in slices)),
        layers=len(names),
        first_layer=names[0],
        last_layer=names[-1],
        layer_range=Range(order[names[0]], order[names[-1]] + 1),
        heads=tuple(
            sorted({item.heads for item in slices}, key=lambda heads: (heads.start, heads.stop))
        ),
        unit_tokens=bundle.tokens.unit_tokens,
        run_bytes=bundle.run_bytes,
        unit_runs=bundle.unit_runs,
        placing=slices[0].placing.value,
        reason=slices[0].reason,
        conversion=str(bundle.conversions[0]) if bundle.conversions else "",
        bytes=found.units * bundle.unit_bytes,
        runs=found.units * bundle.unit_runs,
    )
