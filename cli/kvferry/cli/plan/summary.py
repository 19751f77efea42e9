"""The result of `kvferry plan` as one frozen value, from which the tables, the JSON and the picture are made.

The field names are those of `--json`, documented in docs/cli.md. Bytes and descriptors are those of the prompt, unless
their name says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from kvferry.cli.plan.prediction import Effort, Units, bundle_effort, count_units, prompt_tokens, source_effort
from kvferry.plan.cost import Costs
from kvferry.plan.refusals import PlanRefused
from kvferry.plan.runs import Bundle
from kvferry.plan.tokens import TokenMap
from kvferry.plan.transfer_plan import Route, TransferPlan
from kvferry.protocol.geometry import Interleave, Place, Range, Topology
from kvferry.protocol.handshake import CacheGroup, EngineDescription, WorkerDescription

PLAN_VERSION = 1


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """The part that one worker holds: layers and heads as half-open ranges over the model, and the tokens."""

    place: Place
    layers: Range
    heads: Range
    interleave: Interleave
    cache_bytes: int


class Side(msgspec.Struct, frozen=True, kw_only=True):
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


class Reader(msgspec.Struct, frozen=True, kw_only=True):
    """One consumer worker: its line in the log, and its reads."""

    place: Place
    log: str
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
    producer: Side
    consumer: Side
    tokens: int
    link_gb_s: float
    bytes_per_token: float
    bytes: int
    link_bytes: int
    descriptors: int
    predicted_ms: float
    slowest: Slowest
    workers: tuple[Reader, ...]


class RefusedReason(msgspec.Struct, frozen=True, kw_only=True):
    """One reason why a pair cannot work."""

    field: str
    producer: str
    consumer: str
    change: str


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An unworkable pair."""

    kvferry_plan: int = PLAN_VERSION
    workable: bool = False
    reasons: tuple[RefusedReason, ...]


def refusal_of(refused: PlanRefused) -> Refusal:
    """The reasons as in the JSON."""
    return Refusal(
        reasons=tuple(
            RefusedReason(field=one.field, producer=one.producer, consumer=one.consumer, change=one.change)
            for one in refused.reasons
        )
    )


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
    counter = _Counter(consumer.groups, producer.groups, length)
    order = layer_order(consumer)
    read = [Effort()] * len(consumer.workers)
    sent = [Effort()] * len(producer.workers)
    readers = []
    for plan in plans:
        flows = []
        for route in plan.routes:
            flow, effort = _flow(route, counter, consumer.groups, order)
            read[plan.worker] = read[plan.worker].plus(effort)
            sent[route.worker] = sent[route.worker].plus(effort._replace(staged_bytes=0))
            flows.append(flow)
        mine = read[plan.worker]
        readers.append(
            Reader(
                place=plan.place,
                log=plan.describe(),
                bytes=mine.num_bytes,
                link_bytes=mine.link_bytes,
                descriptors=mine.descriptors,
                predicted_ms=_ms(mine, costs, link_gb_s),
                flows=tuple(flows),
            )
        )
    predicted_ms, slowest = _slowest(consumer, producer, read, sent, costs, link_gb_s)
    return PlanSummary(
        producer=side_of(producer),
        consumer=side_of(consumer),
        tokens=length,
        link_gb_s=link_gb_s,
        bytes_per_token=sum(flow.bytes_per_token for reader in readers for flow in reader.flows),
        bytes=sum(reader.bytes for reader in readers),
        link_bytes=sum(reader.link_bytes for reader in readers),
        descriptors=sum(reader.descriptors for reader in readers),
        predicted_ms=predicted_ms,
        slowest=slowest,
        workers=tuple(readers),
    )


class _Counter:
    """Units by token map; workers share most maps."""

    def __init__(self, here: Sequence[CacheGroup], there: Sequence[CacheGroup], num_tokens: int) -> None:
        self._here, self._there, self._num_tokens = here, there, num_tokens
        self._units: dict[TokenMap, Units] = {}

    def units(self, tokens: TokenMap) -> Units:
        if tokens not in self._units:
            self._units[tokens] = count_units(tokens, self._here, self._there, self._num_tokens)
        return self._units[tokens]


def _sum(efforts: Sequence[Effort]) -> Effort:
    whole = Effort()
    for effort in efforts:
        whole = whole.plus(effort)
    return whole


def _ms(effort: Effort, costs: Costs, link_gb_s: float) -> float:
    return round(effort.seconds(costs, link_gb_s) * 1000, 3)


def _slowest(
    consumer: EngineDescription,
    producer: EngineDescription,
    read: Sequence[Effort],
    sent: Sequence[Effort],
    costs: Costs,
    link_gb_s: float,
) -> tuple[float, Slowest]:
    candidates = [("consumer", worker.place, effort) for worker, effort in zip(consumer.workers, read, strict=True)]
    candidates += [("producer", worker.place, effort) for worker, effort in zip(producer.workers, sent, strict=True)]
    side, place, effort = max(candidates, key=lambda one: one[2].seconds(costs, link_gb_s))
    return _ms(effort, costs, link_gb_s), Slowest(side=side, place=place)


def _flow(
    route: Route, counter: _Counter, groups: Sequence[CacheGroup], order: Mapping[str, int]
) -> tuple[Flow, Effort]:
    placed = [bundle_effort(route, bundle, counter.units(bundle.tokens)) for bundle in route.bundles]
    staged = [source_effort(source, counter.units(source.tokens)) for source in route.sources]
    whole = _sum([*placed, *staged])
    flow = Flow(
        producer=route.place,
        producer_worker=route.worker,
        expected=route.expected,
        bytes_per_token=sum(item.token_bytes for item in route.slices),
        bytes_per_request=sum(item.state_bytes for item in route.slices),
        bytes=whole.num_bytes,
        link_bytes=whole.link_bytes,
        descriptors=whole.descriptors,
        reads=tuple(_read(route, bundle, counter.units(bundle.tokens), groups, order) for bundle in route.bundles),
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


def _read(route: Route, bundle: Bundle, found: Units, groups: Sequence[CacheGroup], order: Mapping[str, int]) -> Read:
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
        heads=tuple(sorted({item.heads for item in slices}, key=lambda heads: (heads.start, heads.stop))),
        unit_tokens=bundle.tokens.unit_tokens,
        run_bytes=bundle.run_bytes,
        unit_runs=bundle.unit_runs,
        placing=slices[0].placing.value,
        reason=slices[0].reason,
        conversion=str(bundle.conversions[0]) if bundle.conversions else "",
        bytes=found.units * bundle.unit_bytes,
        runs=found.units * bundle.unit_runs,
    )


def side_of(engine: EngineDescription) -> Side:
    """One engine, as it is displayed."""
    tensors = [tensor for worker in engine.workers for tensor in worker.tensors]
    order = layer_order(engine)
    shards = tuple(_shard(engine, worker, order) for worker in engine.workers)
    return Side(
        engine_id=engine.engine_id,
        topology=engine.topology,
        layers=len(order),
        heads=max((shard.heads.stop for shard in shards), default=0),
        dtypes=tuple(sorted({tensor.format.dtype for tensor in tensors})),
        groups=engine.groups,
        workers=shards,
    )


def layer_order(engine: EngineDescription) -> dict[str, int]:
    """The index of every layer name among all layers of the engine."""
    names = {tensor.layer for worker in engine.workers for tensor in worker.tensors}
    return {name: index for index, name in enumerate(sorted(names, key=natural))}


def natural(name: str) -> tuple[tuple[str, int], ...]:
    """A key that sorts `layers.2` before `layers.10`."""
    return tuple((text, int(digits or 0)) for text, digits in re.findall(r"(\D*)(\d*)", name))


def _shard(engine: EngineDescription, worker: WorkerDescription, order: dict[str, int]) -> Shard:
    held = [tensor for tensor in worker.tensors if len(tensor.heads)]
    layers = [order[tensor.layer] for tensor in held]
    attention = [tensor for tensor in held if engine.groups[tensor.group].policy != "state"]
    shown = attention or [tensor for tensor in held if not tensor.kind.startswith("conv")] or held
    return Shard(
        place=worker.place,
        layers=Range(min(layers, default=0), max(layers, default=-1) + 1),
        heads=shown[0].heads if shown else Range(0, 0),
        interleave=shown[0].interleave if shown else Interleave(),
        cache_bytes=sum(tensor.blocks * tensor.block_bytes for tensor in held),
    )
