"""The result of `kvferry plan` as one frozen value, from which the JSON and the picture are made, and its tables.

The field names are those of `--json`, documented in docs/cli.md. Bytes and descriptors are those of the prompt, unless
their name says otherwise. They are predicted by pairing the prompt's blocks exactly as for a request; the blocks are
assumed to be 1, 2, 3, … on both sides. Merging by NIXL is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import msgspec
import numpy as np

from kvferry.cli.arguments import InvalidArgument
from kvferry.cli.formatting import (
    binary_bytes,
    decimal_bytes,
    digits,
    milliseconds,
    print_line,
    print_table,
    rounded_count,
    span,
)
from kvferry.plan.blocks import NULL_BLOCK, RequestBlocks, pair_units
from kvferry.plan.cost import Costs
from kvferry.plan.engine_shape import EngineShape, format_group, layer_order, natural
from kvferry.plan.refusals import Reason
from kvferry.plan.runs import Bundle
from kvferry.plan.staged_layout import StagedSource
from kvferry.plan.tokens import TokenMap, TokenSide, first_needed
from kvferry.plan.transfer_plan import Placing, Route, TransferPlan
from kvferry.plan.wording import counted, format_numbers, format_places
from kvferry.protocol.description_json import EngineJson
from kvferry.protocol.geometry import Interleave, Place, Range, Topology
from kvferry.protocol.handshake import CacheGroup, EngineDescription, WorkerDescription

PLAN_VERSION = 1
DEFAULT_TOKENS = 8192
MAX_TOKENS = 1 << 22

Groups = Sequence[CacheGroup]


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


def format_engine(side: PlanSide) -> str:
    """An engine in one line."""
    shape = EngineShape(
        side.topology, side.layers, side.heads, side.dtypes, side.groups
    )
    return str(shape)


def format_tokens(interleave: Interleave) -> str:
    """The tokens that a worker holds: `all`, or `rank 1 of 2, 16 in a row`."""
    if interleave.ranks == 1:
        return "all"
    return f"rank {interleave.rank} of {interleave.ranks}, {interleave.run_tokens} in a row"


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

    # Workers share most token maps, and counting one takes as long as pairing a request.
    @cache
    def units_of(token_map: TokenMap) -> Units:
        return count_units(token_map, consumer.groups, producer.groups, length)

    def predicted_ms(effort: Effort) -> float:
        return round(effort.seconds(costs, link_gb_s) * 1000, 3)

    readers = []
    sending: list[list[Effort]] = [[] for _ in producer.workers]
    for plan in plans:
        flows = []
        efforts = []
        for route in plan.routes:
            flow, effort = _flow(route, units_of, consumer.groups, order)
            flows.append(flow)
            efforts.append(effort)
            # The relayout is the consumer's work, and so are copies from mapped memory.
            sending[route.worker].append(
                effort._replace(relayout_bytes=0, mapped_bytes=0)
            )
        own_effort = total(efforts)
        log, *debug = plan.describe_all()
        reader = ReadingWorker(
            place=plan.place,
            log=log,
            log_debug=tuple(debug),
            bytes=own_effort.num_bytes,
            link_bytes=own_effort.link_bytes,
            descriptors=own_effort.descriptors,
            predicted_ms=predicted_ms(own_effort),
            flows=tuple(flows),
        )
        readers.append(reader)
    links = [(reader.predicted_ms, "consumer", reader.place) for reader in readers]
    for worker, efforts in zip(producer.workers, sending, strict=True):
        links.append((predicted_ms(total(efforts)), "producer", worker.place))
    # All links work at the same time, so the slowest one decides.
    slowest_ms, side, place = max(links, key=lambda link: link[0])
    return PlanSummary(
        producer=side_of(producer),
        consumer=side_of(consumer),
        tokens=length,
        link_gb_s=link_gb_s,
        bytes_per_token=sum(
            flow.bytes_per_token for reader in readers for flow in reader.flows
        ),
        bytes=sum(reader.bytes for reader in readers),
        link_bytes=sum(reader.link_bytes for reader in readers),
        descriptors=sum(reader.descriptors for reader in readers),
        predicted_ms=slowest_ms,
        slowest=Slowest(side=side, place=place),
        workers=tuple(readers),
    )


def _flow(
    route: Route,
    units_of: Callable[[TokenMap], Units],
    groups: Groups,
    order: Mapping[str, int],
) -> tuple[Flow, Effort]:
    """The reads of one route, and their effort."""
    efforts = []
    reads = []
    for bundle in route.bundles:
        units = units_of(bundle.tokens)
        efforts.append(bundle_effort(route, bundle, units))
        reads.append(_read(route, bundle, units, groups, order))
    staged = []
    for source in route.sources:
        effort = source_effort(source, units_of(source.tokens))
        efforts.append(effort)
        staged_read = StagedRead(
            reading=source.reading.value,
            run_bytes=source.bundle.run_bytes,
            link_bytes=effort.link_bytes,
            descriptors=effort.descriptors,
        )
        staged.append(staged_read)
    all_reads = total(efforts)
    flow = Flow(
        producer=route.place,
        producer_worker=route.worker,
        expected=route.expected,
        bytes_per_token=sum(item.token_bytes for item in route.slices),
        bytes_per_request=sum(item.state_bytes for item in route.slices),
        bytes=all_reads.num_bytes,
        link_bytes=all_reads.link_bytes,
        descriptors=all_reads.descriptors,
        reads=tuple(reads),
        staged=tuple(staged),
    )
    return flow, all_reads


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


# The prediction.


class Units(NamedTuple):
    """A prompt in one token map: the number of units, and of the producer's blocks that hold them."""

    units: int
    blocks: int


class Effort(NamedTuple):
    """The cost of reading.

    Attributes:
        num_bytes: bytes needed.
        link_bytes: bytes over the link; more than needed if whole blocks are read for a part of them.
        descriptors: descriptors given to NIXL.
        relayout_bytes: bytes that the relayout puts in place after they were staged.
        mapped_bytes: bytes that are copied from mapped memory.
    """

    num_bytes: int = 0
    link_bytes: int = 0
    descriptors: int = 0
    relayout_bytes: int = 0
    mapped_bytes: int = 0

    def seconds(self, costs: Costs, link_gb_s: float) -> float:
        """Time over a link, with the known costs of descriptors, of the relayout and of copies from mapped memory."""
        link_s = self.link_bytes / (link_gb_s * 1e9)
        descriptors_s = self.descriptors * costs.descriptor_s
        copies_s = costs.relayout_s(self.relayout_bytes) + costs.mapped_s(
            self.mapped_bytes
        )
        return link_s + descriptors_s + copies_s


def total(efforts: Iterable[Effort]) -> Effort:
    """All of them together."""
    return Effort(*map(sum, zip(*efforts, strict=True)))


def prompt_tokens(
    wanted: int | None, plans: Iterable[TransferPlan], here: Groups, there: Groups
) -> int:
    """The length of the prompt: `wanted`, or `DEFAULT_TOKENS` but at most the tokens that the smaller cache holds.

    Raises:
        InvalidArgument: `wanted` is more than a cache holds, or a cache holds nothing.
    """
    limits = [(MAX_TOKENS, "this command counts no further")]
    for token_map in _token_maps(plans):
        # A state is one page, however long the prompt is.
        if token_map.is_state:
            continue
        remote = _capacity(token_map.remote, there[token_map.group])
        local = _capacity(token_map.local, here[token_map.group])
        limits.append((remote, "the producer's cache holds no more"))
        limits.append((local, "the consumer's cache holds no more"))
    # By number, and then by text: the reason is that of the smallest limit.
    max_tokens, why = min(limits)
    if max_tokens < 1:
        raise InvalidArgument(
            "blocks", 1, "at least 2 in every cache: block 0 is the null block"
        )
    if wanted is None:
        return min(DEFAULT_TOKENS, max_tokens)
    if wanted > max_tokens:
        raise InvalidArgument("--tokens", wanted, f"at most {max_tokens}: {why}")
    return wanted


def _token_maps(plans: Iterable[TransferPlan]) -> set[TokenMap]:
    token_maps: set[TokenMap] = set()
    for plan in plans:
        for route in plan.routes:
            token_maps.update(bundle.tokens for bundle in route.bundles)
    return token_maps


def count_units(
    token_map: TokenMap, here: Groups, there: Groups, num_tokens: int
) -> Units:
    """The units of a prompt of `num_tokens` tokens in one token map."""
    if token_map.is_state:
        return Units(1, 1)
    group = token_map.group
    local_blocks = _assumed_blocks(token_map.local, here[group], num_tokens)
    # Tokens outside the window have no block.
    local_span = here[group].block_tokens * token_map.local.share.ranks
    num_outside = first_needed(here[group], num_tokens) // local_span
    local_blocks[:num_outside] = [NULL_BLOCK] * num_outside
    other_groups: list[list[int]] = [[]] * group
    request = RequestBlocks(
        local=[*other_groups, local_blocks],
        remote=[
            *other_groups,
            _assumed_blocks(token_map.remote, there[group], num_tokens),
        ],
        first_token=0,
        stop_token=num_tokens,
        num_tokens=num_tokens,
    )
    pairs = pair_units(token_map, here[group], there[group], request)
    # A read of whole blocks fetches a block once, however many of its units are needed.
    return Units(len(pairs), len(np.unique(pairs.remote_block)))


def bundle_effort(route: Route, bundle: Bundle, units: Units) -> Effort:
    """The effort of a bundle; of a staged one without the reads, which are in `source_effort`."""
    num_bytes = units.units * bundle.unit_bytes
    placing = route.placing_of(bundle)
    if placing is Placing.STAGED:
        return Effort(num_bytes=num_bytes, relayout_bytes=num_bytes)
    if placing is Placing.MAPPED:
        return Effort(num_bytes=num_bytes, mapped_bytes=num_bytes)
    return Effort(
        num_bytes=num_bytes,
        link_bytes=num_bytes,
        descriptors=units.units * bundle.unit_runs,
    )


def source_effort(source: StagedSource, units: Units) -> Effort:
    """The effort of reads into the staging pool: the producer's runs, of units or of whole blocks."""
    times = units.blocks if source.whole_blocks else units.units
    return Effort(
        link_bytes=times * source.bundle.unit_bytes,
        descriptors=times * source.bundle.unit_runs,
    )


def _capacity(side: TokenSide, group: CacheGroup) -> int:
    """Tokens that a cache holds in all blocks except the null block."""
    kernel_blocks = group.block_tokens // side.block_tokens
    usable_blocks = side.blocks // kernel_blocks - 1
    return usable_blocks * group.block_tokens * side.share.ranks


def _assumed_blocks(side: TokenSide, group: CacheGroup, num_tokens: int) -> list[int]:
    """The assumed scheduler blocks of a prompt."""
    num_blocks = -(-num_tokens // (group.block_tokens * side.share.ranks))
    return list(range(1, num_blocks + 1))


# The tables. That of a plan has a row for each kind of read of each pair of workers, and equal ones are folded into
# one: rows that differ only in their workers and in which heads are read, not in how many. So 64 ranks that are read
# alike by 16 are one row, and so are all workers that are only sent their release.

RELEASE = "released"
NONE = "no need"

_COLUMNS = (
    "consumer",
    "producer",
    ">pairs",
    "layers",
    "heads",
    ">bytes",
    ">descriptors",
    "placed",
)
_STYLES = {
    "direct": "green",
    "staged": "yellow",
    "mapped": "cyan",
    RELEASE: "dim",
    NONE: "dim",
}


class Kind(NamedTuple):
    """What folded rows have in common.

    Attributes:
        placed: how the bytes are put in place, and the number of the reason.
        group, layers: index of the cache group; how many of which tensors, as text.
        num_bytes, descriptors: of the prompt; None: the descriptors are those of the row before.
        head_counts: how many heads each range of a pair's has.
    """

    placed: str
    group: int = 0
    layers: str = ""
    num_bytes: int = 0
    descriptors: int | None = 0
    head_counts: tuple[int, ...] = ()


class Pair(NamedTuple):
    """A consumer worker, the producer worker that it reads from, if any, and the heads of the model that it reads."""

    consumer: Place
    producer: Place | None
    heads: tuple[Range, ...] = ()


def fold(
    readers: Iterable[ReadingWorker], reasons: dict[str, int]
) -> dict[Kind, list[Pair]]:
    """The pairs of each kind, in the order of their first ones; new reasons get the next number in `reasons`."""
    folded: dict[Kind, list[Pair]] = {}
    for reader in readers:
        if not reader.flows:
            folded.setdefault(Kind(NONE), []).append(Pair(reader.place, None))
        for flow in reader.flows:
            if not flow.reads:
                folded.setdefault(Kind(RELEASE), []).append(
                    Pair(reader.place, flow.producer)
                )
            for kind, read in _kinds(flow, reasons):
                pair = Pair(reader.place, flow.producer, read.heads)
                folded.setdefault(kind, []).append(pair)
    return folded


def _kinds(flow: Flow, reasons: dict[str, int]) -> Iterator[tuple[Kind, Read]]:
    # Staged reads of one pair of workers share their descriptors, which the first of them shows.
    staged_descriptors: int | None = sum(staged.descriptors for staged in flow.staged)
    for read in flow.reads:
        descriptors: int | None = read.runs
        if read.placing == "mapped":
            descriptors = 0
        if read.placing == "staged":
            descriptors = staged_descriptors
            staged_descriptors = None
        number = reasons.setdefault(read.reason, len(reasons) + 1)
        kind = Kind(
            placed=f"{read.placing} ({number})",
            group=read.group,
            layers=f"{read.layers} × {' '.join(read.kinds)}",
            num_bytes=read.bytes,
            descriptors=descriptors,
            # Not the heads themselves: workers that read other heads alike are one row.
            head_counts=tuple(map(len, read.heads)),
        )
        yield kind, read


def cells_of(kind: Kind, pairs: Sequence[Pair], groups: Sequence[str]) -> list[str]:
    """A folded row as text, a cell for each of `_COLUMNS`.

    Args:
        groups: names of the cache groups, if there are several.
    """
    consumers = format_places(pair.consumer for pair in pairs)
    producers = format_places(
        pair.producer for pair in pairs if pair.producer is not None
    )
    cells = [consumers, producers, f"{len(pairs)}"]
    if not kind.layers:
        return [*cells, "", "", "", "", kind.placed]
    layers = kind.layers
    if groups:
        layers = f"{layers}, {groups[kind.group]}"
    ranges = [held for pair in pairs for held in pair.heads]
    heads = {head for held in ranges for head in range(held.start, held.stop)}
    descriptors = "with it"
    if kind.descriptors is not None:
        descriptors = rounded_count(kind.descriptors)
    return [
        *cells,
        layers,
        format_numbers(sorted(heads)),
        decimal_bytes(kind.num_bytes),
        descriptors,
        kind.placed,
    ]


def print_plan(summary: PlanSummary) -> None:
    """Print a workable pair."""
    reasons: dict[str, int] = {}
    groups = _names_of_groups(summary)
    folded = fold(summary.workers, reasons)
    rows = [cells_of(kind, pairs, groups) for kind, pairs in folded.items()]
    _leave_out_repeated(rows)
    print_table(_COLUMNS, rows, _STYLES)
    for reason, number in reasons.items():
        print_line(f"({number}) {reason}", "dim", hang=4)
    print_line()
    _print_time(summary)
    print_line()
    # One worker's: the lines of 64 would hide the table.
    worker = summary.workers[0]
    more = ""
    if len(summary.workers) > 1:
        more = f", one of {len(summary.workers)} (--json has all)"
    print_line(f"in the log of consumer {worker.place}{more}:")
    print_line(worker.log, "dim", hang=2)
    for line in worker.log_debug:
        print_line(f"DEBUG {line}", "dim", hang=2)


def _names_of_groups(summary: PlanSummary) -> list[str]:
    """Names of the cache groups, with their number where two have one policy; none for a single group."""
    policies = [group.policy for group in summary.consumer.groups]
    if len(policies) == 1:
        return []
    if len(set(policies)) == len(policies):
        return policies
    return [f"{policy} {index}" for index, policy in enumerate(policies)]


def _leave_out_repeated(rows: list[list[str]]) -> None:
    """Empty the first cell of each row that has the consumers of the row above it."""
    consumers = ""
    # In a column of equal names the one that differs is not seen.
    for row in rows:
        if row[0] == consumers:
            row[0] = ""
        else:
            consumers = row[0]


def print_refusal(refusal: Refusal) -> None:
    """Print an unworkable pair: all reasons, each with the change that helps."""
    print_line("this pair cannot work:", "bold red")
    for number, reason in enumerate(refusal.reasons, 1):
        print_line(f"{number:>4}. {reason.field}", "bold", hang=6)
        print_line(f"      producer: {reason.producer}", hang=8)
        print_line(f"      consumer: {reason.consumer}", hang=8)
        print_line(f"      → {reason.change}", "green", hang=8)


def print_engine(engine_json: EngineJson, side: PlanSide) -> None:
    """Print one engine: its model, groups and workers."""
    facts = engine_json.facts
    print_line(f"engine {engine_json.engine_id}: {format_engine(side)}")
    named_facts = (
        ("model", facts.model),
        ("fingerprint", facts.fingerprint),
        ("dtype", facts.dtype),
        ("cache", facts.cache_dtype),
        ("quantisation", facts.quantization),
        ("speculative", facts.speculative),
    )
    for name, value in named_facts:
        print_line(f"  {name:<13} {value}")
    for index, group in enumerate(engine_json.groups):
        print_line(f"  {f'group {index}':<13} {format_group(group)}")
    rows = (
        (
            str(shard.place),
            worker.memory,
            str(worker.device),
            span(shard.layers),
            span(shard.heads),
            format_tokens(shard.interleave),
            str(len(worker.tensors)),
            binary_bytes(shard.cache_bytes),
        )
        for worker, shard in zip(engine_json.workers, side.workers, strict=True)
    )
    print_table(
        (
            "worker",
            "memory",
            ">device",
            "layers",
            "heads",
            "tokens",
            ">tensors",
            ">cache",
        ),
        rows,
    )


def print_sides(sides: Iterable[tuple[str, PlanSide, str]]) -> None:
    """Print both engines: role, engine, and the short form that it was completed to, or empty."""
    for role, side, form in sides:
        name = role
        # An engine of a short form has its role as its id.
        if side.engine_id != role:
            name = f"{role} {side.engine_id}:"
        print_line(f"{name} {format_engine(side)}", hang=len(role) + 1)
        if form:
            print_line(f"{'':{len(role)}} {form}", "dim", hang=len(role) + 1)
    print_line()


def _print_time(summary: PlanSummary) -> None:
    sizes = [decimal_bytes(summary.bytes)]
    if summary.link_bytes != summary.bytes:
        sizes.append(f"{decimal_bytes(summary.link_bytes)} over the links")
    sizes.append(f"{decimal_bytes(summary.bytes_per_token)}/token")
    sizes.append(f"{rounded_count(summary.descriptors)} descriptors")
    print_line(
        f"a prompt of {counted(summary.tokens, 'token')}: {', '.join(sizes)}", hang=2
    )
    time = milliseconds(summary.predicted_ms)
    slowest = f"{summary.slowest.side} {summary.slowest.place}"
    print_line(
        f"predicted: {time} over {digits(summary.link_gb_s)} GB/s a worker; {slowest} is the slowest",
        "bold",
        hang=2,
    )
