"""All checks and tests, in parts that run side by side; what scripts/test.sh without arguments does.

Real engines mostly wait for one another, and most other tests for a process, a lease or a deadline: two lanes of parts
keep two cores busy. A lane that is done with its own takes of the parts that any lane may run. Every part's output is
printed whole when it is over; meanwhile a line now and then says how far the parts are. A part that hangs is begun anew
once, and few tests that failed are run once more by themselves. The end is one table, the failed and the unsteady
tests, and a line of totals as pytest writes it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.second_chance import MOST, failed_tests, only_tests_failed, remembering

ROOT = Path(__file__).resolve().parent.parent
_POLL_S = 0.2
_PROGRESS_S = 60.0
_END_S = 10.0
_STOOD_STILL_S = 2.0
"""A pause of the loop that is worth a line: tests that missed a bound in it have a reason."""
HUNG_S = 900.0
"""A part that has said nothing for so long hangs; no test or check takes half of it."""
_TOTALS = re.compile(r"^=* ?((?:\d+ [a-z]+(?:, )?)+) in \d[\d.]*s\b.*$", re.MULTILINE)
_PERCENT = re.compile(r"\[ *(\d+%)\]")
_NOTABLE = re.compile(r"^(?:FAILED|ERROR) \S.*$", re.MULTILINE)


@dataclass(frozen=True)
class Part:
    """Commands that run one after the other; a failure stops none of them."""

    name: str
    commands: tuple[tuple[str, ...], ...]


def folders(part: Part) -> list[str]:
    """The folders of tests that a part names."""
    return [word for command in part.commands for word in command if word.startswith("tests/")]


_PYTEST = (sys.executable, "-m", "pytest", "-q", "--durations=15")
_AFTER_ENGINES = ("nice", "-n", "5")
"""The lane with the engines takes longest: the other one gets what it leaves."""
ENGINES = Part("engines", ((*_PYTEST, "tests/vllm"),))
CHECKS = Part("checks", (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",), ("lint-imports",)))
FAULTS = Part("faults", ((*_AFTER_ENGINES, *_PYTEST, "tests/faults"),))
WORKERS = Part("workers", ((*_AFTER_ENGINES, *_PYTEST, "tests/worker", "tests/engine_core", "tests/rig"),))
REST = Part(
    "rest",
    (
        (
            *_AFTER_ENGINES,
            *_PYTEST,
            "tests",
            *(f"--ignore={folder}" for part in (ENGINES, FAULTS, WORKERS) for folder in folders(part)),
        ),
    ),
)
LANES = ((ENGINES,), (CHECKS,))
"""Parts of one lane follow one another. Only one lane has real engines: each of those binds a core."""

ANY_LANE = (REST, WORKERS, FAULTS)
"""The longest first."""


@dataclass
class Result:
    """What became of a part.

    Attributes:
        counts: of tests, by pytest's words; empty for other commands.
        failures: pytest's lines on tests that failed.
        codes: exit status of each command.
        failed: ids of the tests that failed.
        hung: whether it was begun anew, having said nothing for `HUNG_S`.
    """

    part: Part
    seconds: float
    codes: list[int]
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    hung: bool = False

    @property
    def ok(self) -> bool:
        return not any(self.codes)

    @property
    def text(self) -> str:
        """For the table."""
        said = counted(self.counts) or ("passed" if self.ok else "failed")
        codes = sorted({code for code in self.codes if code})
        said += "; begun anew after it hung" if self.hung else ""
        return said if self.ok else f"{said}; exit status {', '.join(map(str, codes))}"


class Running:
    """A part that has begun. Its output goes to a file.

    Args:
        folder: for the file.
    """

    def __init__(self, part: Part, folder: Path) -> None:
        self.part = part
        self._memory = folder / f"{part.name}.memory"
        self._log = folder / f"{part.name}.log"
        self._log.write_text("")
        self._left = list(part.commands)
        self._codes: list[int] = []
        self._began_s = self._received_s = time.monotonic()
        self._received_bytes = 0
        self._hung = False
        self._next()

    def _next(self) -> None:
        command = self._left.pop(0)
        with self._log.open("a") as log:
            shown = ["python" if word == sys.executable else word for word in command]
            print(f"\n== {' '.join(shown)}", file=log, flush=True)
            self._process = subprocess.Popen(
                remembering(command, self._memory), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )

    def over(self) -> bool:
        """Whether the last command has ended; begins the next one when it is time."""
        code = self._process.poll()
        if code is None:
            return False
        self._codes.append(code)
        if self._left:
            self._next()
            return False
        return True

    def begin_anew_if_it_hangs(self) -> bool:
        """End a command that has said nothing for `HUNG_S`. The first time the part begins anew; the second time the
        command has failed. NIXL's agent has been seen to end never, once in thousands of times, when a peer was killed
        while it sent: see docs/reliability.md."""
        said_bytes, now_s = self._log.stat().st_size, time.monotonic()
        if said_bytes != self._received_bytes:
            self._received_bytes, self._received_s = said_bytes, now_s
        if now_s - self._received_s < HUNG_S:
            return False
        self._received_s = now_s
        self._process.kill()
        self._process.wait()
        if self._hung:
            return False
        self._hung, self._left, self._codes = True, list(self.part.commands), []
        self._next()
        return True

    @property
    def progress(self) -> str:
        """What pytest has said of it."""
        said = _PERCENT.findall(self.output)
        return f"{self.part.name} {said[-1] if said else 'runs'}"

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def result(self) -> Result:
        """Of a part that is over."""
        counts, failures = read_totals(self.output)
        seconds = time.monotonic() - self._began_s
        return Result(self.part, seconds, self._codes, counts, failures, failed_tests(self._memory), self._hung)

    def stop(self) -> None:
        """End it early: pytest ends its engines when it is interrupted, which the terminal may have done already."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGINT)
            self._process.wait()


def read_totals(output: str) -> tuple[Counter[str], list[str]]:
    """Pytest's counts, and its lines on tests that failed, from what it printed."""
    counts: Counter[str] = Counter()
    for totals in _TOTALS.findall(output)[-1:]:
        for each in totals.split(", "):
            number, _, what = each.partition(" ")
            counts[what.removesuffix("s") if what in ("errors", "warnings") else what] += int(number)
    return counts, _NOTABLE.findall(output)


def counted(counts: Counter[str]) -> str:
    """As pytest says it, the bad news first."""
    order = ("failed", "error", "passed", "skipped")
    words = [*(word for word in order if counts[word]), *sorted(set(counts) - set(order))]
    return ", ".join(f"{counts[word]} {word}" for word in words)


def run(lanes: Sequence[Sequence[Part]], any_lane: Sequence[Part], folder: Path) -> Iterator[Running]:
    """Run all lanes side by side, and what any of them may run after that; gives every part when it is over."""
    waiting, shared = [list(lane) for lane in lanes], list(any_lane)
    running: dict[int, Running] = {}
    reported_s = began_s = time.monotonic()
    try:
        while any(waiting) or shared or running:
            for number, lane in enumerate(waiting):
                if number not in running and (lane or shared):
                    running[number] = Running((lane or shared).pop(0), folder)
            for number, each in list(running.items()):
                if each.begin_anew_if_it_hangs():
                    print(f"{each.part.name} has said nothing for {HUNG_S:g} s: killed, and begun anew", flush=True)
                if each.over():
                    del running[number]
                    yield each
            if time.monotonic() - reported_s >= _PROGRESS_S:
                reported_s = time.monotonic()
                doing = " · ".join(each.progress for each in running.values())
                print(f"[{reported_s - began_s:6.0f} s] {doing}", flush=True)
            _sleep_and_tell(began_s)
    finally:
        for each in running.values():
            each.stop()


def _sleep_and_tell(began_s: float) -> None:
    """Sleep; when that took much longer than asked for, say so."""
    asleep_s = time.monotonic()
    time.sleep(_POLL_S)
    slept_s = time.monotonic() - asleep_s
    if slept_s > _STOOD_STILL_S:
        print(
            f"[{asleep_s - began_s:6.0f} s] the machine stood still, or let nobody run, for {slept_s:.1f} s", flush=True
        )


def run_again(results: Sequence[Result], folder: Path) -> Result | None:
    """The second run of the tests that failed, printed; None where there is nothing to run."""
    failed = [test for result in results for test in result.failed]
    may_help = all(only_tests_failed(result.part.commands, result.codes, result.failed) for result in results)
    if not (may_help and 0 < len(failed) <= MOST):
        return None
    (again,) = run(((Part("alone", ((*_PYTEST, *failed),)),),), (), folder)
    print(f"\n===== alone: what failed is run once more by itself\n{again.output}", flush=True)
    return again.result()


def summary(results: Sequence[Result], again: Result | None, seconds: float) -> tuple[list[str], bool]:
    """The lines at the end, and whether all is well."""
    unsteady = [test for result in results for test in result.failed] if again is not None and again.ok else []
    total = sum((result.counts for result in results), Counter[str]())
    # A part that failed without a failed test is an error of its own.
    total["error"] += sum(not (result.ok or result.counts["failed"] or result.counts["error"]) for result in results)
    lines = [f"{result.part.name:10} {result.seconds:6.0f} s  {result.text}" for result in results]
    if again is not None:
        lines.append(f"{again.part.name:10} {again.seconds:6.0f} s  {again.text}")
    if unsteady:
        total["passed alone"], total["failed"], total["error"] = len(unsteady), 0, 0
        lines += [f"UNSTEADY {test} failed beside other tests and passed alone" for test in unsteady]
    else:
        lines += [failure for result in results for failure in result.failures]
    lines.append(f"{counted(total)} in {seconds:.2f}s ({seconds // 60:.0f} min {seconds % 60:.0f} s)")
    return lines, bool(unsteady) or all(result.ok for result in results)


def main() -> int:
    """Entry point; the exit status is 1 when anything has failed, and not only beside others."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ruff and mypy lie beside Python
    began_s = time.monotonic()
    results: list[Result] = []
    parts = sum(len(lane) for lane in (*LANES, ANY_LANE))
    with tempfile.TemporaryDirectory() as folder:
        for number, over in enumerate(run(LANES, ANY_LANE, Path(folder)), 1):
            results.append(over.result())
            print(f"\n===== {over.part.name}: part {number} of {parts} to end\n{over.output}", flush=True)
        again = run_again(results, Path(folder))
    lines, is_well = summary(results, again, time.monotonic() - began_s)
    print("\n===== all parts", *lines, sep="\n")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
