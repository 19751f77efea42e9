"""Tests that failed beside others get one more run with the machine to themselves, and their names in the summary.

Thousands of tests with real processes share two cores. One that waits for another process can then miss a bound that
it never misses by itself; a bug fails again. So a test that failed and then passed alone does not fail the run, and
is not hidden either: it is listed as unsteady. Where many fail, no run follows: that is no accident.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

MOST = 3
"""More failed tests than this have one cause, and it is not the others' company."""
_FAILED = Path("v", "cache", "lastfailed")


def remembering(command: tuple[str, ...], cache: Path) -> tuple[str, ...]:
    """A command of pytest that keeps its memory in a folder of its own; any other command as it is."""
    return (*command, "-o", f"cache_dir={cache}") if "pytest" in command else command


def failed_tests(cache: Path) -> list[str]:
    """The ids of the tests that failed in the run with this memory, in their order."""
    memory = cache / _FAILED
    return list(json.loads(memory.read_text())) if memory.exists() else []


def only_tests_failed(commands: Sequence[tuple[str, ...]], codes: Sequence[int], failed: list[str]) -> bool:
    """Whether whatever went wrong in a part is a test that can be run again.

    Args:
        codes: exit status of each command.
        failed: ids of the part's tests that failed; a module that cannot be collected is none.
    """
    explained = all(
        code == 0 or (code == 1 and "pytest" in command) for command, code in zip(commands, codes, strict=True)
    )
    return explained and any(codes) == bool(failed) and all("::" in test for test in failed)
