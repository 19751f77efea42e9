"""The slices of one route, and whether each is read in place or through the staging pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvferry.plan.conversion import conversion_of, has_scales_by_head, needs_conversion
from kvferry.plan.cost import Choice, Costs, ReadOption, cheapest, choose
from kvferry.plan.refusals import PlanRefused, Reason
from kvferry.plan.runs import Bundle, ReadExtent, TensorSlice
from kvferry.plan.staged_layout import (
    StagedSource,
    Unplaceable,
    differs,
    read_options,
    sources,
)
from kvferry.plan.tokens import TokenMap, map_tokens
from kvferry.plan.transfer_plan import SAME_HOST, Placing, Slice
from kvferry.protocol.geometry import PagedTensor, Range
from kvferry.protocol.handshake import EngineDescription


def parts_of(
    local: PagedTensor, remote: PagedTensor, heads: Range, tokens: TokenMap
) -> Iterator[TensorSlice]:
    """One part, or one part per head if heads are converted with scales of their own."""
    if not needs_conversion(local, remote):
        yield TensorSlice(local, remote, heads, tokens)
        return
    if not has_scales_by_head(local) and not has_scales_by_head(remote):
        yield TensorSlice(
            local, remote, heads, tokens, conversion_of(local, remote, heads.start)
        )
        return
    # A place of a bundle has one conversion, and so one scale on each side.
    for head in range(heads.start, heads.stop):
        conversion = conversion_of(local, remote, head)
        yield TensorSlice(local, remote, Range(head, head + 1), tokens, conversion)


class TokenMaps:
    """Cache of token maps. Equal ones are one object: runs are grouped by their identity."""

    def __init__(self, consumer: EngineDescription) -> None:
        self._policies = [group.policy for group in consumer.groups]
        self._maps: dict[tuple[object, ...], TokenMap] = {}

    def between(self, local: PagedTensor, remote: PagedTensor) -> TokenMap:
        """The token map of two tensors."""
        key = (
            local.group,
            local.block_tokens,
            local.blocks,
            local.interleave,
            remote.block_tokens,
            remote.blocks,
            remote.interleave,
        )
        tokens = self._maps.get(key)
        if tokens is None:
            tokens = map_tokens(local.group, self._policies[local.group], local, remote)
            self._maps[key] = tokens
        return tokens


def place(
    parts: Sequence[TensorSlice], bundles: Sequence[Bundle], costs: Costs
) -> tuple[tuple[Slice, ...], tuple[StagedSource, ...]]:
    """Decide for every bundle how it is placed.

    Raises:
        PlanRefused: a bundle must be staged and cannot be.
    """
    possible = _possible_readings(parts, bundles, costs)
    # What was chosen and then turned out to be impossible. It grows in each round, so this ends.
    banned: set[tuple[int, ReadExtent]] = set()
    while True:
        choices: list[Choice] = []
        reading_of_part: dict[int, ReadExtent] = {}
        for index, bundle in enumerate(bundles):
            usable = {
                reading: options
                for reading, options in possible.items()
                if (index, reading) not in banned
            }
            choice, reading = _choose_reading(parts, bundle, usable, costs)
            choices.append(choice)
            if reading is not None:
                reading_of_part.update(dict.fromkeys(_members(bundle), reading))
        lost = _lost(parts, bundles, reading_of_part, costs)
        if not lost:
            try:
                placings = [
                    (
                        Placing.DIRECT if choice.option is None else Placing.STAGED,
                        choice.reason,
                    )
                    for choice in choices
                ]
                return (
                    _slices(parts, bundles, placings),
                    sources(parts, bundles, reading_of_part),
                )
            except Unplaceable:
                # Cells overlap on the producer, so no reading in its shape can be placed.
                lost = {
                    (index, reading)
                    for index in range(len(bundles))
                    for reading in ReadExtent
                }
        banned |= lost


def place_mapped(
    parts: Sequence[TensorSlice], bundles: Sequence[Bundle]
) -> tuple[Slice, ...]:
    """The slices where everything is copied from mapped memory."""
    return _slices(parts, bundles, [(Placing.MAPPED, SAME_HOST)] * len(bundles))


def _must_be_staged(bundle: Bundle, costs: Costs) -> bool:
    return bool(bundle.conversions) or not costs.reaches_caches


def _possible_readings(
    parts: Sequence[TensorSlice], bundles: Sequence[Bundle], costs: Costs
) -> dict[ReadExtent, Mapping[int, ReadOption]]:
    """The readings of parts that may be staged, each with its cost per part."""
    candidates: list[int] = []
    # Longer runs are read in place whatever the options would cost, and each option merges all of its parts anew.
    for bundle in bundles:
        if bundle.run_bytes < costs.direct_min_bytes or _must_be_staged(bundle, costs):
            candidates += _members(bundle)
    return {
        reading: read_options(parts, candidates, reading, costs.staged_run_bytes)
        for reading in ReadExtent
        if any(differs(parts[index], reading) for index in candidates)
    }


def _choose_reading(
    parts: Sequence[TensorSlice],
    bundle: Bundle,
    readings: Mapping[ReadExtent, Mapping[int, ReadOption]],
    costs: Costs,
) -> tuple[Choice, ReadExtent | None]:
    """The choice for one bundle, and the reading in the producer's shape; None if it is read in place."""
    members = _members(bundle)
    usable: list[ReadExtent] = []
    options: list[ReadOption] = []
    for reading, by_part in readings.items():
        # A bundle is put in place as a whole, so all of its parts must be read in the same way.
        if not by_part.keys() >= set(members):
            continue
        usable.append(reading)
        options.append(
            ReadOption(
                read_bytes=sum(by_part[member].read_bytes for member in members),
                descriptors=sum(by_part[member].descriptors for member in members),
            )
        )
    if _must_be_staged(bundle, costs):
        choice = _choose_staged(parts[min(members)], costs, options)
    else:
        choice = choose(costs, bundle.unit_bytes, bundle.unit_runs, options)
    if choice.option is None:
        return choice, None
    return choice, usable[choice.option]


def _slices(
    parts: Sequence[TensorSlice],
    bundles: Sequence[Bundle],
    placings: Sequence[tuple[Placing, str]],
) -> tuple[Slice, ...]:
    slices: dict[int, Slice] = {}
    for bundle, (placing, reason) in zip(bundles, placings, strict=True):
        for members in bundle.members:
            for member in members:
                part = parts[member]
                slices[member] = Slice(
                    local=part.local,
                    remote=part.remote,
                    heads=part.heads,
                    tokens=part.tokens,
                    placing=placing,
                    reason=reason,
                    run_bytes=bundle.run_bytes,
                    unit_runs=bundle.runs_per_place / len(members),
                )
    return tuple(slices[index] for index in range(len(parts)))


def _members(bundle: Bundle) -> list[int]:
    """The parts of a bundle, of all its places."""
    return [member for members in bundle.members for member in members]


def _lost(
    parts: Sequence[TensorSlice],
    bundles: Sequence[Bundle],
    reading_of_part: Mapping[int, ReadExtent],
    costs: Costs,
) -> set[tuple[int, ReadExtent]]:
    """The bundles that cannot be read as chosen."""
    # Costs were asked for with all parts read alike. Where some are not, the others' runs may be
    # shorter, and then too many, or the surplus no longer lies inside of them.
    lost: set[tuple[int, ReadExtent]] = set()
    for reading in set(reading_of_part.values()):
        members = [
            part for part, chosen in reading_of_part.items() if chosen is reading
        ]
        options = read_options(parts, members, reading, costs.staged_run_bytes)
        for index, bundle in enumerate(bundles):
            own = _members(bundle)
            is_chosen = reading_of_part.get(own[0]) is reading
            if is_chosen and not options.keys() >= set(own):
                lost.add((index, reading))
    return lost


def _choose_staged(
    part: TensorSlice, costs: Costs, options: Sequence[ReadOption]
) -> Choice:
    """The choice for a part that is converted, or that the fabric does not reach: the pool, at any cost.

    Raises:
        PlanRefused: there is no pool, or it is too small.
    """
    if not options:
        raise PlanRefused([_why_not_staged(part, costs)])
    reason = "the fabric does not reach the device"
    if part.conversion is not None:
        reason = str(part.conversion)
    return Choice(cheapest(costs, options), reason)


def _why_not_staged(part: TensorSlice, costs: Costs) -> Reason:
    name = f"{part.local.layer}/{part.local.kind}"
    pool = f"a staging pool for runs of up to {costs.staged_run_bytes} B"
    change = "raise staging_pool_bytes on the consumer"
    if part.conversion is not None:
        return Reason(
            field=f"{name}.format",
            producer=part.remote.format.dtype,
            consumer=f"{part.local.format.dtype} and {pool}",
            change=f"{change}, or use the same --kv-cache-dtype on both sides",
        )
    return Reason(
        field=name,
        producer=f"cells of {part.remote.cell_bytes} B",
        consumer=f"no host buffer, or {pool}",
        change=f"{change}, or use no kv_buffer_device: cpu there",
    )
