"""Triton's interpreter, on the device's memory itself: it would copy every argument to the host and back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
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
        if callable(self.grid):
            self.grid = _with_changed_tensors(self.grid, interpreter._implicit_cvt)
        with one_at_a_time:
            run(self, *arguments, **keywords)
        graphs.note(lambda: launch(self, *arguments, **keywords))

    executor.__call__ = launch
    # The interpreter would try every configuration for minutes; the first is as good.
    autotuner.Autotuner._bench = lambda *_arguments, **_keywords: [0.0, 0.0, 0.0]
    for name in ("gdc_wait", "gdc_launch_dependents"):
        setattr(cuda, name, _nothing)


def _with_changed_tensors(grid: Callable[..., Any], pointer: Callable[..., Any]) -> Any:
    """vLLM's grid of a convolution puts other tensors in place of the kernel's; the interpreter wants pointers."""

    def changed(arguments: dict[str, Any]) -> Any:
        found = grid(arguments)
        tensors = {name: one for name, one in arguments.items() if isinstance(one, torch.Tensor)}
        arguments.update({name: pointer(tensor) for name, tensor in tensors.items()})
        return found

    return changed


def _as_they_are(
    _executor: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    return list(arguments), keywords


def _nothing(*_arguments: Any, **_keywords: Any) -> None:
    pass
