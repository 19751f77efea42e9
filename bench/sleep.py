"""Engines put to sleep under load: wrong answers, what is left, and how long falling asleep and waking take.

    python -m bench.sleep                 # 2,400 sleeps; writes results/sleep.json
    python -m bench.sleep --quick         # 120

Each scene is a process of its own (`bench/sleep_soak.py`), whose transport UCX chooses, or is told. It exits with 1
if a load that was reported good has a wrong byte, if anything is left of a generation, or if a process dies: a sleeping
engine's pages cannot be accessed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial

from bench.figures import Results, Table, publish
from bench.provenance import begin
from bench.sleep_soak import (
    HYBRID,
    HYBRID_MAPPED,
    SETTINGS,
    SHAPE,
    HybridPair,
    Seen,
    ToyPair,
    soak,
)
from kvferry.worker.fabric.nixl import NixlFabric
from tests.geometry.handmade import hybrid, pair, side
from tests.harness.engine import Engine
from tests.waiting import step_until

SLEEPS = 480
QUICK_SLEEPS = 24
LEASES, LOADS = 100, 20
REPEATS = 10

_MODEL = hybrid()
_PAIR = pair(_MODEL, side(_MODEL, tp=2), side(_MODEL, tp=1), tokens=45)

SCENES: dict[str, tuple[str, Callable[[int], ToyPair | HybridPair]]] = {
    "shared memory": ("", lambda seed: ToyPair(seed, mapped=False)),
    "TCP": ("tcp", lambda seed: ToyPair(seed, mapped=False)),
    "mapped": ("", lambda seed: ToyPair(seed, mapped=True)),
    "hybrid, TP 2 to 1": ("", lambda seed: HybridPair(_PAIR, seed, HYBRID)),
    "hybrid, mapped": ("", lambda seed: HybridPair(_PAIR, seed, HYBRID_MAPPED)),
}
"""By name the transports that UCX may use, all where there are none, and the pair of a seed."""


def run_scene(name: str, sleeps: int, seed: int) -> Seen:
    """One scene, in a process of its own.

    Raises:
        RuntimeError: it died.
    """
    transports, _ = SCENES[name]
    environment = dict(os.environ)
    if transports:
        environment["UCX_TLS"] = transports
    command = [sys.executable, "-m", "bench.sleep", "--scene", name]
    command += ["--sleeps", str(sleeps), "--seed", str(seed)]
    child = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if child.returncode:
        raise RuntimeError(f"{name}: the process ended with {child.returncode}")
    return Seen(**json.loads(child.stdout.splitlines()[-1]))


def time_withdrawals(repeats: int) -> list[float]:
    """Milliseconds to withdraw with 100 leases held, and 20 loads in flight from another producer."""
    settings = replace(SETTINGS, lease_slots=2 * LEASES)
    shape = replace(SHAPE, blocks=2048)
    make = partial(Engine, shape=shape, settings=settings, sleeps=True)
    taken_ms: list[float] = []
    with (
        closing(make("other", NixlFabric)) as producer,
        closing(make("sleeper", NixlFabric)) as sleeper,
    ):
        warm_up(producer, sleeper)
        for _ in range(repeats):
            for _ in range(LEASES):
                sleeper.prefill(8)
            offers = [producer.prefill(256) for _ in range(LOADS)]
            for offer in offers:
                sleeper.order_load(
                    f"load-{offer.request_id}",
                    offer.params,
                    0,
                    offer.tokens,
                    lambda count: (sleeper.take_blocks(count),),
                )
            sleeper.step()
            begun_s = time.perf_counter()
            sleeper.withdraw()
            taken_ms.append((time.perf_counter() - begun_s) * 1e3)
            sleeper.restore()
            step_until(
                lambda: (
                    not len(sleeper.leases)
                    and not len(sleeper.loads)
                    and not len(producer.leases)
                ),
                "all is over",
                sleeper,
                producer,
            )
            for engine in (sleeper, producer):
                engine.unused = list(range(1, shape.blocks))
    return taken_ms


def time_first_handovers(repeats: int) -> list[tuple[str, list[float]]]:
    """Milliseconds from the order to the report of a load of 256 tokens, after each of several things."""
    make = partial(Engine, shape=SHAPE, settings=SETTINGS, sleeps=True)
    first: list[float] = []
    after_producer: list[float] = []
    after_consumer: list[float] = []
    steady: list[float] = []
    with closing(make("P", NixlFabric)) as producer:
        for number in range(repeats):
            with closing(make(f"C{number}", NixlFabric)) as consumer:
                first.append(handover_ms(producer, consumer))
                steady.append(handover_ms(producer, consumer))
                producer.sleep()
                producer.wake_up()
                after_producer.append(handover_ms(producer, consumer))
                consumer.sleep()
                consumer.wake_up()
                after_consumer.append(handover_ms(producer, consumer))
                consumer.wait_until_idle()
    return [
        ("a first contact", first),
        ("the producer's wake-up", after_producer),
        ("the consumer's wake-up", after_consumer),
        ("another one", steady),
    ]


def handover_ms(producer: Engine, consumer: Engine) -> float:
    """One good handover of 256 tokens."""
    offer = producer.prefill(256)
    load = f"load-{offer.request_id}"
    begun_s = time.perf_counter()
    consumer.order_load(
        load,
        offer.params,
        0,
        offer.tokens,
        lambda count: (consumer.take_blocks(count),),
    )
    step_until(lambda: consumer.seen.is_over(load), "the load is over", consumer)
    taken_ms = (time.perf_counter() - begun_s) * 1e3
    if load in consumer.seen.failed:
        raise RuntimeError(f"a load has failed: {consumer.seen.failed[load]}")
    step_until(
        lambda: not len(producer.leases), "the lease is over", producer, consumer
    )
    for engine in (producer, consumer):
        engine.unused = list(range(1, engine.shape.blocks))
    return taken_ms


def warm_up(producer: Engine, consumer: Engine) -> None:
    """The first contact."""
    handover_ms(producer, consumer)


def results_of(
    seen: dict[str, Seen],
    withdrawals: list[float],
    handovers: list[tuple[str, list[float]]],
    command: str,
    *,
    quick: bool,
) -> Results:
    soaked = Table(
        "Sleeps under load",
        (
            "pair",
            "sleeps",
            "good loads",
            "streamed",
            "failed loads",
            "wrong answers",
            "left",
            "withdraw p50, ms",
            "max",
            "restore p50, ms",
            "max",
        ),
        [
            (
                name,
                one.sleeps,
                one.good,
                one.streamed,
                sum(one.failed.values()),
                one.wrong,
                sum(one.left.values()),
                statistics.median(one.withdraw_ms),
                max(one.withdraw_ms),
                statistics.median(one.restore_ms),
                max(one.restore_ms),
            )
            for name, one in seen.items()
        ],
    )
    withdrawn = Table(
        f"Withdrawing with {LEASES} leases held and {LOADS} loads of 1 MiB in flight",
        ("times", "p50, ms", "max, ms"),
        [(len(withdrawals), statistics.median(withdrawals), max(withdrawals))],
    )
    first = Table(
        "A load of 256 tokens, 1 MiB, from the order to the report",
        ("after", "times", "p50, ms", "max, ms"),
        [
            (after, len(taken), statistics.median(taken), max(taken))
            for after, taken in handovers
        ],
    )
    return Results(
        command=command,
        what="Engines that are put to sleep under load, on the CPU; their pages are unmapped.",
        tables=(soaked, withdrawn, first),
        quick=quick,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sleeps", type=int, help="of each scene")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scene", choices=SCENES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sleeps = options.sleeps or (QUICK_SLEEPS if options.quick else SLEEPS)
    if options.scene is not None:
        _, make = SCENES[options.scene]
        print(json.dumps(vars(soak(partial(make, options.seed), sleeps))))
        return 0
    measured = begin()
    seen: dict[str, Seen] = {}
    for name in SCENES:
        seen[name] = run_scene(name, sleeps, options.seed)
        one = seen[name]
        print(
            f"{name}: {one.sleeps} sleeps, {one.good} good, {one.wrong} wrong, failed {dict(one.failed)}"
        )
    repeats = 3 if options.quick else REPEATS
    results = results_of(
        seen,
        time_withdrawals(repeats),
        time_first_handovers(repeats),
        "python -m bench.sleep",
        quick=options.quick,
    )
    publish("sleep", results, measured)
    faults = sum(one.wrong + sum(one.left.values()) for one in seen.values())
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
