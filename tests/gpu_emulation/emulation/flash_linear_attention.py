"""The gated delta net's kernels call some of Triton's functions by names of their own, which Triton's interpreter,
that exchanges those functions while a kernel runs, does not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl


def install(operators: Any) -> None:
    """Look functions up when they are called."""
    for name in ("exp", "exp2", "log", "log2"):
        setattr(operators, name, _looked_up(name))


def _looked_up(name: str) -> Callable[..., Any]:
    return lambda *arguments, **keywords: getattr(tl, name)(*arguments, **keywords)
