"""The findings of checks, and a placeholder for facts that could not be gathered."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

_Fact = TypeVar("_Fact")


class Mark(enum.Enum):
    """Severity of a finding. Only `BROKEN` makes the exit status 1."""

    OK = "ok"
    LOOK = "look"
    BROKEN = "broken"
    NOT_DONE = "not done"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table.

    Attributes:
        check: name of the check.
        found: its result, or why it could not be made.
        do: the command or change that helps; never empty if the mark is `LOOK` or `BROKEN`.
    """

    check: str
    mark: Mark
    found: str
    do: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Stands for a fact that could not be gathered."""

    reason: str


def ok(check: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(check, Mark.OK, found)


def look(check: str, found: str, do: str) -> Finding:
    """It works, but slower than possible, or not in every situation."""
    return Finding(check, Mark.LOOK, found, do)


def broken(check: str, found: str, do: str) -> Finding:
    """An engine would not start, or no prompt would be handed over."""
    return Finding(check, Mark.BROKEN, found, do)


def not_done(check: str, reason: str) -> Finding:
    """The check could not be made here."""
    return Finding(check, Mark.NOT_DONE, reason)


def gathered(gather: Callable[[], _Fact]) -> _Fact | Unknown:
    """The fact, or why it could not be gathered: one failing check must not end the others."""
    try:
        return gather()
    except Exception as error:  # noqa: BLE001 - any error of one check; the others are still made
        return Unknown(f"{type(error).__name__}: {error}")


def judged(
    check: str, fact: _Fact | Unknown, judge: Callable[[_Fact], Finding | Iterable[Finding]]
) -> tuple[Finding, ...]:
    """The findings about a fact; one with `NOT_DONE` if it is unknown."""
    if isinstance(fact, Unknown):
        return (not_done(check, fact.reason),)
    found = judge(fact)
    return (found,) if isinstance(found, Finding) else tuple(found)
