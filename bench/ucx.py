"""UCX settings that kvferry sets where the user has not: what they bring, and what they cost.

    python -m bench.ucx            # writes results/ucx.json; 5 minutes, most of them waiting for what never comes
    python -m bench.ucx --quick    # short intervals and timeouts; under a minute

Two processes on NIXL, with UCX settings of their own. Segments over TCP: reads, and memory per connection. Signs of
life: how soon a read of a dead peer raises, and what an agent does whose peer takes none.
"""

from __future__ import annotations

import argparse
import queue
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from bench.agent_process import AgentProcess
from bench.figures import Cell, Results, Table, publish
from bench.provenance import begin

_MIB = 1 << 20
DEFAULT = "default"
_SHARED_MEMORY = "messages through shared memory"
_TRANSPORTS: dict[str, dict[str, str]] = {
    DEFAULT: {},
    _SHARED_MEMORY: {"UCX_MM_ERROR_HANDLING": "y"},
    "tcp": {"UCX_TLS": "tcp"},
    "posix,self": {"UCX_TLS": "posix,self", "UCX_MM_ERROR_HANDLING": "y"},
}
_FIFO = 256
"""Entries of UCX's queue in shared memory (`UCX_POSIX_FIFO_SIZE`)."""


_IN_MID_READ_S = 0.3
_AT_ONCE = 3
"""Pairs that wait at the same time."""


def every(interval: str) -> dict[str, str]:
    """The setting of the signs of life."""
    return {"UCX_KEEPALIVE_INTERVAL": interval}


def segments(size: str) -> dict[str, str]:
    """The setting of TCP's buffers."""
    return {"UCX_TCP_TX_SEG_SIZE": size, "UCX_TCP_RX_SEG_SIZE": size}


@contextmanager
def _pair(
    ucx: Mapping[str, str], num_bytes: int, owners: int = 1, readers: int = 1
) -> Iterator[tuple[AgentProcess, AgentProcess, list[dict[str, Any]]]]:
    """A process whose agents own memory, one whose agents read, and what the owners say of themselves."""
    owner, reader = AgentProcess(ucx), AgentProcess(ucx)
    try:
        owner.send("make", count=owners, bytes=num_bytes)
        reader.send("make", count=readers, bytes=num_bytes)
        peers = owner.answer()["agents"]
        reader.answer()
        yield owner, reader, peers
    finally:
        owner.close()
        reader.close()


def reads_over_tcp(sizes: Sequence[str], repeats: int) -> list[list[Cell]]:
    """GB/s by size of the segments and length of the read: median and best."""
    rows: list[list[Cell]] = []
    for size in sizes:
        with _pair({"UCX_TLS": "tcp", **segments(size)}, 16 * _MIB) as (_, reader, peers):
            reader.tell("connect", agent=0, peer=peers[0], bytes=16 * _MIB)
            row: list[Cell] = [size]
            for length in (64 << 10, _MIB, 16 * _MIB):
                reader.tell("read", agent=0, bytes=length, repeats=2, timeout_s=20.0)
                took = reader.tell("read", agent=0, bytes=length, repeats=repeats, timeout_s=20.0)["seconds"]
                row += [length / statistics.median(took) / 1e9, length / min(took) / 1e9]
            rows.append(row)
    return rows


def memory(sizes: Sequence[str], readers: int) -> list[list[Cell]]:
    """MB per connection on both sides, all transports or TCP alone."""
    rows: list[list[Cell]] = []
    for transports in ("all", "tcp"):
        for size in sizes:
            ucx = {"UCX_TLS": transports, **segments(size)}
            with _pair(ucx, 1 << 16, readers=readers) as (owner, reader, peers):
                before = [owner.tell("usage")["rss_mb"], reader.tell("usage")["rss_mb"]]
                for agent in range(readers):
                    reader.tell("connect", agent=agent, peer=peers[0], bytes=1 << 16)
                    reader.tell("read", agent=agent, bytes=1 << 16, repeats=3, timeout_s=20.0)
                after = [owner.tell("usage")["rss_mb"], reader.tell("usage")["rss_mb"]]
                rows.append([transports, size, *((b - a) / readers for a, b in zip(before, after, strict=True))])
    return rows


def dead_peer(transports: str, interval: str, idle_s: float, timeout_s: float) -> list[Cell]:
    """Seconds until a read raises: of a peer that died while idle, `idle_s` before the read, and in mid-read."""
    row: list[Cell] = [transports, interval]
    ucx = {**_TRANSPORTS[transports], **every(interval)}
    for in_mid_read in (False, True):
        num_bytes = (768 if in_mid_read else 16) * _MIB
        with _pair(ucx, num_bytes) as (owner, reader, peers):
            reader.tell("connect", agent=0, peer=peers[0], bytes=_MIB)
            if in_mid_read:
                reader.send("read", agent=0, bytes=num_bytes, repeats=1000, timeout_s=timeout_s, announced=True)
                reader.answer()
                time.sleep(_IN_MID_READ_S)
            owner.process.kill()
            owner.process.wait()
            killed_s = time.perf_counter()
            if in_mid_read:
                answer = reader.answer()
                took_s = time.perf_counter() - killed_s
            else:
                time.sleep(idle_s)
                answer = reader.tell("read", agent=0, bytes=_MIB, repeats=1, timeout_s=timeout_s)
                took_s = answer["error_s"]
            row.append(None if answer["error"].startswith("TimeoutError") else took_s)
    return row


def silent_peer(transports: str, how: str, interval: str, seconds: float, timeout_s: float) -> list[Cell]:
    """Cores that an agent takes whose peer takes no signs of life, in the last tenth; seconds until it is closed."""
    with _pair({**_TRANSPORTS[transports], **every(interval)}, _MIB, owners=2) as (owner, reader, peers):
        reader.tell("connect", agent=0, peer=peers[1], bytes=_MIB)
        if how == "closed":
            owner.tell("close", agent=1)
        else:
            owner.process.send_signal(signal.SIGSTOP)
        time.sleep(0.9 * seconds)
        before, start_s = reader.tell("usage")["cpu_s"], time.perf_counter()
        time.sleep(0.1 * seconds)
        cores = (reader.tell("usage")["cpu_s"] - before) / (time.perf_counter() - start_s)
        closed: queue.SimpleQueue[float] = queue.SimpleQueue()
        start_s = time.perf_counter()

        def close() -> None:
            try:
                reader.tell("close", agent=0)
            except RuntimeError:  # it is ended while it hangs
                return
            closed.put(time.perf_counter() - start_s)

        waiting = threading.Thread(target=close, daemon=True)
        waiting.start()
        waiting.join(timeout_s)
        row: list[Cell] = [transports, how, interval, seconds, cores, None if closed.empty() else closed.get()]
    waiting.join()
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args(arguments).quick
    started = begin()
    sizes = ("8k", "256k") if quick else ("8k", "64k", "256k", "1m")
    timeout_s, interval_s = (4.0, 0.02) if quick else (45.0, 0.2)
    silent_s = 1.5 * _FIFO * interval_s
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        waited_dead = [
            pool.submit(dead_peer, transports, interval, 1.0 if quick else 3.0, timeout_s)
            for transports in ((DEFAULT,) if quick else _TRANSPORTS)
            for interval in ("500ms", "inf")
        ]
        waited_silent = [
            pool.submit(silent_peer, transports, how, interval, silent_s, timeout_s / 3)
            for transports in (DEFAULT, _SHARED_MEMORY)
            for how in (("stopped",) if quick else ("closed", "stopped"))
            for interval in (f"{interval_s * 1e3:g}ms", "inf")
        ]
    print("dead and silent peers are measured", flush=True)
    dead, silent = ([one.result() for one in waited] for waited in (waited_dead, waited_silent))
    lengths = ("64 KiB", "1 MiB", "16 MiB")
    results = Results(
        command="python -m bench.ucx" + (" --quick" if quick else ""),
        what="UCX settings that kvferry sets where the user has not, between two processes of one host.",
        tables=[
            Table(
                "Reads over TCP, GB/s by size of its segments",
                ("segments", *(f"{length}, {which}" for length in lengths for which in ("median", "best"))),
                reads_over_tcp(sizes, 10 if quick else 50),
            ),
            Table(
                "Memory per connection, MB",
                ("transports", "segments", "owner", "reader"),
                memory(sizes, 8 if quick else 24),
            ),
            Table(
                f"A peer is killed: seconds until a read raises; – for not within {timeout_s:g} s",
                ("transports", "signs of life", "killed while idle", "killed in mid-read"),
                dead,
            ),
            Table(
                f"A peer takes no signs of life; – for not closed within {timeout_s / 3:g} s",
                ("transports", "peer", "signs of life", "seconds", "cores at the end", "seconds to close"),
                silent,
            ),
        ],
        notes=[f"A peer's queue in shared memory is full after {_FIFO} signs of life, of all agents that send to it."],
        quick=quick,
    )
    publish("ucx", results, started)


if __name__ == "__main__":
    main()
