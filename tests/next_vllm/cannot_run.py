"""Tests that cannot run on the next vLLM's Python files over older compiled ones, and their errors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CannotRun:
    """Tests that fail in this environment, for no fault of kvferry's.

    Attributes:
        tests: the beginning of their ids.
        error: part of the first line of each one's error.
        why: what this environment lacks.
    """

    tests: str
    error: str
    why: str


CANNOT_RUN: tuple[CannotRun, ...] = ()
