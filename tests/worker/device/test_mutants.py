"""Each rule of CUDA broken in the product, one at a time: a scene must notice it.

Where a rule is named, the stand-in must have recorded that it was broken; else the scene's own outcome must be wrong:
a slot that says READY too early, a load that is reported too early, wrong bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvferry.protocol.errors import LocalProtocolError
from kvferry.worker.device import HOST, Device, _EventMark
from kvferry.worker.leases import LeaseTable, ServedStream
from kvferry.worker.loads.load import Load
from kvferry.worker.loads.runner import LoadRunner
from kvferry.worker.relayout.triton_relayout import TritonRelayout
from kvferry.worker.staging import staged_reads
from kvferry.worker.staging.host_buffer import HostMirror
from kvferry.worker.transfer_thread import TransferThread
from tests import waiting
from tests.fakes.cuda import FakeEvent, Rule
from tests.fakes.cuda_memory import FakeDevice
from tests.harness import cache_engine
from tests.worker.device import scenes
from tests.worker.device.scenes import Stage

pytest.importorskip("triton", reason="Triton is not installed")

Function = Callable[..., Any]
LATE = {"is_late": True}
REACHED = HOST.mark()


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        owner, name, make: what is replaced, and from it what takes its place.
        scene, setup, options: where it is noticed.
        rule: that it breaks; None where the outcome is wrong.
    """

    owner: Any
    name: str
    make: Callable[[Any], Any]
    scene: Callable[[Stage], None]
    setup: str = "direct"
    rule: Rule | None = None
    options: dict[str, Any] = field(default_factory=dict)


def instead(replacement: Function) -> Callable[[Function], Function]:
    return lambda _: replacement


def first(action: Function) -> Callable[[Function], Function]:
    """The action is done before the function, with the same arguments."""

    def make(function: Function) -> Function:
        def both(*args: Any, **kwargs: Any) -> Any:
            action(*args)
            return function(*args, **kwargs)

        return both

    return make


def returning(value: object) -> Callable[[Function], Function]:
    """The function does its work, and returns something else."""

    def make(function: Function) -> Function:
        def other(*args: Any, **kwargs: Any) -> Any:
            function(*args, **kwargs)
            return value

        return other

    return make


def on_the_default_stream(device: Device) -> Any:
    assert isinstance(device, FakeDevice)
    event = device.cuda.Event()
    event.record(device.cuda._default)
    return _EventMark(event.query)


def ready_at_once(hold: Function) -> Function:
    return lambda table, order, mark: hold(table, order, mark and REACHED)


def load_at_once(add: Function) -> Function:
    return lambda runner, order, mark, *rest: add(runner, order, REACHED, *rest)


def all_tokens(stream: ServedStream) -> int:
    tokens = stream.steps[-1][0] if stream.steps else 0
    stream.steps.clear()
    return tokens


def start_at_once(make: Function) -> Function:
    def made(thread: Any, *args: Any) -> None:
        make(thread, *args)
        thread._thread.start()

    return made


LIFE: dict[str, Any] = {"scene": scenes.a_whole_life, "options": LATE}
STAGED: dict[str, Any] = {**LIFE, "setup": "staged"}
MUTANTS = {
    "a thread does not set its device": Mutant(
        Device, "use", instead(lambda _: None), **LIFE, rule=Rule.DEVICE
    ),
    "a thread on GPU 0 has no context": Mutant(
        Device,
        "use",
        instead(lambda device: device._cuda.set_device(device.where)),
        scenes.a_whole_life,
        rule=Rule.CONTEXT,
        options={**LATE, "index": 0},
    ),
    "the relayout is on the default stream": Mutant(
        Device,
        "on",
        instead(lambda *_: nullcontext()),
        **STAGED,
        rule=Rule.DEFAULT_STREAM,
    ),
    "the step thread waits": Mutant(
        Device, "mark", first(Device.synchronize), **LIFE, rule=Rule.WAITS
    ),
    "the transfer thread waits": Mutant(
        FakeEvent,
        "query",
        first(lambda event: event._stream.synchronize()),
        **LIFE,
        rule=Rule.WAITS,
    ),
    "the transfer thread reads a tensor": Mutant(
        TritonRelayout,
        "try_start",
        first(lambda self, _: self._slots[0].device[0].item()),
        **STAGED,
        rule=Rule.WAITS,
    ),
    "tables are copied from memory that is not pinned": Mutant(
        FakeDevice,
        "empty_pinned",
        instead(lambda _, *shape: torch.empty(shape, dtype=torch.uint8)),
        **STAGED,
        rule=Rule.WAITS,
    ),
    "an event is not recorded": Mutant(
        Device,
        "mark",
        instead(lambda device: _EventMark(device._cuda.Event().query)),
        **LIFE,
        rule=Rule.UNRECORDED,
    ),
    "the transfer thread starts with the registration": Mutant(
        TransferThread, "__init__", start_at_once, scenes.nothing_before_the_first_step
    ),
    "the kernel is not compiled at registration": Mutant(
        TritonRelayout,
        "_warm_up",
        instead(lambda _: None),
        **STAGED,
        rule=Rule.FIRST_USE,
    ),
    "streams are made when they are needed": Mutant(
        Device,
        "on",
        instead(lambda device, _: device._cuda.stream(device.new_stream())),
        **STAGED,
        rule=Rule.FIRST_USE,
    ),
    "memory is made when it is needed": Mutant(
        TritonRelayout,
        "try_start",
        first(lambda self, _: self._device.empty(1)),
        **STAGED,
        rule=Rule.FIRST_USE,
    ),
    "new memory is used at once on another stream": Mutant(
        Device, "synchronize", instead(lambda _: None), **STAGED, rule=Rule.MEMORY
    ),
    "a mark is not on the model's stream": Mutant(
        Device, "mark", instead(on_the_default_stream), scenes.ready_after_the_model
    ),
    "READY at once": Mutant(
        LeaseTable, "hold", ready_at_once, scenes.ready_after_the_model
    ),
    "READY before the copy": Mutant(
        HostMirror,
        "try_copy",
        returning(REACHED),
        scenes.ready_after_the_copy,
        "through host memory",
    ),
    "tokens are reported at once": Mutant(
        ServedStream,
        "take_tokens",
        instead(all_tokens),
        scenes.progress_after_the_model,
    ),
    "a load does not wait for the model": Mutant(
        LoadRunner, "add", load_at_once, scenes.reads_after_the_model
    ),
    "a streamed load does not wait for the model": Mutant(
        LoadRunner, "add", load_at_once, scenes.streamed_reads_after_the_model
    ),
    "a streamed load does not wait for the relayout": Mutant(
        TritonRelayout,
        "try_start",
        returning(REACHED),
        scenes.streamed_report_after_the_relayout,
        "staged",
    ),
    "a table is written again before the device has read it": Mutant(
        TritonRelayout,
        "try_start",
        instead(lambda self, table: self._launch(table, self._slots[0])),
        **STAGED,
    ),
    "a wave's memory is read into before it is put in place": Mutant(
        staged_reads._Flight,
        "is_in_place",
        instead(lambda flight: flight.mark is not None),
        **STAGED,
    ),
    "the model does not wait for the relayout": Mutant(
        TritonRelayout,
        "try_start",
        returning(REACHED),
        scenes.the_model_after_the_relayout,
        "staged",
    ),
    "the model does not wait for what is copied from mapped memory": Mutant(
        TritonRelayout,
        "try_start",
        returning(REACHED),
        scenes.the_model_after_the_relayout,
        "mapped",
    ),
    "the model does not wait for the zeroing": Mutant(
        TritonRelayout,
        "try_start",
        returning(REACHED),
        scenes.the_model_after_the_relayout,
    ),
    "blocks of a failed load are free at once": Mutant(
        Load, "settle", returning(True), scenes.blocks_after_the_relayout, "staged"
    ),
    "one wave at a time": Mutant(
        staged_reads,
        "WAVES_PER_LOAD",
        lambda _: 1,
        scenes.the_next_read_under_the_relayout,
        "staged",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_fault_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        mutant.owner, mutant.name, mutant.make(getattr(mutant.owner, mutant.name))
    )
    rules, failed = set[Rule](), False
    with (
        contextlib.suppress(AssertionError, LocalProtocolError),
        Stage(mutant.setup, **mutant.options) as stage,
    ):
        # What a fault prevents does not come. What comes before has its full time: a wait that is over too early
        # there fails without the scene.
        monkeypatch.setattr(waiting, "LONGEST_S", 2.0)
        monkeypatch.setattr(cache_engine, "IDLE_WITHIN_S", 0.5)
        try:
            mutant.scene(stage)
        except AssertionError:
            failed = True
        rules = stage.rules()
    assert failed
    assert mutant.rule is None or mutant.rule in rules
