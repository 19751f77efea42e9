"""One engine of a drill, in a process of its own, at the other end of a socket.

Commands come as JSON lines and are answered as JSON lines with the same `id`, when they are done:

    {"id": 1, "do": "prefill", "tokens": 10, "seed": 3}       {"id": 1, "params": {…}}
    {"id": 2, "do": "load", "params": {…}, "seed": 3}         {"id": 2, "reason": null, "good": true}
    {"id": 3, "do": "stop_at", "point": "…"}                  {"id": 3}, and {"event": "…"} when it is there
    {"id": 4, "do": "state"}                                  {"id": 4, …}: `State`

The end of the socket ends the engine.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from kvferry.protocol.errors import LocalProtocolError
from kvferry.protocol.params import RemotePrefill, read_params
from kvferry.scheduler.consumer.ledger import RemoteLease
from kvferry.scheduler.side_channel import sender
from kvferry.worker.fabric.nixl import NixlFabric
from tests.faults.commands import SOCKETS_S, Start, State
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.engine import Engine, OrderedLoad
from tests.harness.fault_fabric import Delivery, Point

_STEP_S = 0.003


@dataclass
class Ordered:
    """A load that is not over, or whose blocks are not safe yet."""

    command: dict[str, Any]
    load: OrderedLoad
    answered: bool = False


class Server:
    """An engine and its step loop."""

    def __init__(self, start: Start, channel: socket.socket) -> None:
        settings = replace(
            SETTINGS,
            lease_slots=64,
            check_integrity=True,
            failed_read_grace_s=start.failed_read_grace_s,
            handshake_timeout_s=start.handshake_timeout_s,
            load_timeout_s=start.load_timeout_s,
        )
        shape = CacheShape(blocks=start.blocks, cell_bytes=start.cell_bytes, axes=start.axes)
        self.engine = Engine(
            start.name,
            NixlFabric,
            shape=shape,
            settings=settings,
            port=start.port,
            lease_s=start.lease_s,
            remembers=True,
        )
        self.fabric = self.engine.fabric
        self._channel = channel
        self._writing = threading.Lock()
        self._ordered: list[Ordered] = []
        self._unread = b""

    def serve(self) -> None:
        self.say(id=0, boot=self.engine.boot)
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            while True:
                if selector.select(timeout=_STEP_S) and not self._read():
                    return
                self.engine.step()
                self._answer_loads()

    def say(self, **fields: Any) -> None:
        """One line to the other end; from any thread."""
        with self._writing:
            self._channel.sendall(json.dumps(fields).encode() + b"\n")

    def _read(self) -> bool:
        """Carry out the commands that are here. Returns whether there may be more."""
        arrived = self._channel.recv(1 << 20)
        *lines, self._unread = (self._unread + arrived).split(b"\n")
        for line in lines:
            command = json.loads(line)
            answer = getattr(self, f"_do_{command['do']}")(command)
            if answer is not None:
                self.say(id=command["id"], **answer)
        return bool(arrived)

    def _do_prefill(self, command: dict[str, Any]) -> dict[str, Any]:
        offer = self.engine.prefill(command["tokens"], command["seed"])
        changed = self.engine.changed(offer, **command.get("changes", {}))
        return {"params": changed.to_json()}

    def _do_give_away(self, command: dict[str, Any]) -> dict[str, Any]:
        self.engine.give_away(self.engine.offers[command["request_id"]])
        return {}

    def _do_load(self, command: dict[str, Any]) -> dict[str, Any] | None:
        params = read_params(command["params"])
        assert isinstance(params, RemotePrefill)
        ledger, key = self.engine.loads, RemoteLease.of(params).key
        if key in ledger._claims or key in ledger._ended:
            return {"computed": ledger.offer("computed", params, params.remote_num_tokens, 0.0)}
        self._ordered.append(Ordered(command, self.engine.load(params)))
        return None

    def _do_accept(self, command: dict[str, Any]) -> dict[str, Any]:
        """A request arrives with params; the engine has not got round to loading it."""
        params = read_params(command["params"])
        assert isinstance(params, RemotePrefill)
        refused = self.engine.loads.offer(command["request_id"], params, params.remote_num_tokens, 0.0)
        return {"refused": refused}

    def _do_finish(self, command: dict[str, Any]) -> dict[str, Any]:
        self.engine.loads.finished(command["request_id"])
        return {}

    def _do_stop_at(self, command: dict[str, Any]) -> dict[str, Any]:
        self.fabric.stops.stop_at(Point(command["point"]), lambda point: self.say(event=point.value))
        return {}

    def _do_go_on_to(self, command: dict[str, Any]) -> dict[str, Any]:
        self.fabric.stops.go_on_to(Point(command["point"]))
        return {}

    def _do_go(self, command: dict[str, Any]) -> dict[str, Any]:
        self.fabric.stops.go()
        return {}

    def _do_deliver(self, command: dict[str, Any]) -> dict[str, Any]:
        self.fabric.delivery = Delivery(command["delivery"])
        return {}

    def _do_state(self, command: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self.state())
        return found

    def state(self) -> State:
        engine, worker = self.engine, self.engine.worker
        runner = worker._thread.runner if worker._thread is not None else None
        slot_reads, staging = worker._slot_reads, worker._staging
        names = Counter(one.name for one in threading.enumerate())
        fetching = sum(count for name, count in names.items() if name.startswith("kvferry-handshake"))
        return State(
            leases=len(engine.leases),
            held=worker._table.held(),
            loads=len(engine.loads),
            running=0 if runner is None else len(runner._running) + runner.waiting(),
            quarantined=0 if runner is None else len(runner.quarantined),
            alive=len(engine.seen.alive),
            entries=len(slot_reads.words) - slot_reads.free(),
            waves=len(staging.pool.waves()) if staging is not None else 0,
            transfers=engine.fabric.transfers(),
            leased_blocks=engine.shape.blocks - 1 - len(engine._free),
            peers=len(engine.fabric.peers),
            prepared=engine.fabric.prepared(),
            sockets=len(engine.renewer._sender),
            files=len(list(Path("/proc/self/fd").iterdir())),
            tasks=len(list(Path("/proc/self/task").iterdir())) - fetching,
            threads=sorted(name for name in names if name.startswith("kvferry") and "handshake" not in name),
            broken=list(self._broken()),
            counts=dict(+engine.seen.counts),
        )

    def _broken(self) -> Iterator[str]:
        engine = self.engine
        if engine.seen.counts["integrity_errors"]:
            yield f"the worker's integrity check failed {engine.seen.counts['integrity_errors']} times"
        idle = not len(engine.leases) and not self._ordered
        checks: list[Callable[[], None]] = [
            engine.leases.check_integrity,
            engine.loads.check_integrity,
            lambda: self._check_worker(idle=idle),
        ]
        for check in checks:
            try:
                check()
            except Exception as error:  # noqa: BLE001 - sent to the other end
                yield f"{type(error).__name__}: {error}"

    def _check_worker(self, *, idle: bool) -> None:
        """A message that is being flushed is under way, and not what a drill has left."""
        try:
            self.engine.worker.check_integrity(idle=idle)
        except LocalProtocolError as error:
            if " 0 flushing," in str(error):
                raise
            self.engine.worker.check_integrity()

    def _answer_loads(self) -> None:
        seen = self.engine.seen
        for ordered in list(self._ordered):
            request_id = ordered.load.request_id
            if not ordered.answered and (request_id in seen.failed or request_id in seen.loaded):
                ordered.answered = True
                reason = seen.failed.get(request_id)
                good = self.engine.has_bytes(ordered.load, ordered.command["seed"])
                self.say(id=ordered.command["id"], reason=reason and reason.value, good=good)
            if ordered.answered and request_id not in seen.alive:
                self._ordered.remove(ordered)
                self.engine.free(ordered.load)


def run(start: Start, channel: socket.socket) -> None:
    """Be that engine until the other end of the channel is closed."""
    os.environ.update(start.environ)
    sender.IDLE_S = SOCKETS_S
    server = Server(start, channel)
    server.serve()
    server.engine.close()
