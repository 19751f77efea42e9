"""The rules of CUDA, kept by real workers on fake GPUs; `test_mutants` breaks them one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.worker.device import scenes
from tests.worker.device.scenes import Stage

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.parametrize("setup", scenes.SETUPS)
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    "own_stream", [False, True], ids=["the default stream", "a stream of its own"]
)
def test_a_whole_life_breaks_no_rule(
    setup: str, index: int, *, own_stream: bool
) -> None:
    with Stage(setup, index=index, own_stream=own_stream, is_late=True) as stage:
        scenes.a_whole_life(stage)


@pytest.mark.parametrize("setup", scenes.SETUPS)
def test_nothing_of_kvferry_runs_before_the_first_step(setup: str) -> None:
    with Stage(setup) as stage:
        scenes.nothing_before_the_first_step(stage)


@pytest.mark.parametrize(
    "own_stream", [False, True], ids=["the default stream", "a stream of its own"]
)
@pytest.mark.parametrize("setup", scenes.SETUPS)
def test_a_slot_says_ready_when_the_models_stream_has_passed(
    setup: str, *, own_stream: bool
) -> None:
    with Stage(setup, own_stream=own_stream) as stage:
        scenes.ready_after_the_model(stage)


def test_a_slot_says_ready_when_the_copy_is_complete() -> None:
    with Stage("through host memory") as stage:
        scenes.ready_after_the_copy(stage)


@pytest.mark.parametrize(
    "own_stream", [False, True], ids=["the default stream", "a stream of its own"]
)
def test_a_slot_reports_tokens_when_the_models_stream_has_passed_their_step(
    *, own_stream: bool
) -> None:
    with Stage("direct", own_stream=own_stream) as stage:
        scenes.progress_after_the_model(stage)


@pytest.mark.parametrize("setup", scenes.SETUPS)
def test_nothing_is_read_into_blocks_that_the_model_may_still_write(setup: str) -> None:
    with Stage(setup) as stage:
        scenes.reads_after_the_model(stage)


@pytest.mark.parametrize("setup", scenes.SETUPS)
def test_a_load_is_reported_when_the_relayouts_stream_has_passed(setup: str) -> None:
    with Stage(setup) as stage:
        scenes.the_model_after_the_relayout(stage)


@pytest.mark.parametrize("setup", scenes.SETUPS)
def test_blocks_of_a_failed_load_are_named_until_the_relayouts_stream_has_passed(
    setup: str,
) -> None:
    with Stage(setup) as stage:
        scenes.blocks_after_the_relayout(stage)


@pytest.mark.parametrize("setup", ["direct", "staged", "mapped"])
def test_blocks_are_named_until_then_also_where_the_launch_has_raised(
    setup: str,
) -> None:
    with Stage(setup) as stage:
        scenes.blocks_after_a_launch_that_raised(stage)


@pytest.mark.parametrize("setup", ["direct", "staged", "mapped"])
@pytest.mark.parametrize(
    "scene",
    [scenes.streamed_reads_after_the_model, scenes.streamed_report_after_the_relayout],
)
def test_so_it_is_with_prompts_that_are_read_while_they_are_computed(
    setup: str, scene: Callable[[Stage], None]
) -> None:
    with Stage(setup) as stage:
        scene(stage)


def test_a_wave_is_read_while_the_last_one_is_put_in_place() -> None:
    with Stage("staged") as stage:
        scenes.the_next_read_under_the_relayout(stage)
