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
        found: the result of a check, or why it could not be made.
        do: the command or change that helps; never empty if the mark is `LOOK` or `BROKEN`.
        check: name of what was checked; where it is empty, that of the check.
    """

    mark: Mark
    found: str
    do: str = ""
    check: str = ""


def ok(found: str, check: str = "") -> Finding:
    """Nothing to do."""
    return Finding(Mark.OK, found, "", check)


def look(found: str, do: str, check: str = "") -> Finding:
    """It works, but slower than possible, or not in every situation."""
    return Finding(Mark.LOOK, found, do, check)


def broken(found: str, do: str, check: str = "") -> Finding:
    """An engine would not start, or no prompt would be handed over."""
    return Finding(Mark.BROKEN, found, do, check)


def not_done(reason: str, check: str = "") -> Finding:
    """The check could not be made here."""
    return Finding(Mark.NOT_DONE, reason, "", check)
