"""From two engines' descriptions to the plans of the consumer's workers, or to all the reasons against them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvferry.plan.assignment import Assignment, Lack, assign
from kvferry.plan.bundles import Bundle, Part, Reading, bundle
from kvferry.plan.conversion import conversion_of, has_scales_by_head, is_convertible, lacks_scales, needs_conversion
from kvferry.plan.cost import PUBLISHED, Choice, Costs, Offer, cheapest, choose
from kvferry.plan.refusal import PlanRefused, Reason
from kvferry.plan.staging import Source, differs, offers, sources
from kvferry.plan.tokens import TokenMap, map_tokens
from kvferry.plan.transfer_plan import Placing, Route, Slice, TransferPlan
from kvferry.plan.validity import check_description
from kvferry.protocol.geometry import PagedTensor, Range
from kvferry.protocol.handshake import EngineDescription

_SAME_MODEL = {
    "fingerprint": "serve the same weights on both sides, or name them alike with model_fingerprint",
    "dtype": "start both engines with the same --dtype",
    "quantization": "start both engines with the same --quantization",
    "speculative": "give both engines the same --speculative-config",
}
_SAME_TENSOR = {
    "group": "serve the same model with the same hybrid cache manager setting",
    "format": "use the same cache dtype and attention backend on both sides",
    "scales": "use the same static scales, or formats that can be converted",
    "cell_bytes": "use the same cache dtype and attention backend on both sides",
    "tile_tokens": "give both engines the same --block-size and attention backend: these cells cannot be divided",
}
_MAX_TENSOR_REASONS = 8


def plan_transfer(
    consumer: EngineDescription, worker: int, producer: EngineDescription, costs: Costs = PUBLISHED
) -> TransferPlan:
    """Plan what worker number `worker` of `consumer` reads from `producer`.

    Args:
        consumer, producer: with all workers of either engine.

    Raises:
        PlanRefused: with every reason.
        InvalidMessage: the producer's description contradicts itself.
    """
    assignment = _assignment(consumer, producer)
    return _plan(consumer, worker, producer, assignment, costs)


def plan_engine(
    consumer: EngineDescription, producer: EngineDescription, costs: Costs = PUBLISHED
) -> tuple[TransferPlan, ...]:
    """The plans of all workers of `consumer`, in their order. Raises what `plan_transfer` raises."""
    assignment = _assignment(consumer, producer)
    return tuple(_plan(consumer, worker, producer, assignment, costs) for worker in range(len(consumer.workers)))


def _assignment(consumer: EngineDescription, producer: EngineDescription) -> Assignment:
    """Who reads what from whom, once nothing speaks against it."""
    check_description(producer)
    reasons = [*_model_reasons(consumer, producer), *_group_reasons(consumer, producer)]
    assignment = assign(consumer.workers, producer.workers)
    reasons += _shortened([*_lack_reasons(assignment.lacks), *_tensor_reasons(consumer, producer, assignment)])
    if reasons:
        raise PlanRefused(reasons)
    return assignment


def _plan(
    consumer: EngineDescription, worker: int, producer: EngineDescription, assignment: Assignment, costs: Costs
) -> TransferPlan:
    here = consumer.workers[worker]
    local = {tensor.name: tensor for tensor in here.tensors}
    routes = []
    maps = _TokenMaps(consumer)
    for index, wanted in assignment.sources[worker].items():
        there = producer.workers[index]
        remote = {tensor.name: tensor for tensor in there.tensors}
        parts: list[Part] = []
        for name, heads in wanted:
            ours, theirs = local[name], remote[name]
            parts += _parts(ours, theirs, heads, maps.of(ours, theirs))
        bundles = bundle(parts)
        slices, staged = _place(parts, bundles, costs)
        routes.append(Route(index, there.place, slices, bundles, staged, assignment.expected(index)))
    routes += [
        Route(index, producer.workers[index].place, (), (), (), assignment.expected(index))
        for index in assignment.released[worker]
    ]
    return TransferPlan(producer.engine_id, here.place, worker, tuple(routes))


def _parts(local: PagedTensor, remote: PagedTensor, heads: Range, tokens: TokenMap) -> Iterator[Part]:
    """One part, unless heads are converted by scales of their own."""
    if not needs_conversion(local, remote):
        yield Part(local, remote, heads, tokens)
    elif has_scales_by_head(local) or has_scales_by_head(remote):
        for head in range(heads.start, heads.stop):
            yield Part(local, remote, Range(head, head + 1), tokens, conversion_of(local, remote, head))
    else:
        yield Part(local, remote, heads, tokens, conversion_of(local, remote, heads.start))


class _TokenMaps:
    """Token maps by what they depend on, each one object."""

    def __init__(self, consumer: EngineDescription) -> None:
        self._policies = [group.policy for group in consumer.groups]
        self._found: dict[tuple[object, ...], TokenMap] = {}

    def of(self, local: PagedTensor, remote: PagedTensor) -> TokenMap:
        """The token map of two tensors."""
        sides = (local.block_tokens, local.blocks, local.interleave, remote.block_tokens, remote.blocks)
        key = (local.group, *sides, remote.interleave)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = map_tokens(local.group, self._policies[local.group], local, remote)
        return found


def _place(
    parts: Sequence[Part], bundles: Sequence[Bundle], costs: Costs
) -> tuple[tuple[Slice, ...], tuple[Source, ...]]:
    """Decide for every bundle how it is placed."""
    short = [
        index
        for one in bundles
        if one.run_bytes < costs.direct_min_bytes or one.conversions or not costs.reaches_caches
        for of in one.members
        for index in of
    ]
    readings = [reading for reading in Reading if any(differs(parts[index], reading) for index in short)]
    possible = [_offers_of([parts[i] for i in short], short, reading, costs) for reading in readings]
    slices: dict[int, Slice] = {}
    chosen: dict[int, Reading] = {}
    for one in bundles:
        members = [member for of_place in one.members for member in of_place]
        usable = [(of, reading) for of, reading in zip(possible, readings, strict=True) if of.keys() >= set(members)]
        offers = [
            Offer(sum(of[m].read_bytes for m in members), sum(of[m].descriptors for m in members)) for of, _ in usable
        ]
        if one.conversions or not costs.reaches_caches:
            choice = _must_stage(parts[members[0]], costs, offers)
        else:
            choice = choose(costs, one.unit_bytes, one.unit_runs, offers)
        if choice.offer is not None:
            chosen.update(dict.fromkeys(members, usable[choice.offer][1]))
        for of_place in one.members:
            for member in of_place:
                part = parts[member]
                slices[member] = Slice(
                    local=part.local,
                    remote=part.remote,
                    heads=part.heads,
                    tokens=part.tokens,
                    placing=Placing.DIRECT if choice.offer is None else Placing.STAGED,
                    reason=choice.reason,
                    run_bytes=one.run_bytes,
                    unit_runs=one.runs_per_place / len(of_place),
                )
    return tuple(slices[index] for index in range(len(parts))), _sources(parts, bundles, chosen, costs)


def _must_stage(part: Part, costs: Costs, offers: Sequence[Offer]) -> Choice:
    """What is converted, or lies where the fabric does not reach, goes through the pool, whatever it costs.

    Raises:
        PlanRefused: there is no pool, or it is too small.
    """
    if not offers:
        change = "raise staging_pool_bytes on the consumer"
        if part.conversion is not None:
            change += ", or use the same --kv-cache-dtype on both sides"
        name = f"{part.local.layer}/{part.local.kind}.format"
        pool = f"{part.local.format.dtype} and a staging pool for runs of up to {costs.staged_run_bytes} B"
        raise PlanRefused([Reason(name, part.remote.format.dtype, pool, change)])
    why = str(part.conversion) if part.conversion is not None else "the fabric does not reach the device"
    return Choice(cheapest(costs, offers), why)


def _offers_of(short: Sequence[Part], indices: Sequence[int], reading: Reading, costs: Costs) -> dict[int, Offer]:
    return {indices[index]: offer for index, offer in offers(short, reading, costs.staged_run_bytes).items()}


def _sources(
    parts: Sequence[Part], bundles: Sequence[Bundle], chosen: dict[int, Reading], costs: Costs
) -> tuple[Source, ...]:
    """The sources of what was chosen. Runs may be shorter when not everything is staged: what no longer fits whole
    blocks is read by units, which always does."""
    for reading in (Reading.BLOCKS, Reading.ALL_HEADS):
        members = [index for index in chosen if chosen[index] is reading]
        still = _offers_of([parts[index] for index in members], members, reading, costs) if members else {}
        lost = {index for index in members if index not in still}
        for one in bundles:
            own = [member for of_place in one.members for member in of_place]
            if lost & set(own):
                chosen.update(dict.fromkeys(own, Reading.UNITS))
    return sources(parts, bundles, chosen)


def _model_reasons(consumer: EngineDescription, producer: EngineDescription) -> Iterator[Reason]:
    for field, change in _SAME_MODEL.items():
        theirs, ours = getattr(producer.facts, field), getattr(consumer.facts, field)
        if theirs != ours:
            yield Reason(f"model.{field}", repr(theirs), repr(ours), change)


def _group_reasons(consumer: EngineDescription, producer: EngineDescription) -> Iterator[Reason]:
    if len(producer.groups) != len(consumer.groups):
        change = "serve the same model with the same hybrid cache manager setting"
        yield Reason("cache_groups", str(len(producer.groups)), str(len(consumer.groups)), change)
        return
    for index, (theirs, ours) in enumerate(zip(producer.groups, consumer.groups, strict=True)):
        for field in ("policy", "window_tokens"):
            left, right = getattr(theirs, field), getattr(ours, field)
            if left != right:
                yield Reason(f"cache_groups[{index}].{field}", str(left), str(right), "serve the same model")


def _lack_reasons(lacks: Sequence[Lack]) -> Iterator[Reason]:
    for lack in dict.fromkeys(lacks):
        heads = f"heads {lack.heads.start}…{lack.heads.stop - 1}"
        if lack.share.ranks > 1:
            heads += f" of the tokens of context-parallel rank {lack.share.rank}"
        change = "serve the same layers and heads on both sides, and let every producer worker describe itself"
        yield Reason(f"tensor {'/'.join(lack.name)}", f"no worker holds {heads}", "needs them", change)


def _tensor_reasons(
    consumer: EngineDescription, producer: EngineDescription, assignment: Assignment
) -> Iterator[Reason]:
    remote = [{tensor.name: tensor for tensor in worker.tensors} for worker in producer.workers]
    told: set[tuple[str, str, str]] = set()
    for here, read in zip(consumer.workers, assignment.sources, strict=True):
        local = {tensor.name: tensor for tensor in here.tensors}
        for index, wanted in read.items():
            for source in wanted:
                for reason in _differences(consumer, local[source.name], remote[index][source.name]):
                    key = (reason.field, reason.producer, reason.consumer)
                    if key not in told:
                        told.add(key)
                        yield reason


def _differences(consumer: EngineDescription, local: PagedTensor, remote: PagedTensor) -> Iterator[Reason]:
    if local.group >= len(consumer.groups):
        return  # told by the groups' own reasons
    is_state = consumer.groups[local.group].policy == "state"
    irrelevant = {"tile_tokens"} if is_state else set()
    if needs_conversion(local, remote) and is_convertible(local, remote):
        irrelevant |= {"format", "cell_bytes", "scales"}
        if local.format != remote.format and (lacks_scales(local) or lacks_scales(remote)):
            theirs, ours = ("missing" if lacks_scales(tensor) else "known" for tensor in (remote, local))
            change = "what is converted needs static scales: use the same --kv-cache-dtype on both sides"
            yield Reason(f"{local.layer}/{local.kind}.scales", theirs, ours, change)
    for field, change in _SAME_TENSOR.items():
        theirs, ours = getattr(remote, field), getattr(local, field)
        if theirs != ours and field not in irrelevant:
            yield Reason(f"{local.layer}/{local.kind}.{field}", str(theirs), str(ours), change)
    if is_state or local.tile_tokens == 1 or local.tile_tokens != remote.tile_tokens:
        return
    unit = map_tokens(local.group, "full", local, remote).unit_tokens
    if unit % local.tile_tokens:
        change = "choose block sizes and a cp_kv_cache_interleave_size that are multiples of a cell's tokens"
        cells = f"cells of {local.tile_tokens} tokens"
        yield Reason(f"{local.layer}/{local.kind}.tile_tokens", f"runs of {unit} tokens", cells, change)


def _shortened(reasons: list[Reason]) -> list[Reason]:
    more = len(reasons) - _MAX_TENSOR_REASONS
    if more <= 0:
        return reasons
    return [*reasons[:_MAX_TENSOR_REASONS], Reason("tensors", "…", "…", f"and {more} more differences")]
