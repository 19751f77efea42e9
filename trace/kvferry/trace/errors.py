"""The error of kvferry.trace: an `InputError` (`kvferry.protocol.errors`)."""

from __future__ import annotations

from kvferry.protocol.errors import InputError


class InvalidTrace(InputError):
    """Recorded files that cannot be used at all. What is only damaged is read as far as possible, and counted."""

    what = "trace"
