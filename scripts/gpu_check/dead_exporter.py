"""May a dead exporter be mapped? The experiment that decides whether `mapped_reads` uses CUDA IPC by default.

    python scripts/gpu_check/dead_exporter.py [--kills 1000] [--mib 1024] [--exporter-gpu 1] [--limit-s 1800]

It needs a GPU and a PyTorch for CUDA, whose dependency `cuda-bindings` has the driver's functions; no other package and
nothing of kvferry. A process allocates memory on a GPU and exports it; another one, on GPU 0, maps it and launches
kernels that read it, and compares every byte; in the midst of them the first one is ended by SIGKILL. It says

- whether the importer's CUDA context was still of use afterwards, and whether every kernel ended;
- whether kernels read other bytes, and whether such a one had ended while the exporter still had its address space and
  its open files: kvferry takes what was read until then for good (docs/design.md, mapped reads);
- how long after the kill the memory was free again, with the map open and when it had been closed.

The last line begins with GO or NO GO. Exit status: 1 if the experiment could not be made.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

KERNELS = 64
"""Kernels that read all of the memory one after the other: some 25 ms for 1 GiB at 3 TB/s."""
HANDLE_BYTES = 64
MOST_POISONED = 20
"""After so many the answer is known."""
HUNG_S = 20.0
FREE_WITHIN_S = 2.0
_POISONED = 3


def main() -> int:
    """Entry point: of the experiment, and of the processes that it starts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000, help="exporters (1000)")
    parser.add_argument("--mib", type=int, default=1024, help="of the memory (1024)")
    parser.add_argument(
        "--limit-s", type=float, default=1800.0, help="kill no more after this time"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the times of kills")
    parser.add_argument(
        "--exporter-gpu", type=int, default=0, help="where the memory lies (0)"
    )
    parser.add_argument("--as", dest="role", default="all", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.kills < 1 or chosen.mib < 1:
        parser.error("--kills and --mib: expected at least 1")
    if chosen.role == "exporter":
        return export(chosen.exporter_gpu, chosen.mib << 20)
    if chosen.role == "importer":
        return Importer(chosen).run()
    return supervise(chosen)


class CudaError(Exception):
    """A function of the driver has failed."""


class Driver:
    """CUDA's driver, with the primary context of one GPU."""

    def __init__(self, gpu: int) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self.call("cuInit", 0)
        device = self.call("cuDeviceGet", gpu)
        self.call("cuCtxSetCurrent", self.call("cuDevicePrimaryCtxRetain", device))

    def call(self, name: str, *arguments: Any) -> Any:
        """What a function returns beside its error.

        Raises:
            CudaError: the error.
        """
        error, *values = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise CudaError(f"{name}: {getattr(error, 'name', error)}")
        return values[0] if len(values) == 1 else values

    def open(self, handle: bytes) -> int:
        """Map memory of another process."""
        opened = self._driver.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, HANDLE_BYTES)
        lazily = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self.call("cuIpcOpenMemHandle", opened, int(lazily)))


def export(gpu: int, num_bytes: int) -> int:
    """The process that is killed: fills memory with a value of its own, says its handle, and waits."""
    driver = Driver(gpu)
    value = random.SystemRandom().randrange(1, 256)
    start = int(driver.call("cuMemAlloc", num_bytes))
    driver.call("cuMemsetD8", start, value, num_bytes)
    driver.call("cuCtxSynchronize")
    exported = driver.call("cuIpcGetMemHandle", start)
    handle = ctypes.string_at(exported.getPtr(), HANDLE_BYTES)
    print(json.dumps({"handle": handle.hex(), "value": value}), flush=True)
    sys.stdin.read()
    return 0


@dataclass(frozen=True)
class Mapped:
    """Mapped memory, as PyTorch takes it without a copy: int64."""

    start: int
    num_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.num_bytes // 8,),
            "typestr": "<i8",
            "data": (self.start, False),
            "version": 3,
        }


class Importer:
    """The process that maps and reads. Its context may be of no use any more, so it is one of several."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        import torch

        self._torch = torch
        self._chosen = chosen
        self._num_bytes = chosen.mib << 20
        self._random = random.Random(chosen.seed)
        torch.cuda.set_device(0)
        torch.zeros(1, device="cuda")
        self._driver = Driver(0)
        self._pass_s = 0.0

    def run(self) -> int:
        """Kill so many exporters; a line of JSON for each."""
        # Without a kill first: how long the kernels take, and all of PyTorch's own memory is there.
        self._kill_one(is_kill=False)
        for _ in range(self._chosen.kills):
            try:
                found = self._kill_one(is_kill=True)
            except Exception as error:  # noqa: BLE001 - this is what is looked for
                print(json.dumps({"poisoned": f"{error}".splitlines()[0]}), flush=True)
                return _POISONED
            print(json.dumps(found), flush=True)
        return 0

    def _kill_one(self, *, is_kill: bool) -> dict[str, Any]:
        free_before = self._torch.cuda.mem_get_info()[0]
        with _started("exporter", self._chosen) as exporter:
            said = json.loads(exporter.stdout.readline())
            start = self._driver.open(bytes.fromhex(said["handle"]))
            memory = self._torch.as_tensor(
                Mapped(start, self._num_bytes), device="cuda"
            )
            found = self._read(memory, said["value"], exporter, is_kill=is_kill)
            killed_s = found.pop("killed_s")
            exporter.kill()
            exporter.wait()
            found["free_s"] = self._free_after(free_before, killed_s)
            del memory
            self._driver.call("cuIpcCloseMemHandle", start)
            found["free_closed_s"] = self._free_after(free_before, killed_s)
            # The context is of use: what it computes is right.
            check = self._torch.arange(1000, device="cuda").sum().item()
            if check != 499_500:
                raise CudaError(f"0 + 1 + … + 999 = {check}")
        return found

    def _read(
        self, memory: Any, value: int, exporter: Any, *, is_kill: bool
    ) -> dict[str, Any]:
        """Read it again and again, and kill the exporter meanwhile."""
        cuda = self._torch.cuda
        expected = int.from_bytes(bytes([value]) * 8, "little", signed=True)
        wrong = self._torch.zeros(KERNELS, dtype=self._torch.int64, device="cuda")
        begun_s = time.monotonic()
        ends: list[Any] = []
        for number in range(KERNELS):
            wrong[number] = (memory != expected).sum()
            ends.append(cuda.Event())
            ends[-1].record()
        # Any time from the first kernel to the last one.
        kill_s = begun_s + self._random.uniform(0, self._pass_s)
        killed_s: float | None = None
        was_whole: list[bool] = []
        while len(was_whole) < KERNELS:
            now_s = time.monotonic()
            if is_kill and killed_s is None and now_s >= kill_s:
                os.kill(exporter.pid, signal.SIGKILL)
                killed_s = now_s
            if ends[len(was_whole)].query():
                was_whole.append(is_whole(exporter.pid))
            elif now_s > begun_s + HUNG_S:
                raise CudaError(f"a kernel has not ended within {HUNG_S:g} s")
        ended_s = time.monotonic()
        self._pass_s = (
            max(self._pass_s, ended_s - begun_s) if not is_kill else self._pass_s
        )
        counts = wrong.tolist()
        return {
            "killed_s": ended_s if killed_s is None else killed_s,
            "amid": killed_s is not None,
            "wrong": sum(map(bool, counts)),
            "unnoticed": sum(
                bool(count) and whole
                for count, whole in zip(counts, was_whole, strict=True)
            ),
        }

    def _free_after(self, free_before: int, killed_s: float) -> float | None:
        """Seconds from the kill until the memory was free; None if it was not in time."""
        deadline_s = time.monotonic() + FREE_WITHIN_S
        while True:
            now_s = time.monotonic()
            # Contexts and other processes take some, too.
            taken = free_before - self._torch.cuda.mem_get_info()[0]
            if taken < self._num_bytes // 2:
                return now_s - killed_s
            if now_s > deadline_s:
                return None
            time.sleep(0.001)


def is_whole(pid: int) -> bool:
    """Whether a process still has its address space and its open files. See `has_begun_to_exit` of kvferry."""
    try:
        os.readlink(f"/proc/{pid}/exe")
        os.readlink(f"/proc/{pid}/fd/0")
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _started(role: str, chosen: argparse.Namespace, kills: int = 1) -> Any:
    """A process of the experiment; ended afterwards."""
    command = [sys.executable, os.path.abspath(__file__), "--as", role]
    options = {
        "--exporter-gpu": chosen.exporter_gpu,
        "--mib": chosen.mib,
        "--kills": kills,
        "--seed": chosen.seed + kills,
    }
    for option, number in options.items():
        command += [option, str(number)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@dataclass
class Found:
    """What was found."""

    kills: int = 0
    amid: int = 0
    poisoned: list[str] = field(default_factory=list)
    wrong: int = 0
    unnoticed: int = 0
    free_s: list[float | None] = field(default_factory=list)
    free_closed_s: list[float | None] = field(default_factory=list)

    def add(self, one: dict[str, Any]) -> None:
        """What an importer said of one kill."""
        self.kills += 1
        if "poisoned" in one:
            self.poisoned.append(one["poisoned"])
            return
        self.amid += one["amid"]
        self.wrong += one["wrong"]
        self.unnoticed += one["unnoticed"]
        self.free_s.append(one["free_s"])
        self.free_closed_s.append(one["free_closed_s"])

    def lines(self) -> list[str]:
        """The findings, for people."""
        return [
            f"{self.kills} exporters killed, {self.amid} of them while kernels read",
            f"contexts lost, or kernels that did not end: {len(self.poisoned)}"
            f"{': ' * bool(self.poisoned)}{'; '.join(sorted(set(self.poisoned)))}",
            f"kernels that read other bytes: {self.wrong}; of these ended while the exporter looked whole: "
            f"{self.unnoticed}",
            f"memory free with the map open: {_spread(self.free_s)}",
            f"memory free when it was closed: {_spread(self.free_closed_s)}",
        ]

    @property
    def why_not(self) -> list[str]:
        """What speaks against it."""
        reasons: list[str] = []
        if not self.amid:
            reasons.append("no exporter was killed while a kernel read")
        if self.poisoned:
            reasons.append(f"{len(self.poisoned)} of {self.kills} contexts lost")
        if self.unnoticed:
            reasons.append(f"{self.unnoticed} kernels read other bytes unnoticed")
        if None in self.free_closed_s:
            reasons.append(f"memory not free within {FREE_WITHIN_S:g} s")
        return reasons


def _spread(seconds: list[float | None]) -> str:
    times = sorted(each for each in seconds if each is not None)
    never = len(seconds) - len(times)
    if not times:
        return f"never in {never}"
    middle = times[len(times) // 2]
    return f"median {middle * 1e3:.0f} ms, most {times[-1] * 1e3:.0f} ms; not in time: {never}"


def supervise(chosen: argparse.Namespace) -> int:
    """Run importers until all kills are made, and say what was found."""
    end_s = time.monotonic() + chosen.limit_s
    found = Found()
    while found.kills < chosen.kills and time.monotonic() < end_s:
        if not _run_importer(chosen, found, end_s):
            print("the experiment could not be made: see above")
            return 1
        if len(found.poisoned) >= MOST_POISONED:
            break
    print(*found.lines(), sep="\n")
    reasons = found.why_not
    if found.kills < chosen.kills and not found.poisoned:
        reasons.append(f"{found.kills} of {chosen.kills} kills")
    if reasons:
        print(f"NO GO: {'; '.join(reasons)}")
    else:
        print("GO: no context was lost, and no wrong byte went unnoticed")
    return 0


def _run_importer(chosen: argparse.Namespace, found: Found, end_s: float) -> bool:
    """Run one importer as long as it lives. Returns whether it did anything."""
    before = found.kills
    with _started("importer", chosen, chosen.kills - found.kills) as importer:
        for line in importer.stdout:
            found.add(json.loads(line))
            if found.kills % 100 == 0:
                print(f"{found.kills} of {chosen.kills}", flush=True)
            if time.monotonic() > end_s:
                return True
        status = importer.wait()
    if status not in (0, _POISONED) and found.kills > before:
        # It has ended without a word: a lost context may take its process with it.
        found.add({"poisoned": f"the importer ended with status {status}"})
    return found.kills > before


if __name__ == "__main__":
    sys.exit(main())
