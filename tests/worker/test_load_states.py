"""The table of a load's states: complete, closed, and obeyed by the containers that follow from it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import cast

import pytest

from kvferry.protocol.errors import LocalProtocolError
from kvferry.worker.loads.load import Load
from kvferry.worker.loads.results import Stage
from kvferry.worker.loads.runner import LoadsByState
from kvferry.worker.loads.slot_watch import Wait
from kvferry.worker.loads.state import LOAD_TRANSITIONS, MAY_FAIL, LoadEvent, LoadState
from tests.worker.stub_loads import StubLoad

PAIRS = [(state, event) for state in LoadState for event in LoadEvent]
ILLEGAL = [pair for pair in PAIRS if pair not in LOAD_TRANSITIONS]

ROUTES: dict[LoadState, tuple[LoadEvent, ...]] = {
    LoadState.WAITING: (),
    LoadState.RUNNING: (LoadEvent.BEGIN,),
    LoadState.PARKED: (LoadEvent.BEGIN, LoadEvent.PARK),
    LoadState.RESUMED: (LoadEvent.BEGIN, LoadEvent.PARK, LoadEvent.RESUME),
    LoadState.FLUSHING: (LoadEvent.BEGIN, LoadEvent.LOADED),
    LoadState.QUARANTINED: (LoadEvent.FAILED,),
    LoadState.OVER: (LoadEvent.FAILED, LoadEvent.SETTLED),
}
"""Events that lead to each state."""


def a_wait() -> Wait:
    """One that nothing polls."""
    return Wait(cast("object", None), 0, (), 0, 0)  # type: ignore[arg-type]


def happen(
    loads: LoadsByState, load: Load, event: LoadEvent, now_s: float = 0.0
) -> None:
    loads.apply(load, event, now_s, a_wait() if event is LoadEvent.PARK else None)


def load_in(state: LoadState) -> tuple[LoadsByState, Load]:
    loads = LoadsByState()
    load = cast("Load", StubLoad("request"))
    loads.add(load)
    for event in ROUTES[state]:
        happen(loads, load, event)
    assert load.state is state
    return loads, load


def seen(loads: LoadsByState) -> dict[LoadState, list[Load]]:
    """All that the containers hold."""
    return {
        state: list(loads.of(state))
        for state in LoadState
        if state is not LoadState.OVER
    }


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_every_event_in_every_state_does_what_the_table_says(
    state: LoadState, event: LoadEvent
) -> None:
    loads, load = load_in(state)
    before, told = seen(loads), str(load.story)
    wait = load.wait
    if (state, event) in LOAD_TRANSITIONS:
        happen(loads, load, event, 1.0)
        assert load.state is LOAD_TRANSITIONS[state, event]
        assert str(load.story).endswith(f"{event.value} 1000.0 ms")
        return
    with pytest.raises(LocalProtocolError) as error:
        happen(loads, load, event, 1.0)
    assert f"req=request: {event.name} cannot happen in state {state.name}" in str(
        error.value
    )
    assert str(error.value).endswith(told), "with its story"
    assert (load.state, load.wait, load.since_s) == (state, wait, 0.0)
    assert seen(loads) == before
    assert str(load.story) == told


def test_every_state_is_reachable_and_can_end() -> None:
    assert set(LOAD_TRANSITIONS.values()) | {LoadState.WAITING} == set(LoadState)
    assert {event for _, event in LOAD_TRANSITIONS} == set(LoadEvent)
    ending = {LoadState.OVER}
    for _ in LoadState:
        ending |= {
            state for (state, _), after in LOAD_TRANSITIONS.items() if after in ending
        }
    assert ending == set(LoadState)


def test_only_a_load_that_settles_is_over() -> None:
    """No path gives its blocks back while anything may write into them."""
    over = {pair for pair, after in LOAD_TRANSITIONS.items() if after is LoadState.OVER}
    assert {event for _, event in over} == {LoadEvent.SETTLED}
    assert not {state for state, _ in over} & set(MAY_FAIL)


def test_a_load_parks_with_a_wait_and_only_then() -> None:
    loads, load = load_in(LoadState.RUNNING)
    with pytest.raises(LocalProtocolError, match="only a load that parks has a wait"):
        loads.apply(load, LoadEvent.PARK, 1.0)
    with pytest.raises(LocalProtocolError, match="only a load that parks has a wait"):
        loads.apply(load, LoadEvent.LOADED, 1.0, a_wait())
    assert load.state is LoadState.RUNNING
    assert list(loads.of(LoadState.RUNNING)) == [load]
    wait = a_wait()
    loads.apply(load, LoadEvent.PARK, 1.0, wait)
    assert loads.parked_for(wait) is load
    loads.apply(load, LoadEvent.RESUME, 2.0)
    with pytest.raises(KeyError):
        loads.parked_for(wait)


def test_a_load_that_is_under_way_is_no_new_one() -> None:
    loads, load = load_in(LoadState.RUNNING)
    with pytest.raises(LocalProtocolError, match="a new load is RUNNING"):
        loads.add(load)
    assert sum(loads.counts().values()) == 1


class Model:
    """What the containers must hold, from the definition alone: every load's own list of events, played from its
    beginning each time."""

    def __init__(self) -> None:
        self.histories: dict[Load, list[tuple[int, LoadEvent]]] = {}

    def state(self, load: Load) -> LoadState:
        state = LoadState.WAITING
        for _, event in self.histories[load]:
            state = LOAD_TRANSITIONS[state, event]
        return state

    def entered(self, load: Load) -> int:
        """When it entered its state: containers have loads in this order."""
        return self.histories[load][-1][0] if self.histories[load] else self.order[load]

    @property
    def order(self) -> dict[Load, int]:
        return {load: int(load.order.request_id) for load in self.histories}

    def containers(self) -> dict[LoadState, list[Load]]:
        return {
            state: sorted(
                (load for load in self.histories if self.state(load) is state),
                key=self.entered,
            )
            for state in LoadState
            if state is not LoadState.OVER
        }


def check(loads: LoadsByState, model: Model) -> None:
    containers = model.containers()
    assert seen(loads) == containers
    assert loads.counts() == {state: len(held) for state, held in containers.items()}
    for state, held in containers.items():
        assert list(loads.in_state(state)) == held
        assert loads.count(state) == len(held)
        assert all(load.state is state for load in held)
        for load in held:
            assert (load.wait is not None) == (state is LoadState.PARKED)
            if load.wait is not None:
                assert loads.parked_for(load.wait) is load


def steps(rng: random.Random, count: int) -> Iterator[tuple[int, LoadEvent | None]]:
    """Random steps: a new load, or any event to any load, legal or not."""
    for number in range(count):
        yield number, None if rng.random() < 0.15 else rng.choice(list(LoadEvent))


@pytest.mark.parametrize("number", range(20))
def test_random_events_leave_every_load_in_the_one_container_of_its_state(
    number: int, run_seed: int
) -> None:
    rng = random.Random(f"{run_seed} {number}")
    loads, model = LoadsByState(), Model()
    illegal = 0
    for now, event in steps(rng, 300):
        if event is None or not model.histories:
            load = cast("Load", StubLoad(str(now)))
            loads.add(load)
            model.histories[load] = []
        else:
            load = rng.choice(list(model.histories))
            told = str(load.story)
            if (model.state(load), event) in LOAD_TRANSITIONS:
                happen(loads, load, event, now)
                model.histories[load].append((now, event))
            else:
                illegal += 1
                with pytest.raises(LocalProtocolError):
                    happen(loads, load, event, now)
                assert str(load.story) == told
        check(loads, model)
    assert illegal > 20


def test_a_story_has_stages_and_transitions_by_time_and_forgets_the_oldest() -> None:
    loads, load = load_in(LoadState.WAITING)
    load.record.end(0.001)
    loads.apply(load, LoadEvent.BEGIN, 0.001)
    load.record.go_on(Stage.CONNECTING, 0.001)
    load.record.go_on(Stage.FENCE, 0.0025)
    loads.apply(load, LoadEvent.PARK, 0.003, a_wait())
    assert str(load.story) == (
        "queued ended 1.0 ms, begin 1.0 ms, connecting ended 2.5 ms, park 3.0 ms"
    )
    for number in range(20):
        loads.apply(load, LoadEvent.RESUME, number)
        loads.apply(load, LoadEvent.BEGIN, number)
        loads.apply(load, LoadEvent.PARK, number, a_wait())
    story = str(load.story)
    assert story.startswith("50 earlier events, queued ended 1.0 ms")
    assert story.endswith("resume 19000.0 ms, begin 19000.0 ms, park 19000.0 ms")
    assert len(story) < 500
