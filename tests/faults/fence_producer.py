"""The producer of the race, in a process of its own: `python -m tests.faults.fence_producer`.

It prefills whenever it has the blocks; every offer is a JSON line on stdout with the params and the seed of its
content. Leases are not renewed, so every lease expires after 50 ms, and the next prompts overwrite its blocks. It ends
with its stdin.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from typing import TextIO

from tests.faults.fence_attack import TOKENS, producer_of
from tests.harness.engine import Engine, Offer

_STEP_S = 0.001
_MOST_OFFERS = 50_000
"""An end for a producer whose reader forgot it."""


class Prefiller:
    """Prompt after prompt, each with a content of its own; two steps long, as many at a time as there are blocks."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seed = 0
        self._running: list[str] = []

    def turn(self) -> list[Offer]:
        """One step; the offers that it brought."""
        engine, blocks = self.engine, -(-TOKENS // self.engine.shape.group.block_tokens)
        offers = [engine.finish_prefill(request_id) for request_id in self._running]
        engine.step()
        self._running = []
        for _ in range(min(len(engine._free) // blocks, engine.leases.free_slots, 3)):
            self.seed += 1
            self._running.append(engine.start_prefill(TOKENS, self.seed))
        return offers


def main(answers: TextIO) -> None:
    with contextlib.closing(producer_of()) as engine:
        prefiller = Prefiller(engine)
        while prefiller.seed < _MOST_OFFERS:
            if select.select([0], [], [], _STEP_S)[0] and not os.read(0, 1 << 10):
                return
            for offer in prefiller.turn():
                line = {"params": offer.params.to_json(), "seed": offer.seed}
                print(json.dumps(line), file=answers, flush=True)


if __name__ == "__main__":
    # UCX writes its warnings to file descriptor 1.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        try:
            main(answers)
        except BrokenPipeError:
            sys.exit(0)
