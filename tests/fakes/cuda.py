"""A stand-in for what kvferry uses of `torch.cuda`: it records every call, and the rules of CUDA that a call breaks.

    cuda = FakeCuda()
    producer, consumer = rig.pair(device=cuda.device)
    cuda.phase = Phase.SERVING       # the caches are registered: nothing may wait for the device any more
    model = cuda.current_stream()
    model.hold()                     # … what is launched there stands still
    model.release()
    cuda.check()

Device memory is the host's (`tests.fakes.cuda_memory`). Each thread has a current device, 0 until it sets another one,
and streams are carried out in their order: at once, or, if the device is late, one piece of work for each query of an
event behind it. So whatever does not wait for the device finds the bytes of before.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from kvferry.worker.device import CudaStream

DEFAULT_STREAM = "default"
ALREADY_REGISTERED, NOT_REGISTERED = 712, 713
"""CUDA's errors."""


class Phase(enum.Enum):
    """What the engine does. CUDA graphs are captured after the caches have been registered, before the first step."""

    REGISTERING = enum.auto()
    CAPTURING = enum.auto()
    SERVING = enum.auto()
    CLOSING = enum.auto()


class Rule(enum.Enum):
    """What a call may break."""

    DEVICE = "a thread uses CUDA without having set its device"
    CONTEXT = "a thread calls the fabric without a CUDA context"
    DEFAULT_STREAM = "work on the default stream"
    WAITS = "a thread waits for the device while the engine serves"
    UNRECORDED = "an event is queried before it was recorded"
    CAPTURE = "a call while graphs are captured"
    FIRST_USE = "something of CUDA is made after the caches were registered"
    MEMORY = "memory is used that work on another stream may still use"
    ADDRESS = "a kernel leaves the memory that it may use"


class Call(NamedTuple):
    """One call: of what, by which thread, with which current device, on which stream."""

    name: str
    thread: str
    device: int
    stream: str


class FakeCuda:
    """One GPU of a host; the thread that makes the stand-in is the engine's, which has set it.

    Args:
        index: of the GPU.
        is_late: see the module.

    Attributes:
        device: the port to it.
        calls: in their order, those that set a device apart.
        broken: the rules that were broken, each with the call.
        asked: queries of events, by the stream that they were recorded on.
        streams: kvferry's.
        registered: host memory that is registered now, length by address.
        host_error: what `cudaHostRegister` returns if nothing else is wrong; 0 for success.
    """

    def __init__(self, index: int = 1, *, is_late: bool = False) -> None:
        from tests.fakes.cuda_memory import FakeDevice

        self.where, self.is_late, self.phase = (
            torch.device("cuda", index),
            is_late,
            Phase.REGISTERING,
        )
        self.calls: list[Call] = []
        self.broken: list[tuple[Rule, Call]] = []
        self.asked: Counter[str] = Counter()
        self.registered: dict[int, int] = {}
        self.host_error = 0
        self.lock = threading.RLock()
        self._local = threading.local()
        self._default = FakeStream(self, DEFAULT_STREAM)
        self._models: list[FakeStream] = []
        self.streams: list[FakeStream] = []
        self.device = FakeDevice(self)
        self._local.device, self._local.is_set, self._local.has_context = (
            index,
            True,
            True,
        )

    # For tests.

    def check(self) -> None:
        """No rule was broken."""
        found = [f"{rule.value}: {call}" for rule, call in dict.fromkeys(self.broken)]
        assert not found, "\n".join(found)

    def rules(self) -> set[Rule]:
        """Those that were broken."""
        return {rule for rule, _ in self.broken}

    def names(self) -> list[str]:
        """The calls' names."""
        return [call.name for call in self.calls]

    def launch(self, work: Callable[[], object]) -> None:
        """The model's work, on the calling thread's current stream."""
        self._current.add(work)

    def model_stream(self) -> FakeStream:
        """A stream of the engine's."""
        self._models.append(FakeStream(self, "model"))
        return self._models[-1]

    def finish(self) -> None:
        """The device finishes everything."""
        for stream in (self._default, *self._models, *self.streams):
            stream.release()
            stream.run()

    # What torch has.

    def set_device(self, device: torch.device) -> None:
        index = device.index or 0
        if index != getattr(self._local, "device", 0):  # torch calls CUDA only then
            self._local.device, self._local.has_context = index, True
        self._local.is_set = index == self.where.index

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        return self._current

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802 (torch's name)
        self.record("Stream", makes=True)
        self.streams.append(FakeStream(self, f"stream {len(self.streams) + 1}"))
        return self.streams[-1]

    def Event(self) -> FakeEvent:  # noqa: N802 (torch's name)
        return FakeEvent(self)

    @contextlib.contextmanager
    def stream(self, stream: CudaStream) -> Iterator[None]:
        before, self._local.stream = self._current, stream
        try:
            yield
        finally:
            self._local.stream = before

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:  # noqa: N802 (CUDA's name)
        self.record("cudaHostRegister", makes=True, waits=True)
        if any(
            start < address + length and address < start + of
            for start, of in self.registered.items()
        ):
            return ALREADY_REGISTERED
        if not self.host_error:
            self.registered[address] = length
        return self.host_error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 (CUDA's name)
        self.record("cudaHostUnregister", waits=True)
        return 0 if self.registered.pop(address, None) else NOT_REGISTERED

    # For the parts of the stand-in.

    def record(
        self,
        name: str,
        stream: FakeStream | None = None,
        *,
        works: bool = False,
        waits: bool = False,
        makes: bool = False,
        breaks: Rule | None = None,
    ) -> None:
        """A call of the current thread.

        Args:
            works: it puts work on the stream; waits: it returns when the device is done; makes: it makes something that
                lasts, or uses it for the first time.
            breaks: a rule that it breaks in any case.
        """
        stream = stream or self._current
        is_served, is_later = (
            self.phase is Phase.SERVING,
            self.phase in (Phase.CAPTURING, Phase.SERVING),
        )
        verdicts = {
            Rule.DEVICE: not getattr(self._local, "is_set", False),
            Rule.DEFAULT_STREAM: works and is_later and stream is self._default,
            Rule.WAITS: waits and is_served,
            Rule.CAPTURE: self.phase is Phase.CAPTURING,
            Rule.FIRST_USE: makes and is_later,
        }
        call = Call(
            name,
            threading.current_thread().name,
            getattr(self._local, "device", 0),
            stream.name,
        )
        with self.lock:
            self.calls.append(call)
            self.broken += [
                (rule, call)
                for rule, is_broken in verdicts.items()
                if is_broken or rule is breaks
            ]
            self.broken += [
                (rule, call) for rule in {breaks} - verdicts.keys() if rule is not None
            ]
        self._local.has_context = True

    def has_context(self) -> bool:
        """Whether the calling thread has one."""
        return getattr(self._local, "has_context", False)

    @property
    def _current(self) -> FakeStream:
        found: FakeStream = getattr(self._local, "stream", self._default)
        return found


class FakeStream:
    """Work in order; `hold` makes it stand still."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda, self.name = cuda, name
        self._work: deque[Callable[[], object]] = deque()
        self._is_held = False

    def query(self) -> bool:
        self.cuda.record("stream query", self)
        return not self._work

    def synchronize(self) -> None:
        self.cuda.record("synchronize", self, waits=True)
        self.run()

    def add(self, work: Callable[[], object]) -> None:
        """Launch work."""
        with self.cuda.lock:
            self._work.append(work)
        if not self.cuda.is_late:
            self.run()

    def run(self, most: float = float("inf")) -> None:
        """Carry out so many pieces of work, unless the stream is held."""
        with self.cuda.lock:
            while self._work and not self._is_held and most > 0:
                self._work.popleft()()
                most -= 1

    def hold(self) -> None:
        """Nothing is carried out any more."""
        with self.cuda.lock:
            self._is_held = True

    def release(self) -> None:
        """It goes on."""
        with self.cuda.lock:
            self._is_held = False
        if not self.cuda.is_late:
            self.run()


class FakeEvent:
    """As in CUDA, one that was never recorded counts as passed."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._stream: FakeStream | None = None
        self._is_passed = True

    def record(self, stream: CudaStream) -> None:
        assert isinstance(stream, FakeStream)
        self._cuda.record("record", stream)
        self._stream, self._is_passed = stream, False
        stream.add(self._pass)

    def query(self) -> bool:
        stream = self._stream
        self._cuda.record(
            "query", stream, breaks=Rule.UNRECORDED if stream is None else None
        )
        is_passed = self._is_passed
        if stream is not None:
            self._cuda.asked[stream.name] += 1
            if not is_passed and self._cuda.is_late:
                stream.run(1)
        return is_passed

    def _pass(self) -> None:
        self._is_passed = True
