"""The fabric raises from every single call that a handover makes, one call at a time.

A clean scenario runs first, and its calls are counted: a consumer contacts a producer and loads, the producer restarts
with another boot, and is loaded from again. Then the scenario runs once for every counted call and every error, with
that call raising the error. Each load is good, byte for byte, or reported failed; afterwards nothing is left behind.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

import pytest

from kvferry.worker.fabric.errors import (
    DescriptorOutOfRange,
    FabricUnavailable,
    InvalidFabricRequest,
    InvalidMetadata,
    PeerLost,
    TransferFailed,
)
from tests.draws import usual_cases
from tests.harness.rig import BOUND_S, HASTY, Rig, rig_of
from tests.promises import promise

ERRORS: dict[str, Callable[[], Exception]] = {
    "a bug": lambda: RuntimeError("unheard of"),
    "PeerLost": lambda: PeerLost("test", "the test wanted it"),
    "TransferFailed": lambda: TransferFailed("test", "the test wanted it"),
}
OWN_ERRORS: dict[str, Callable[[], Exception]] = {
    "add_peer": lambda: InvalidMetadata("test", "the test wanted it"),
    "prepare_local": lambda: DescriptorOutOfRange("test", "the test wanted it"),
    "prepare_remote": lambda: DescriptorOutOfRange("test", "the test wanted it"),
    "post_read": lambda: InvalidFabricRequest("test", "the test wanted it"),
    "notify": lambda: InvalidFabricRequest("test", "the test wanted it"),
    "take_notifications": lambda: FabricUnavailable("test", "the test wanted it"),
}
"""Errors that only these methods raise by their contract."""
pytestmark = pytest.mark.usefixtures("short_backoff")

METHODS = (
    *(
        "add_peer",
        "remove_peer",
        "prepare_local",
        "prepare_remote",
        "post_read",
        "poll",
        "telemetry",
    ),
    *("release", "notify", "take_notifications", "open_handles"),
)
MOST_POLLS = {"poll": 8, "take_notifications": 3, "open_handles": 2}
"""How often these are called, if at all, depends on the time that everything else takes."""
LEASE_S = 0.3
"""A producer that cannot be notified gets its blocks back all the same."""
SIDES = ("producer", "consumer")


def tell(
    kind: str, side: str, arm: Callable[[Rig, str], object], lease_s: float = LEASE_S
) -> dict[str, tuple[int, int]]:
    """The story. Returns per method the numbers of its first call after `arm` and of the first that never was."""
    with rig_of(kind, HASTY) as rig:
        producer, consumer = rig.engine("P", lease_s=lease_s), rig.engine("C")
        faults = (producer if side == "producer" else consumer).fabric
        before = Counter(faults.calls)
        arm(rig, side)
        rig.try_transfer(producer, consumer, seed=1)
        if side == "consumer":
            rig.step_until(
                lambda: not len(producer.leases), "the blocks are free", BOUND_S
            )
            rig.retire(producer)
            producer = rig.engine("P", port=producer.port, lease_s=lease_s)
        rig.try_transfer(producer, consumer, seed=2)
        calls = Counter(faults.calls)
        rig.settle()
        rig.until_good(producer, consumer)
        rig.settle()
        return {method: (before[method], calls[method]) for method in METHODS}


@functools.cache
def clean(kind: str, side: str) -> dict[str, tuple[int, int]]:
    """The calls of the scenario without errors."""
    return tell(kind, side, lambda rig, side: None, lease_s=60.0)


NEVER_CALLED = {
    ("producer", method)
    for method in METHODS
    if method not in ("take_notifications", "open_handles")
}
NEVER_CALLED |= {("consumer", "take_notifications")}
"""A producer does not touch the fabric but to listen, and a consumer does not listen."""


@promise(1, 6)
@usual_cases(24)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", ["memory", "nixl"])
def test_whichever_call_raises_loads_are_good_or_failed_and_nothing_is_left(
    kind: str, side: str, method: str
) -> None:
    first, stop = clean(kind, side)[method]
    if first == stop:
        assert (side, method) in NEVER_CALLED or method in MOST_POLLS
        return
    for index in range(first, min(stop, first + MOST_POLLS.get(method, stop))):
        for name, error in _errors(kind, method).items():
            try:
                tell(
                    kind,
                    side,
                    functools.partial(_arm, method=method, index=index, error=error),
                )
            except BaseException:
                print(f"{side}: {name} from call {index - first} of {method}")
                raise


def _arm(
    rig: Rig, side: str, *, method: str, index: int, error: Callable[[], Exception]
) -> None:
    engine = rig.engines[SIDES.index(side)]
    engine.fabric.fail(method, error, first=index)


def _errors(kind: str, method: str) -> dict[str, Callable[[], Exception]]:
    """The errors that a call raises; fewer with the real fabric, which takes longer."""
    if kind == "nixl":
        names = ("a bug", "PeerLost") if method in ("post_read", "poll") else ("a bug",)
        return {name: ERRORS[name] for name in names}
    return ERRORS | ({"its own": OWN_ERRORS[method]} if method in OWN_ERRORS else {})
