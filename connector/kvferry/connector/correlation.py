"""What a client calls its request, read where vLLM 0.32 lets it through to the scheduler of both engines.

Routers give requests ids of their own. A client that wants to find its request again sends a value in
`vllm_xargs.kvferry_correlation`, or in a header that `correlation_middleware` puts there. It names requests in
timelines and logs, and decides nothing: anybody can send any value, and several requests may carry one.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvferry.protocol.errors import InvalidCorrelation
from kvferry.scheduler.state.counters import Tally

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

CORRELATION_ARG = "kvferry_correlation"
"""The key of the value in a request's `vllm_xargs`."""
MAX_CORRELATION = 128

_VALUE = re.compile(r"[!#-\[\]-~]+")


def check_correlation(value: object) -> str:
    """The value, if it is one that may be stored and shown.

    Raises:
        InvalidCorrelation: it is no text of 1 to 128 printable ASCII characters without space, `"` and `\\`.
    """
    if isinstance(value, str) and len(value) <= MAX_CORRELATION and _VALUE.fullmatch(value):
        return value
    expected = f'1 to {MAX_CORRELATION} printable ASCII characters, none of them a space, " or \\'
    raise InvalidCorrelation(CORRELATION_ARG, value, expected)


def read_correlation(extra_args: Mapping[str, Any] | None) -> str | None:
    """The value in a request's extra arguments; None where there is none.

    Raises:
        InvalidCorrelation: there is one, and it cannot be used.
    """
    if not extra_args or CORRELATION_ARG not in extra_args:
        return None
    return check_correlation(extra_args[CORRELATION_ARG])


def correlation_of(request: Request) -> str | None:
    """What a client calls a request; None where there is no value.

    Raises:
        InvalidCorrelation: there is one, and it cannot be used.
    """
    params = request.sampling_params
    return read_correlation(params.extra_args) if params is not None else None


class Correlations:
    """Reads the values of requests. One that cannot be used is dropped and counted; the first is logged too."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def of(self, request: Request) -> str | None:
        """The request's value; None where there is none that can be used. Never raises."""
        try:
            return correlation_of(request)
        except InvalidCorrelation as invalid:
            if not self._tally.total("dropped_correlations"):
                logger.warning("req=%s: %s; dropped, and so are others without a word", request.request_id, invalid)
            self._tally.add("dropped_correlations")
            return None
