"""Settings of every test: one seed for all that a run draws, and no time limit by hypothesis on a shared machine. No
test leaves a thread of kvferry behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import seeds
from tests.draws import draws, leave_cases_out
from tests.waiting import deadline_s

# Before anything imports torch. Its threads wait for each other at the end of every operation, and on a machine with
# more workers than cores one of them is not running: a test of engine_core took 23 s, and with one thread 3.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_ENDING_S = 30.0
"""Deadline of a thread after it was asked to end."""

_WORKER_DIED = pytest.StashKey[bool]()

settings.register_profile(
    "kvferry",
    print_blob=True,
    deadline=None,
    max_examples=draws(150),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvferry")


@pytest.fixture(autouse=True, scope="module")
def _no_thread_outlives_its_module() -> Iterator[None]:
    before = _threads()
    yield
    end_s = deadline_s(_ENDING_S)
    while left := _threads() - before:
        if time.monotonic() > end_s:
            pytest.fail(
                f"threads are left: {', '.join(sorted(thread.name for thread in left))}"
            )
        time.sleep(0.002)


def _threads() -> set[threading.Thread]:
    return {
        thread for thread in threading.enumerate() if thread.name.startswith("kvferry-")
    }


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before hypothesis reads its options."""
    seeds.choose_seed(config)
    config.pluginmanager.register(seeds.DrawnFailures(config))


@pytest.fixture(scope="session")
def run_seed() -> int:
    """The seed for what a test draws by itself, without hypothesis."""
    return seeds.seed_of_this_run()


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Order of the tests. In one process, tests that take minutes come last, after the failures of all others; with
    several workers they come first, so that other tests can run beside them, and slow modules next: at the end, no
    worker waits long for another's last module."""
    leave_cases_out(config, items)
    if not hasattr(config, "workerinput"):
        items.sort(key=_turn)
        return
    items.sort(key=lambda item: _turn(item) or (8 if _is_slow(item) else 9))


def _is_slow(item: pytest.Item) -> bool:
    """Whether it takes more than seconds; drills are not marked, since none of them is part of a quick run."""
    return "faults" in item.path.parts or item.get_closest_marker("slow") is not None


def _turn(item: pytest.Item) -> int:
    """The order of what takes minutes; 0 for all else."""
    if item.path.parts[-2:] in (
        ("faults", "test_guards.py"),
        ("faults", "test_soak.py"),
    ):
        return 1
    if "vllm" not in item.path.parts:
        return 0
    # The fleet's engines live as long as their module, most others for a test; those of the pair, once started, until
    # the session ends: they come last, and take no memory before.
    if item.path.name.startswith("test_fleet"):
        return 2
    return 4 if "pair" in getattr(item, "fixturenames", ()) else 3


_TOGETHER = {
    "tests/vllm/test_fleet_drills.py": "fleet",
    "tests/vllm/test_model_kinds.py": "engines in process",
    "tests/vllm/test_prefix_pulls.py": "engines in process",
    "tests/vllm/test_turns.py": "engines in process",
    "tests/vllm/test_unequal_engines.py": "engines in process",
    "tests/vllm/": "servers",
    "tests/packaging/": "distributions",
}
"""Modules that share what takes long to make, and so one worker of pytest-xdist. The first match counts."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Workers take whole modules. (Not by marks, which would change the tests' names: `--lf` would not know them.)"""
    from xdist.scheduler import LoadFileScheduling

    scheduler = LoadFileScheduling(config, log)
    scheduler._split_scope = _group
    return scheduler


def _group(nodeid: str) -> str:
    return next(
        (group for start, group in _TOGETHER.items() if nodeid.startswith(start)),
        nodeid.partition("::")[0],
    )


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Tests that a worker took with it when it died were not run: no second run may hide that."""
    if error:
        node.config.stash[_WORKER_DIED] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash.get(_WORKER_DIED, False):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR
