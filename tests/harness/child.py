"""One engine in a process of its own: it steps by itself, and carries out what comes through a pipe.

A command is `(number, name, arguments)`, the name of one of the methods of `Server`; its answer, `(number, result)`,
comes when it has been carried out, that of a load when the load is over. `(0, boot)` says that the engine has started,
and `(None, point)` that its load stands still there. The end of the pipe ends the engine.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kvferry.link import limits
from kvferry.plan.blocks import UnitPairs
from kvferry.plan.tokens import TokenMap
from kvferry.protocol.errors import LocalProtocolError
from kvferry.protocol.params import RemotePrefill, read_params
from kvferry.protocol.slots import SlotState, epoch_from_text, slot_word
from kvferry.worker.fabric.nixl import NixlFabric, load_bindings
from kvferry.worker.loads.mapped_reads import MappedReads
from kvferry.worker.loads.state import LoadState
from kvferry.worker.peers import mapped_route
from kvferry.worker.peers.mapped_route import MappedRoute
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.engine import Engine, OrderedLoad
from tests.harness.exported import slots_of
from tests.harness.fault_fabric import Point, Stops
from tests.harness.integrity import check_every_turn, check_worker, snapshot_of
from tests.harness.ledgers import check_leases, check_loads
from tests.processes import task_count

SOCKETS_S = 0.3
"""How long these engines keep unused sockets; outside of drills it is a minute."""
_STEP_S = 0.003

load_bindings()  # in the server that engines are forked from, so that none has to


@dataclass(frozen=True, kw_only=True)
class Start:
    """One engine.

    Attributes:
        blocks, cell_bytes: of the cache; see `tests.harness.caches`.
        environ: set before the fabric is made, e.g. `UCX_TLS`.
        axes: order of the cache's axes; consumers with another one than their producer stage what they read.
        shared: its caches lie in shared files, and its loads from such producers copy unit by unit, and stop at points.
    """

    name: str
    port: int
    lease_s: float = 30.0
    handshake_timeout_s: float = 10.0
    load_timeout_s: float = 20.0
    failed_read_grace_s: float = 0.5
    axes: str = "bht"
    blocks: int = 64
    cell_bytes: int = 512
    environ: dict[str, str] = field(default_factory=dict)
    shared: bool = False


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything that an engine has in use.

    Attributes:
        in_hand: counts above 0 of what must be returned: `leases` and `loads` of the ledgers; leases that the worker's
            table has `held`; loads that are `running` in the transfer thread, `quarantined` there, and reported as
            `alive`; `entries` for slot reads, staging `waves`, `transfers`, cache `blocks`, side-channel `sockets`.
        peers, prepared: agents that the fabric knows and lists that are prepared.
        files, tasks: file descriptors and threads, those that only fetch descriptions apart.
        threads: names of kvferry's threads that live.
        broken: what the integrity checks say.
    """

    in_hand: Counter[str]
    peers: int
    prepared: int
    files: int
    tasks: int
    threads: list[str]
    broken: list[str]


@dataclass
class Ordered:
    """A load that is not over, or whose blocks are not safe yet."""

    number: int
    seed: int
    load: OrderedLoad
    answered: bool = False


class Server:
    """An engine and its step loop. Public methods but `serve` are commands."""

    def __init__(self, start: Start, channel: Connection) -> None:
        settings = replace(
            SETTINGS,
            lease_slots=64,
            failed_read_grace_s=start.failed_read_grace_s,
            handshake_timeout_s=start.handshake_timeout_s,
            load_timeout_s=start.load_timeout_s,
        )
        self.engine = Engine(
            start.name,
            NixlFabric,
            shape=CacheShape(
                blocks=start.blocks, cell_bytes=start.cell_bytes, axes=start.axes
            ),
            settings=settings,
            port=start.port,
            lease_s=start.lease_s,
            remembers=True,
            shared=start.shared,
        )
        if start.shared:
            stop_copies(self.engine.fabric.stops)
        self._seen_broken = check_every_turn(self.engine.worker)
        self._channel = channel
        self._writing = threading.Lock()
        self._ordered: list[Ordered] = []
        self._number = 0

    def serve(self) -> None:
        """Step until the other end of the pipe is closed."""
        self._say(0, self.engine.boot)
        while True:
            if self._channel.poll(_STEP_S):
                try:
                    self._number, name, arguments = self._channel.recv()
                except EOFError:
                    return
                answer = getattr(self, name)(**arguments)
                if name != "load" or answer is not None:
                    self._say(self._number, answer)
            self.engine.step()
            self._answer_loads()

    def prefill(self, tokens: int, seed: int) -> dict[str, Any]:
        return self.engine.prefill(tokens, seed).params.to_json()

    def is_ready(self, request_id: str) -> bool:
        """Whether the slot of a prefill says that its blocks may be read: the transfer thread sets it, later."""
        offered = self.engine.offers[request_id].params.kvferry
        word = int(slots_of(self.engine.worker).words[offered.lease_slot])
        return word == slot_word(epoch_from_text(offered.lease_epoch), SlotState.READY)

    def give_away(self, request_id: str) -> None:
        self.engine.give_away(self.engine.offers[request_id])

    def load(self, params: dict[str, Any], seed: int) -> dict[str, Any] | None:
        """Order a load; answered at once only if the lease is known to be claimed or over."""
        source, ledger = _remote(params), self.engine.loads
        if ledger.knows(source):
            return {
                "computed": ledger.offer(
                    "computed", source, source.remote_num_tokens, 0.0
                )
            }
        self._ordered.append(Ordered(self._number, seed, self.engine.load(source)))
        return None

    def accept(self, request_id: str, params: dict[str, Any]) -> str | None:
        """A request arrives with params; the engine has not got round to loading it. Returns why it is refused."""
        source = _remote(params)
        return self.engine.loads.offer(
            request_id, source, source.remote_num_tokens, 0.0
        )

    def stop_at(self, point: Point) -> None:
        self.engine.fabric.stops.stop_at(
            point, lambda reached: self._say(None, reached)
        )

    def go_on_to(self, point: Point) -> None:
        self.engine.fabric.stops.go_on_to(point)

    def go(self) -> None:
        self.engine.fabric.stops.go()

    def state(self) -> State:
        engine, worker = self.engine, self.engine.worker
        seen = snapshot_of(worker)
        pool = seen.pool
        names = Counter(one.name for one in threading.enumerate())
        # Up to a fixed number of them begin with the first contacts, and stay.
        planners = sum(
            count for name, count in names.items() if name.startswith("kvferry-planner")
        )
        in_hand = Counter(
            leases=len(engine.leases),
            held=len(seen.leases.held),
            loads=len(engine.loads),
            running=worker.count_loads(LoadState.RUNNING, LoadState.WAITING),
            quarantined=worker.count_loads(LoadState.QUARANTINED),
            alive=len(engine.seen.alive),
            entries=seen.entries.taken,
            waves=len(pool.waves) if pool is not None else 0,
            transfers=engine.fabric.transfers(),
            blocks=engine.shape.blocks - 1 - len(engine.unused),
            sockets=len(engine.renewer.snapshot().links.addresses),
        )
        return State(
            in_hand=+in_hand,
            peers=len(engine.fabric.peers),
            prepared=engine.fabric.prepared(),
            files=len(list(Path("/proc/self/fd").iterdir())),
            tasks=task_count() - planners,
            threads=sorted(
                name
                for name in names
                if name.startswith("kvferry") and not name.startswith("kvferry-planner")
            ),
            broken=list(self._broken()),
        )

    def _say(self, number: int | None, what: object) -> None:
        """One message to the other end; from any thread."""
        with self._writing:
            self._channel.send((number, what))

    def _broken(self) -> Iterator[str]:
        engine = self.engine
        yield from self._seen_broken
        idle = not len(engine.leases) and not self._ordered
        checks: list[Callable[[], None]] = [
            lambda: check_leases(engine.leases),
            lambda: check_loads(engine.loads),
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
            check_worker(self.engine.worker, idle=idle)
        except LocalProtocolError as error:
            if " 0 flushing," in str(error):
                raise
            check_worker(self.engine.worker)

    def _answer_loads(self) -> None:
        seen = self.engine.seen
        for ordered in list(self._ordered):
            request_id = ordered.load.request_id
            if not ordered.answered and seen.is_over(request_id):
                ordered.answered = True
                reason = seen.failed.get(request_id)
                good = self.engine.has_bytes(ordered.load, ordered.seed)
                self._say(
                    ordered.number, {"reason": reason and reason.value, "good": good}
                )
            if ordered.answered and request_id not in seen.alive:
                self._ordered.remove(ordered)
                self.engine.free(ordered.load)


def stop_copies(stops: Stops) -> None:
    """From now on this process copies from mapped memory unit by unit, and stops where it would stop in a read."""
    steps = MappedReads.steps

    def stopping(
        reads: MappedReads,
        routes: Iterable[MappedRoute],
        units: Mapping[TokenMap, UnitPairs],
    ) -> Iterator[None]:
        mapped = list(routes)
        copying = steps(reads, mapped, units)
        if mapped:
            stops.at(Point.DATA)
            next(copying, None)
            stops.at(Point.IN_READ)
        yield from copying
        if mapped:
            stops.at(Point.SECOND_FENCE)

    mapped_route.LAUNCH_BYTES = 1
    MappedReads.steps = stopping  # type: ignore[method-assign, assignment]


def _remote(params: dict[str, Any]) -> RemotePrefill:
    read = read_params(params)
    assert isinstance(read, RemotePrefill)
    return read


def run(channel: Connection, start: Start) -> None:
    """Be that engine until the other end of the channel is closed."""
    os.environ.update(start.environ)
    torch.set_num_threads(1)
    limits.IDLE_S = SOCKETS_S
    server = Server(start, channel)
    server.serve()
    server.engine.close()
