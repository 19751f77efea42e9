"""The result of `kvferry plan` as one frozen value, from which the JSON, the tables and the picture are made.

The field names are those of `--json`, documented in docs/cli.md. Bytes and descriptors are those of the prompt unless
their name says otherwise; merging by NIXL is not counted. What a flow, a worker and the whole pair cost, in bytes and
in time, is added up from their reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvferry.cli.plan.prompt import Groups, Units, count_units, prompt_tokens
from kvferry.plan.cost import Costs
from kvferry.plan.engine_shape import EngineShape, layer_order, natural
from kvferry.plan.refusals import Reason
from kvferry.plan.runs import Bundle
from kvferry.plan.staged_layout import StagedSource
from kvferry.plan.tokens import TokenMap
from kvferry.plan.transfer_plan import Placing, Route, TransferPlan
from kvferry.protocol.geometry import Interleave, Place, Range, Topology
from kvferry.protocol.handshake import CacheGroup, EngineDescription, WorkerDescription

PLAN_VERSION = 1


# One engine, as it is displayed.


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


def side_of(engine: EngineDescription) -> PlanSide:
    """One engine, as it is displayed."""
    shape = EngineShape.from_engine(engine)
    order = layer_order(engine)
    return PlanSide(
        engine_id=engine.engine_id,
        topology=shape.topology,
        layers=shape.layers,
        heads=shape.heads,
        dtypes=shape.dtypes,
        groups=shape.groups,
        workers=tuple(_shard(engine, worker, order) for worker in engine.workers),
    )


def _shard(
    engine: EngineDescription, worker: WorkerDescription, order: dict[str, int]
) -> Shard:
    held = [tensor for tensor in worker.tensors if len(tensor.heads)]
    layers = [order[tensor.layer] for tensor in held]
    # The heads that are displayed are those of attention; of a model without attention those of its states, and only
    # then the channels of its convolutions.
    attention = [
        tensor for tensor in held if engine.groups[tensor.group].policy != "state"
    ]
    not_convolutions = [tensor for tensor in held if not tensor.kind.startswith("conv")]
    displayed = attention or not_convolutions or held
    heads = Range(0, 0)
    interleave = Interleave()
    if displayed:
        heads = displayed[0].heads
        interleave = displayed[0].interleave
    return Shard(
        place=worker.place,
        layers=Range(min(layers, default=0), max(layers, default=-1) + 1),
        heads=heads,
        interleave=interleave,
        cache_bytes=sum(tensor.blocks * tensor.block_bytes for tensor in held),
    )


# The plan.


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


@dataclass(frozen=True, slots=True)
class Link:
    """The link of every worker, for the predicted time.

    Attributes:
        gb_s: its bandwidth, GB/s.
        costs: of descriptors, of the relayout and of copies from mapped memory.
    """

    gb_s: float
    costs: Costs

    def sends_ms(self, flows: Sequence[Flow]) -> float:
        """The time of a producer worker's link for these flows."""
        return round(self._sends_s(flows) * 1000, 3)

    def reads_ms(self, flows: Sequence[Flow]) -> float:
        """The time of a consumer worker for its flows, with the relayout and copies from mapped memory."""
        # Both are the consumer's own work: the producer's link has neither.
        relayout_s = self.costs.relayout_s(_bytes_placed(flows, Placing.STAGED))
        mapped_s = self.costs.mapped_s(_bytes_placed(flows, Placing.MAPPED))
        return round((self._sends_s(flows) + (relayout_s + mapped_s)) * 1000, 3)

    def _sends_s(self, flows: Sequence[Flow]) -> float:
        link_s = sum(flow.link_bytes for flow in flows) / (self.gb_s * 1e9)
        descriptors = sum(flow.descriptors for flow in flows)
        return link_s + descriptors * self.costs.descriptor_s


def _bytes_placed(flows: Sequence[Flow], placing: Placing) -> int:
    reads = (read for flow in flows for read in flow.reads)
    return sum(read.bytes for read in reads if read.placing == placing)


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
    length = prompt_tokens(tokens, plans, consumer.groups, producer.groups)

    # Workers share most token maps, and counting one takes as long as pairing a request.
    @functools.cache
    def units_of(token_map: TokenMap) -> Units:
        return count_units(token_map, consumer.groups, producer.groups, length)

    order = layer_order(consumer)
    workers = []
    links = []
    sent: list[list[Flow]] = [[] for _ in producer.workers]
    for plan in plans:
        flows = tuple(
            _flow(route, units_of, consumer.groups, order) for route in plan.routes
        )
        for flow in flows:
            sent[flow.producer_worker].append(flow)
        worker = _reading_worker(plan, flows, link)
        workers.append(worker)
        links.append((worker.predicted_ms, Slowest(side="consumer", place=plan.place)))
    for sender, flows_of_sender in zip(producer.workers, sent, strict=True):
        slow = Slowest(side="producer", place=sender.place)
        links.append((link.sends_ms(flows_of_sender), slow))
    # All links work at the same time, so the slowest one decides.
    predicted_ms, slowest = max(links, key=lambda timed: timed[0])
    return PlanSummary(
        producer=side_of(producer),
        consumer=side_of(consumer),
        tokens=length,
        link_gb_s=link.gb_s,
        bytes_per_token=sum(
            flow.bytes_per_token for worker in workers for flow in worker.flows
        ),
        bytes=sum(worker.bytes for worker in workers),
        link_bytes=sum(worker.link_bytes for worker in workers),
        descriptors=sum(worker.descriptors for worker in workers),
        predicted_ms=predicted_ms,
        slowest=slowest,
        workers=tuple(workers),
    )


def _reading_worker(
    plan: TransferPlan, flows: tuple[Flow, ...], link: Link
) -> ReadingWorker:
    log, *debug = plan.describe_all()
    return ReadingWorker(
        place=plan.place,
        log=log,
        log_debug=tuple(debug),
        bytes=sum(flow.bytes for flow in flows),
        link_bytes=sum(flow.link_bytes for flow in flows),
        descriptors=sum(flow.descriptors for flow in flows),
        predicted_ms=link.reads_ms(flows),
        flows=flows,
    )


def _flow(
    route: Route,
    units_of: Callable[[TokenMap], Units],
    groups: Groups,
    order: Mapping[str, int],
) -> Flow:
    reads = tuple(
        _read(route, bundle, units_of(bundle.tokens), groups, order)
        for bundle in route.bundles
    )
    staged = tuple(
        _staged_read(source, units_of(source.tokens)) for source in route.sources
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
    units: Units,
    groups: Groups,
    order: Mapping[str, int],
) -> Read:
    slices = [
        route.slices[member] for of_place in bundle.members for member in of_place
    ]
    layers = sorted({item.local.layer for item in slices}, key=natural)
    kinds = dict.fromkeys(item.local.kind for item in slices)
    heads = sorted(
        {item.heads for item in slices}, key=lambda held: (held.start, held.stop)
    )
    conversion = ""
    if bundle.conversions:
        conversion = str(bundle.conversions[0])
    return Read(
        group=bundle.tokens.group,
        policy=groups[bundle.tokens.group].policy,
        kinds=tuple(kinds),
        layers=len(layers),
        first_layer=layers[0],
        last_layer=layers[-1],
        layer_range=Range(order[layers[0]], order[layers[-1]] + 1),
        heads=tuple(heads),
        unit_tokens=bundle.tokens.unit_tokens,
        run_bytes=bundle.run_bytes,
        unit_runs=bundle.unit_runs,
        placing=slices[0].placing.value,
        reason=slices[0].reason,
        conversion=conversion,
        bytes=units.units * bundle.unit_bytes,
        runs=units.units * bundle.unit_runs,
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
