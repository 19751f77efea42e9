"""Two engines, each on a fake GPU of its own, whose steps the test runs. Each scene fails if a rule is broken.

A scene takes a `Stage`, which is open within `with Stage(…) as stage`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from kvferry.protocol.orders import FailureReason
from kvferry.protocol.slots import SlotState, slot_word
from kvferry.protocol.slots import epoch_from_text as epoch_of
from kvferry.worker import worker_memory
from kvferry.worker.fabric.port import Fabric
from kvferry.worker.relayout import triton_relayout
from kvferry.worker.settings import MappedReadsOption
from tests.fakes.cuda import FakeCuda, Phase, Rule
from tests.fakes.cuda_memory import kernels, launch_relayout, watched
from tests.fakes.ipc_driver import FakeIpcDriver
from tests.fakes.memory_fabric import MemoryFabric
from tests.harness.cache_engine import SETTINGS
from tests.harness.caches import CacheShape
from tests.harness.engine import Engine, Offer
from tests.harness.exported import slots_of
from tests.harness.rig import Rig
from tests.waiting import wait_until
from tests.worker.engines.streams import STREAMS, ServedStream

SETUPS: dict[str, dict[str, Any]] = {
    "direct": {"settings": STREAMS},
    "staged": {
        "settings": replace(STREAMS, staging_pool_bytes=8 << 10),
        "shape": CacheShape(axes="bth"),
    },
    "through host memory": {"settings": replace(SETTINGS, host_buffer=True)},
    "mapped": {
        "settings": replace(STREAMS, mapped_reads=MappedReadsOption.CUDA_IPC),
        "shape": CacheShape(axes="bth"),
    },
}
_ASKED = 20


class Stage:
    """See the module.

    Args:
        setup: one of `SETUPS`: of both engines, their layouts differ where it has a shape.
        index: of the GPUs, each on a host of its own.
        own_stream: whether the engines' models run on a stream of their own, or on the default stream.

    Attributes:
        here, there: the GPUs of the producer and of the consumer.
    """

    def __init__(
        self,
        setup: str,
        *,
        index: int = 1,
        own_stream: bool = True,
        is_late: bool = False,
    ) -> None:
        self.here, self.there = (FakeCuda(index, is_late=is_late) for _ in range(2))
        self.is_streaming = setup != "through host memory"
        self._own_stream, self._rig = (
            own_stream,
            _Rig({"P": self.here, "C": self.there}),
        )
        self._setup = SETUPS[setup]
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Stage:
        with (
            contextlib.ExitStack() as opened
        ):  # a fault at registration leaves nothing behind
            opened.enter_context(kernels())
            opened.enter_context(
                patch.object(worker_memory, "CudaIpcDriver", FakeIpcDriver)
            )
            settings = self._setup["settings"]
            is_mapped = settings.mapped_reads is MappedReadsOption.CUDA_IPC
            self.producer = self._rig.engine(
                "P", device=self.here.device, settings=settings, shared=is_mapped
            )
            self.consumer = self._rig.engine(
                "C", device=self.there.device, **self._setup
            )
            self._phase(Phase.CAPTURING)
            if self._own_stream:
                for gpu in (self.here, self.there):
                    opened.enter_context(gpu.stream(gpu.model_stream()))
            self._open = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        finally:
            self._open.close()

    @property
    def rig(self) -> Rig:
        return self._rig

    def serve(self) -> tuple[Engine, Engine]:
        """The graphs are captured; the first step comes. Returns the engines."""
        self._phase(Phase.SERVING)
        return self.producer, self.consumer

    def close(self) -> None:
        """The device finishes, and the engines end."""
        engines, self._rig.engines = self._rig.engines, []
        with contextlib.ExitStack() as ends:
            for engine in engines:
                ends.callback(engine.close)
            for gpu in (self.here, self.there):
                gpu.finish()
            for engine in engines:
                engine.wait_until_idle()
            self._phase(Phase.CLOSING)

    def check(self) -> None:
        """No rule was broken."""
        self.here.check()
        self.there.check()

    def rules(self) -> set[Rule]:
        """Those that were broken."""
        return self.here.rules() | self.there.rules()

    @contextlib.contextmanager
    def held(
        self, gpu: FakeCuda, *, model: bool
    ) -> Iterator[Callable[[Callable[[], object]], None]]:
        """The model's stream of a GPU stands still, or all of kvferry's. Gives a function that waits until its events
        have been asked for again and again, and checks that something has not happened all the same."""
        streams = [gpu.current_stream()] if model else gpu.streams
        for stream in streams:
            stream.hold()
        before = {stream.name: gpu.asked[stream.name] for stream in streams}

        def not_yet(happened: Callable[[], object]) -> None:
            wait_until(
                lambda: (
                    happened()
                    or any(
                        gpu.asked[name] > count + _ASKED
                        for name, count in before.items()
                    )
                ),
                "the device is asked",
            )
            assert not happened()

        yield not_yet
        for stream in streams:
            stream.release()

    def _phase(self, phase: Phase) -> None:
        self.here.phase = self.there.phase = phase


class _Rig(Rig):
    """A rig on the fake fabric, whose agents notice threads without a context."""

    def __init__(self, gpus: dict[str, FakeCuda]) -> None:
        super().__init__("memory")
        self._gpus = gpus

    def make_fabric(self, agent_name: str) -> Fabric:
        return watched(
            self._gpus[agent_name.partition("/")[0]],
            MemoryFabric(agent_name, self.network),
        )


def a_whole_life(stage: Stage) -> None:
    """Good loads, a streamed one that is preempted, one whose lease ends, and the end; nothing of it breaks a rule."""
    producer, consumer = stage.serve()
    for tokens in (10, 23):
        stage.rig.transfer(producer, consumer, tokens=tokens, seed=tokens)
    if stage.is_streaming:
        stream = ServedStream.begin(stage.rig, producer, consumer, tokens=30, first=5)
        stream.order()
        stream.compute(8)
        stream.until_read(12)
        stream.preempt()
        stream.compute_rest(8)
        stream.check()
        assert stream.record().restarts == 1
        stage.rig.step_until(
            lambda: stream.prefill.request_id in producer.seen.sent,
            "its blocks are free",
        )
    offer = producer.prefill(tokens=9, seed=2)
    producer.give_away(offer)
    load = consumer.load(offer.params)
    assert stage.rig.until_over(consumer, load) is FailureReason.FENCE
    stage.close()
    stage.check()


def nothing_before_the_first_step(stage: Stage) -> None:
    """The engine captures its graphs: no thread of kvferry runs, and only the engine's has used the device."""
    own = threading.current_thread().name
    assert not [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith("kvferry-transfer")
    ]
    assert {call.thread for gpu in (stage.here, stage.there) for call in gpu.calls} == {
        own
    }
    stage.check()


def word(producer: Engine, offer: Offer) -> SlotState:
    """The state that the slot of an offer shows."""
    epoch = epoch_of(offer.params.kvferry.lease_epoch)
    return next(
        state for state in SlotState if producer.word(offer) == slot_word(epoch, state)
    )


def _ready_after(stage: Stage, *, model: bool) -> None:
    producer, consumer = stage.serve()
    with stage.held(stage.here, model=model) as not_yet:
        offer = producer.prefill(tokens=10, seed=3)
        load = consumer.load(offer.params)
        not_yet(lambda: word(producer, offer) is SlotState.READY)
    assert stage.rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed=3)


def ready_after_the_model(stage: Stage) -> None:
    """READY is written when the model's stream has passed the step that completes the prompt."""
    _ready_after(stage, model=True)


def ready_after_the_copy(stage: Stage) -> None:
    """With a copy in host memory, READY is written when that is complete."""
    _ready_after(stage, model=False)


def progress_after_the_model(stage: Stage) -> None:
    """The tokens of a step are reported when the model's stream has passed the step."""
    producer, consumer = stage.serve()
    stream = ServedStream.begin(stage.rig, producer, consumer, tokens=30, first=5)
    stream.order()
    assert stream.prefill.params is not None
    slot = stream.prefill.params.kvferry.lease_slot
    progress = slots_of(producer.worker).progress
    with stage.held(stage.here, model=True) as not_yet:
        before = int(progress[slot])
        stream.compute(8)
        not_yet(lambda: int(progress[slot]) != before)
    stream.until_read(13)
    stream.compute_rest(8)
    stream.check()


def reads_after_the_model(stage: Stage) -> None:
    """Nothing is read into blocks that work launched before the load's order may still write."""
    producer, consumer = stage.serve()
    offer = producer.prefill(tokens=10, seed=3)
    with stage.held(stage.there, model=True) as not_yet:
        consumer.launch(
            lambda: consumer.caches.fill(range(1, consumer.shape.blocks), 0x77)
        )
        load = consumer.load(offer.params)
        not_yet(lambda: consumer.fabric.calls["post_data_read"])
    assert stage.rig.until_over(consumer, load) is None
    assert consumer.has_bytes(load, seed=3)


def streamed_reads_after_the_model(stage: Stage) -> None:
    """The same of a prompt that is read while it is computed."""
    producer, consumer = stage.serve()
    stream = ServedStream.begin(stage.rig, producer, consumer, tokens=30, first=5)
    with stage.held(stage.there, model=True) as not_yet:
        consumer.launch(
            lambda: consumer.caches.fill(range(1, consumer.shape.blocks), 0x77)
        )
        load = stream.order()
        stream.compute(8)
        not_yet(lambda: consumer.fabric.calls["post_data_read"])
    stream.compute_rest(8)
    assert stream.over() is None
    assert consumer.has_bytes(load, stream.prefill.seed)


def streamed_report_after_the_relayout(stage: Stage) -> None:
    """A prompt that is read while it is computed is reported when its last part is in place."""
    producer, consumer = stage.serve()
    stream = ServedStream.begin(stage.rig, producer, consumer, tokens=30, first=5)
    load = stream.order()
    stream.compute(8)
    stream.until_read(12)

    def is_over() -> bool:
        consumer.step()
        return consumer.seen.is_over(load.request_id)

    with stage.held(stage.there, model=False) as not_yet:
        stream.compute(17)
        not_yet(is_over)
    stream.prefill.end()
    stream.check()


def the_model_after_the_relayout(stage: Stage) -> None:
    """A load is reported when the relayout has put everything in place: what the engine launches then reads it."""
    producer, consumer = stage.serve()

    def is_over() -> bool:
        consumer.step()
        return consumer.seen.is_over(load.request_id)

    with stage.held(stage.there, model=False) as not_yet:
        load = consumer.load(producer.prefill(tokens=10, seed=3).params)
        not_yet(is_over)
    assert stage.rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed=3)


def blocks_after_the_relayout(stage: Stage) -> None:
    """A load that misses its deadline keeps its blocks while the relayout may still write them."""
    producer, consumer = stage.serve()
    with stage.held(stage.there, model=False) as not_yet:
        load = consumer.load(producer.prefill(tokens=10, seed=3).params)
        not_yet(lambda: consumer.seen.is_over(load.request_id))
        consumer.set_timeouts(load_s=0.0)
        assert stage.rig.until_over(consumer, load) is FailureReason.DEADLINE
        assert load.request_id in consumer.seen.alive
    stage.rig.step_until(
        lambda: load.request_id not in consumer.seen.alive, "its blocks are safe"
    )


def blocks_after_a_launch_that_raised(stage: Stage) -> None:
    """A load whose launch raised keeps its blocks too: what was launched before the error may still write them."""
    producer, consumer = stage.serve()

    def launch_and_raise(**what: Any) -> None:
        launch_relayout(**what)
        raise RuntimeError("of the test")

    with (
        stage.held(stage.there, model=False),
        patch.object(triton_relayout, "launch_relayout", launch_and_raise),
    ):
        load = consumer.load(producer.prefill(tokens=10, seed=3).params)
        assert stage.rig.until_over(consumer, load) is FailureReason.TRANSFER
        assert load.request_id in consumer.seen.alive
    stage.rig.step_until(
        lambda: load.request_id not in consumer.seen.alive, "its blocks are safe"
    )


def the_next_read_under_the_relayout(stage: Stage) -> None:
    """The second wave is read while the first is put in place, and no third one, which would need its memory."""
    producer, consumer = stage.serve()
    with stage.held(stage.there, model=False) as not_yet:
        load = consumer.load(producer.prefill(tokens=64, seed=3).params)
        wait_until(
            lambda: consumer.fabric.calls["post_data_read"] == 2,
            "the second wave is read",
        )
        not_yet(lambda: consumer.fabric.calls["post_data_read"] > 2)
    assert stage.rig.until_over(consumer, load) is None
    consumer.check_bytes(load, seed=3)
