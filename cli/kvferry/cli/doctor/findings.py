"""The findings of checks."""

from __future__ import annotations

import enum
from dataclasses import dataclass


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
