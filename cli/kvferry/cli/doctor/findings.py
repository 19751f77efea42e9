"""The findings of checks."""

from __future__ import annotations

from dataclasses import dataclass

MARKS = {"ok": "green", "look": "yellow", "broken": "bold red", "not done": "dim"}
"""The severities of a finding, with their colours. Only `broken` makes the exit status 1."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table.

    Attributes:
        check: name of what was checked; where it is empty, that of the check.
        mark: one of `MARKS`.
        found: the result of a check, or why it could not be made.
        do: the command or change that helps; never empty if the mark is `look` or `broken`.
    """

    check: str
    mark: str
    found: str
    do: str = ""


def ok(found: str, check: str = "") -> Finding:
    """Nothing to do."""
    return Finding(check, "ok", found)


def look(found: str, do: str, check: str = "") -> Finding:
    """It works, but slower than possible, or not in every situation."""
    return Finding(check, "look", found, do)


def broken(found: str, do: str, check: str = "") -> Finding:
    """An engine would not start, or no prompt would be handed over."""
    return Finding(check, "broken", found, do)


def not_done(reason: str, check: str = "") -> Finding:
    """The check could not be made here."""
    return Finding(check, "not done", reason)
