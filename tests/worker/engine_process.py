"""One engine in a process of its own: `python -m tests.worker.engine_process NAME PORT LEASE_S`.

Commands come as JSON lines on stdin and are answered as JSON lines with the same `id`, when they are done:

    {"id": 1, "do": "prefill", "tokens": 10, "seed": 3}     {"id": 1, "params": {…}}
    {"id": 2, "do": "load", "params": {…}, "seed": 3}       {"id": 2, "reason": null, "good": true}
    {"id": 3, "do": "state"}                                {"id": 3, "leases": 0, "alive": 0, "entries": 384}

`good` is true if the loaded blocks hold the bytes of the seed. The end of stdin ends the engine.
"""

from __future__ import annotations

import json
import os
import selectors
import sys
from dataclasses import dataclass, replace
from typing import Any, TextIO

from kvferry.protocol.params import RemotePrefill, read_params
from kvferry.worker.fabric.nixl import NixlFabric
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.engine import Engine, OrderedLoad

SHAPE = CacheShape(blocks=256, cell_bytes=512)
HURRIED = replace(SETTINGS, lease_slots=64, handshake_timeout_s=1.0, load_timeout_s=5.0)


@dataclass
class Pending:
    """A load that was ordered and has not been answered."""

    command: dict[str, Any]
    load: OrderedLoad


class Server:
    """An engine and its step loop."""

    def __init__(self, engine: Engine, answers: TextIO) -> None:
        self.engine, self.answers = engine, answers
        self.pending: list[Pending] = []
        self.unread = b""

    def serve(self) -> None:
        os.set_blocking(0, False)
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            while True:
                if selector.select(timeout=0.002) and not self.read():
                    return
                self.engine.step()
                self.answer_loads()

    def read(self) -> bool:
        """Carry out the commands that have arrived. Returns whether there may be more."""
        arrived = os.read(0, 1 << 20)
        *lines, self.unread = (self.unread + arrived).split(b"\n")
        for line in lines:
            self.carry_out(json.loads(line))
        return bool(arrived)

    def carry_out(self, command: dict[str, Any]) -> None:
        engine = self.engine
        if command["do"] == "prefill":
            offer = engine.prefill(command["tokens"], command["seed"])
            self.answer(command, params=offer.params.to_json())
        elif command["do"] == "load":
            params = read_params(command["params"])
            assert isinstance(params, RemotePrefill)
            self.pending.append(Pending(command, engine.load(params)))
        else:
            slot_reads = engine.worker._slot_reads
            self.answer(
                command,
                leases=len(engine.leases),
                alive=len(engine.seen.alive),
                entries=len(slot_reads.words) - slot_reads.free(),
            )

    def answer_loads(self) -> None:
        seen = self.engine.seen
        for pending in list(self.pending):
            request_id = pending.load.request_id
            if request_id in seen.failed or request_id in seen.loaded:
                self.pending.remove(pending)
                reason = seen.failed.get(request_id)
                good = self.engine.has_bytes(pending.load, pending.command["seed"])
                self.answer(pending.command, reason=reason and reason.value, good=good)
                if request_id not in seen.alive:
                    self.engine.free(pending.load)

    def answer(self, command: dict[str, Any], **fields: Any) -> None:
        print(json.dumps({"id": command["id"], **fields}), file=self.answers, flush=True)


def main(name: str, port: int, lease_s: float, answers: TextIO) -> None:
    engine = Engine(name, NixlFabric, shape=SHAPE, settings=HURRIED, port=port, lease_s=lease_s)
    server = Server(engine, answers)
    server.answer({"id": 0})
    server.serve()
    engine.close()


if __name__ == "__main__":
    # UCX writes its warnings to file descriptor 1.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), answers)
