"""`kvferry plan`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

import msgspec

from kvferry.cli.arguments import (
    InvalidArgument,
    InvalidCopies,
    number_option,
    read_file,
    whole_option,
    write_file,
)
from kvferry.cli.formatting import print_line
from kvferry.cli.plan.copies import MAX_REQUEST_BYTES, copy_lines, read_request
from kvferry.cli.plan.picture import draw
from kvferry.cli.plan.prompt import MAX_TOKENS
from kvferry.cli.plan.sides import ReadSide, read_sides
from kvferry.cli.plan.summary import Link, PlanSummary, Refusal, summarise
from kvferry.cli.plan.tables import print_plan, print_refusal, print_side
from kvferry.plan.cost import PUBLISHED, Costs
from kvferry.plan.planner import plan_engine
from kvferry.plan.refusals import PlanRefused
from kvferry.protocol.description_json import MAX_DESCRIPTION_JSON_BYTES
from kvferry.protocol.handshake import EngineDescription
from kvferry.protocol.visible import visible, visible_json

GOOD = 0
REFUSED = 1

# Default sizes of a worker's staging pool.
POOL_BYTES_VRAM = 256 << 20
POOL_BYTES_DRAM = 64 << 20


def run_plan(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code.

    Raises:
        InputError: an argument, an option or a file cannot be used.
    """
    _check_outputs(options)
    tokens = None
    if options.tokens is not None:
        tokens = whole_option("--tokens", options.tokens, 1, MAX_TOKENS)
    link_gb_s = number_option("--link", options.link, 0.001, 1e6)
    sides = read_sides(options.producer, options.consumer, _read_stdin)
    producer, consumer = (side.engine for side in sides)
    costs = _costs(options, consumer)
    mappable = range(len(producer.workers)) if options.same_host else ()
    try:
        plans = plan_engine(consumer, producer, costs, mappable)
    except PlanRefused as refused:
        refusal = Refusal(reasons=refused.reasons)
        if options.json:
            _print_json(refusal)
        else:
            _print_sides(*sides)
            print_refusal(refusal)
        return REFUSED
    if options.same_host:
        plans = tuple(plan.with_mapped(mappable) for plan in plans)
    summary = summarise(consumer, producer, plans, Link(link_gb_s, costs), tokens)
    if options.svg is not None:
        write_file("--svg", options.svg, [draw(summary)])
    if options.copies is not None:
        text = read_file(InvalidCopies, "file", options.copies, MAX_REQUEST_BYTES)
        request = read_request(text, consumer, producer)
        lines = copy_lines(plans, consumer, producer, request)
        if options.out is None:
            sys.stdout.writelines(lines)
        else:
            write_file("--out", options.out, lines)
    prints_copies = options.copies is not None and options.out is None
    if options.json:
        _print_json(summary)
    elif not prints_copies:
        _print_sides(*sides)
        print_plan(summary)
    # What goes to standard output for another program stays alone there.
    is_for_a_program = options.json or prints_copies
    log = sys.stderr if is_for_a_program else sys.stdout
    for what, path in (("picture", options.svg), ("copies", options.out)):
        if path:
            print(f"\n{what}: {visible(path)}", file=log)
    return GOOD


def _check_outputs(options: argparse.Namespace) -> None:
    """Refuse options that would leave a file unwritten, or print two things at once."""
    if options.out is not None and options.copies is None:
        raise InvalidArgument("--out", options.out, "--copies with it")
    if options.copies is not None and options.json and options.out is None:
        expected = "--out FILE with it, since --json prints as well"
        raise InvalidArgument("--copies", options.copies, expected)


def _costs(options: argparse.Namespace, consumer: EngineDescription) -> Costs:
    """The constants that the consumer plans with."""
    # `--link` is not among them: an engine does not know its link, so it changes only the prediction, not the plan.
    has_gpu = any(worker.memory == "VRAM" for worker in consumer.workers)
    pool_bytes = POOL_BYTES_VRAM if has_gpu else POOL_BYTES_DRAM
    if options.staging_pool_bytes is not None:
        text = options.staging_pool_bytes
        pool_bytes = whole_option("--staging-pool-bytes", text, 0, 1 << 40)
    costs = replace(PUBLISHED, staged_run_bytes=longest_staged_run(pool_bytes))
    if options.direct_min_bytes is not None:
        text = options.direct_min_bytes
        direct_min_bytes = whole_option("--direct-min-bytes", text, 1, 1 << 40)
        costs = replace(costs, direct_min_bytes=direct_min_bytes)
    return costs


def longest_staged_run(pool_bytes: int) -> int:
    """The longest run that a staging pool takes: half of the largest wave, which is an eighth of the pool."""
    # A wave is a multiple of 256 bytes, the alignment in the pool.
    wave_bytes = pool_bytes // 8 // 256 * 256
    return wave_bytes // 2


def _read_stdin() -> bytes:
    # One byte more than is accepted, so that the reader sees that it is too long.
    return sys.stdin.buffer.read(MAX_DESCRIPTION_JSON_BYTES + 1)


def _print_sides(producer: ReadSide, consumer: ReadSide) -> None:
    print_side("producer", producer.engine, producer.form)
    print_side("consumer", consumer.engine, consumer.form)
    print_line()


def _print_json(answer: PlanSummary | Refusal) -> None:
    text = msgspec.json.format(msgspec.json.encode(answer), indent=1).decode()
    print(visible_json(text))
