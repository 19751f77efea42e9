"""Triton's interpreter, on the device's memory itself: it would copy every argument to the host and back."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from triton.language.extra import cuda
from triton.runtime import autotuner

from tests.gpu_emulation.emulation import graphs


def install(interpreter: ModuleType | Any) -> None:
    """Leave arguments where they are; one kernel at a time, and none begins before another has ended."""
    executor = interpreter.GridExecutor
    executor._init_args_hst = _as_they_are
    executor._restore_args_dev = _nothing
    run = executor.__call__
    # The interpreter's place in the grid is a global, and kvferry launches from a thread of its own.
    one_at_a_time = threading.RLock()

    def launch(self: Any, *arguments: Any, **keywords: Any) -> None:
        # A grid is asked with the arguments as they were given: vLLM's grid of a convolution looks
        # at their tensors, and puts others in their place. The interpreter would show it pointers.
        names = inspect.getfullargspec(self.fn).args
        own = {name: value for name, value in keywords.items() if name in names}
        named = inspect.getcallargs(self.fn, *arguments, **own)
        if callable(self.grid):
            self.grid = self.grid(named)
        with one_at_a_time:
            run(self, **named)
        graphs.note(lambda: launch(self, **named))

    executor.__call__ = launch
    _give_kernels_indices(interpreter)
    # The interpreter would try every configuration for minutes; the first is as good.
    autotuner.Autotuner._bench = lambda *_arguments, **_keywords: [0.0, 0.0, 0.0]
    for name in ("gdc_wait", "gdc_launch_dependents"):
        setattr(cuda, name, _nothing)


def _give_kernels_indices(interpreter: Any) -> None:
    """In a kernel the index of a loop is a tensor, with its methods; in the interpreter it is a number."""

    class Index(int):
        def to(self, dtype: Any) -> Any:
            return interpreter._implicit_cvt(int(self)).to(dtype)

    def indices(*bounds: Any) -> Iterator[Index]:
        return map(Index, range(*bounds))

    interpreter.range = indices  # what it puts in the place of `tl.range` asks for it
    rewrite = interpreter.InterpretedFunction.rewrite

    def rewrite_with_indices(self: Any) -> Any:
        self.fn.__globals__["range"] = indices
        return rewrite(self)

    interpreter.InterpretedFunction.rewrite = rewrite_with_indices


def _as_they_are(
    _executor: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    return list(arguments), keywords


def _nothing(*_arguments: Any, **_keywords: Any) -> None:
    pass
