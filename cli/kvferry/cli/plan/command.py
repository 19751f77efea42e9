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
from kvferry.cli.plan.copies import MAX_REQUEST_BYTES, copy_lines, read_request
from kvferry.cli.plan.engine import side_of
from kvferry.cli.plan.picture import draw
from kvferry.cli.plan.prediction import MAX_TOKENS
from kvferry.cli.plan.sides import read_sides
from kvferry.cli.plan.summary import PlanSummary, Refusal, summarise
from kvferry.cli.plan.tables import print_plan, print_refusal, print_sides
from kvferry.plan.cost import PUBLISHED, Costs
from kvferry.plan.planner import plan_engine
from kvferry.plan.refusals import PlanRefused
from kvferry.protocol.description_json import MAX_DESCRIPTION_JSON_BYTES
from kvferry.protocol.handshake import EngineDescription
from kvferry.protocol.visible import visible, visible_json

GOOD = 0
REFUSED = 1

POOL_BYTES_VRAM, POOL_BYTES_DRAM = 256 << 20, 64 << 20
"""Default sizes of a worker's staging pool."""


def run_plan(options: argparse.Namespace) -> int:
    """Run the command; returns the exit code. Raises `InputError`."""
    if options.out is not None and options.copies is None:
        raise InvalidArgument("--out", options.out, "--copies with it")
    if options.copies is not None and options.json and options.out is None:
        raise InvalidArgument(
            "--copies", options.copies, "--out FILE with it, since --json prints as well"
        )
    tokens = (
        None if options.tokens is None else whole_option("--tokens", options.tokens, 1, MAX_TOKENS)
    )
    link_gb_s = number_option("--link", options.link, 0.001, 1e6)
    there, here = read_sides(options.producer, options.consumer, _stdin)
    producer, consumer = there.engine, here.engine
    costs = _costs(options, consumer)
    try:
        plans = plan_engine(consumer, producer, costs)
    except PlanRefused as refused:
        refusal = Refusal(reasons=refused.reasons)
        if options.json:
            _print_json(refusal)
        else:
            print_sides(
                (
                    ("producer", side_of(producer), there.form),
                    ("consumer", side_of(consumer), here.form),
                )
            )
            print_refusal(refusal)
        return REFUSED
    summary = summarise(consumer, producer, plans, costs, tokens=tokens, link_gb_s=link_gb_s)
    if options.svg is not None:
        write_file("--svg", options.svg, [draw(summary)])
    if options.copies is not None:
        text = read_file(InvalidCopies, "file", options.copies, MAX_REQUEST_BYTES)
        request = read_request(text, consumer, producer)
        lines = copy_lines(plans, consumer, producer, request)
        if options.out is not None:
            write_file("--out", options.out, lines)
        else:
            sys.stdout.writelines(lines)
    if options.json:
        _print_json(summary)
    elif options.copies is None or options.out is not None:
        print_sides(
            (("producer", summary.producer, there.form), ("consumer", summary.consumer, here.form))
        )
        print_plan(summary)
    # What goes to standard output for another program stays alone there.
    to = (
        sys.stderr
        if options.json or (options.copies is not None and options.out is None)
        else sys.stdout
    )
    for what, path in (("picture", options.svg), ("copies", options.out)):
        if path:
            print(f"\n{what}: {visible(path)}", file=to)
    return GOOD


def _costs(options: argparse.Namespace, consumer: EngineDescription) -> Costs:
    """The constants that the consumer plans with; `--link` changes only the prediction, not the plan."""
    on_gpu = any(worker.memory == "VRAM" for worker in consumer.workers)
    pool, asked = POOL_BYTES_VRAM if on_gpu else POOL_BYTES_DRAM, options.staging_pool_bytes
    if asked is not None:
        pool = whole_option("--staging-pool-bytes", asked, 0, 1 << 40)
    direct = PUBLISHED.direct_min_bytes
    if options.direct_min_bytes is not None:
        direct = whole_option("--direct-min-bytes", options.direct_min_bytes, 1, 1 << 40)
    return replace(PUBLISHED, direct_min_bytes=direct, staged_run_bytes=longest_staged_run(pool))


def longest_staged_run(pool_bytes: int) -> int:
    """The longest run that a staging pool takes: half of the largest wave, which is an eighth of the pool."""
    return pool_bytes // 8 // 256 * 256 // 2


def _stdin() -> bytes:
    return sys.stdin.buffer.read(MAX_DESCRIPTION_JSON_BYTES + 1)


def _print_json(answer: PlanSummary | Refusal) -> None:
    print(visible_json(msgspec.json.format(msgspec.json.encode(answer), indent=1).decode()))
