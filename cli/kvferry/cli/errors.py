"""What is wrong with a command line, as errors that name the field, the value and what is accepted.

InputError (`kvferry.protocol.errors`)
├── InvalidArgument   an argument or option
├── InvalidShortForm  an engine written as `layers=32,heads=8,…`
└── InvalidRequest    the file of `--copies`
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from kvferry.protocol.errors import InputError


class InvalidArgument(InputError):
    """An argument or option that cannot be used."""

    what = "argument"


class InvalidShortForm(InputError):
    """A short form of an engine that cannot be used."""

    what = "short form"


class InvalidRequest(InputError):
    """A request for `--copies` that cannot be used."""

    what = "request"


def one_of(found: str, accepted: Iterable[str]) -> str:
    """`did you mean …? one of …`, the guess only where something comes close."""
    names = list(accepted)
    near = difflib.get_close_matches(found.lower(), [name.lower() for name in names], n=1)
    begun = [name for name in names if len(found) > 2 and name.lower().startswith(found.lower())]
    guess = begun[0] if begun else next((name for name in names if near and name.lower() == near[0]), None)
    return f"{f'did you mean {guess}? ' if guess else ''}one of {', '.join(names)}"
