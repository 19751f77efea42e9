"""The example of docs/timelines.md: two producers, two decoders, something wrong with some requests, and one that is
read while it is computed."""

from __future__ import annotations

import random
from pathlib import Path

from tests.trace.simulated import MS, Simulation, Times

STREAMED = 8
"""The number of the request that is read while it is computed."""
FAILED = 9
"""The number of the request whose load fails, and that is computed by its decoder."""


def write_example(folder: Path) -> Path:
    """Write what its engines recorded; always the same."""
    draw = random.Random(8)
    simulation = Simulation()
    producers = [
        simulation.engine("prefill-0"),
        simulation.engine("prefill-1", ahead_ns=7 * MS),
    ]
    consumers = [
        simulation.engine(f"decode-{number}", workers=2) for number in range(2)
    ]
    wrong = {
        0: Times(stages={0: {"connecting": 41 * MS}, 1: {"connecting": 38 * MS}}),
        5: Times(prefill_queue=30 * MS, decode_queue=64 * MS),
        7: Times(stages={1: {"reading": 55 * MS}}),
        9: Times(stages={0: {"fence": 30 * MS}, 1: {"fence": 31 * MS}}),
        12: Times(router=33 * MS),
        15: Times(
            stages={0: {"queued": 22 * MS}, 1: {"queued": 20 * MS}}, kept=600 * MS
        ),
    }
    for number in range(24):
        tokens = draw.choice((1024, 2048, 4096, 8192))
        usual = Times(
            prefill=tokens * 12_000,
            router=draw.randint(1, 4) * MS,
            decode_queue=draw.randint(200_000, 3 * MS),
            stages={
                worker: {"reading": tokens * draw.randint(2600, 3300)}
                for worker in range(2)
            },
        )
        name = f"7c1e-{1000 + number}"  # the router's
        steps = 8 if number == STREAMED else 0
        failed = "fence" if number == FAILED else ""
        simulation.handover(
            producers[number % 2],
            consumers[number // 2 % 2],
            number * 25 * MS,
            wrong.get(number, usual),
            request=f"cmpl-{name}-0-{draw.getrandbits(32):08x}",
            decode_request=f"cmpl-{name}-0-{draw.getrandbits(32):08x}",
            tokens=tokens,
            steps=steps,
            reason=failed,
            recomputed=failed,
        )
    simulation.handover(
        producers[0],
        None,
        700 * MS,
        Times(kept=480_000 * MS),
        request="cmpl-7c1e-1024-0-00000000",
        how="expired",
    )
    return simulation.write(folder)
