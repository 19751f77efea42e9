"""The correlation value: a client's own name for its request, which vLLM 0.32 passes to the scheduler of both engines.

Routers assign their own request ids. A client that wants to find its request again sends a value in
`vllm_xargs.kvferry_correlation`, or in a header that `correlation_middleware` copies there. It names requests in
timelines and logs and has no other effect: any client can send any value, and several requests may have the same one.

Sources in the headers of an HTTP request:

X-Correlation-Id     the value of that header
baggage:request-id   the member `request-id` of W3C Baggage, a header that vllm-router forwards while it drops others
traceparent          an ordinary header, which is forwarded too
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from kvferry.protocol.errors import InvalidCorrelation
from kvferry.scheduler.state.counters import Counters

if TYPE_CHECKING:
    from vllm.v1.request import Request


logger = logging.getLogger(__name__)

CORRELATION_ARG = "kvferry_correlation"
"""The key of the value in a request's `vllm_xargs`."""
MAX_CORRELATION = 128

_VALUE = re.compile(r"[!#-\[\]-~]+")


def check_correlation(value: object) -> str:
    """Return the value if it may be stored and shown.

    Raises:
        InvalidCorrelation: it is not a text of 1 to 128 printable ASCII characters without space, `"` and `\\`.
    """
    if isinstance(value, str) and len(value) <= MAX_CORRELATION and _VALUE.fullmatch(value):
        return value
    expected = f'1 to {MAX_CORRELATION} printable ASCII characters, none of them a space, " or \\'
    raise InvalidCorrelation(CORRELATION_ARG, value, expected)


def read_correlation(extra_args: Mapping[str, Any] | None) -> str | None:
    """The value in a request's extra arguments; None if there is none.

    Raises:
        InvalidCorrelation: the value is not valid.
    """
    if not extra_args or CORRELATION_ARG not in extra_args:
        return None
    return check_correlation(extra_args[CORRELATION_ARG])


def correlation_of(request: Request) -> str | None:
    """The correlation value of a request; None if there is none.

    Raises:
        InvalidCorrelation: the value is not valid.
    """
    params = request.sampling_params
    return read_correlation(params.extra_args) if params is not None else None


class Correlations:
    """Reads the values of requests. Invalid ones are dropped and counted; the first one is also logged."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def of(self, request: Request) -> str | None:
        """The request's value; None if there is no valid one. Never raises."""
        try:
            return correlation_of(request)
        except InvalidCorrelation as invalid:
            if not self._counters.total("dropped_correlations"):
                logger.warning("req=%s: %s; dropped; further ones are not logged", request.request_id, invalid)
            self._counters.add("dropped_correlations")
            return None


HEADER_VARIABLE = "KVFERRY_CORRELATION_HEADER"
_BAGGAGE = "baggage"
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")

Headers = Iterable[tuple[bytes, bytes]]
"""Headers as in ASGI: names are lower case."""


@dataclass(frozen=True, slots=True)
class CorrelationSource:
    """A header, or one member of the header `baggage`.

    Attributes:
        header: name in lower case.
        member: member of the baggage; None for the whole header.
    """

    header: bytes
    member: str | None = None

    @classmethod
    def parse(cls, text: str) -> CorrelationSource:
        """Parse a header's name or `baggage:KEY`.

        Raises:
            InvalidCorrelation: the text is neither.
        """
        header, colon, member = text.partition(":")
        is_member = colon and header.lower() == _BAGGAGE and _TOKEN.fullmatch(member)
        if not _TOKEN.fullmatch(header) or (colon and not is_member):
            raise InvalidCorrelation(HEADER_VARIABLE, text, "the name of a header, or `baggage:KEY`")
        return cls(header.lower().encode(), member if colon else None)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> CorrelationSource:
        """The source that `KVFERRY_CORRELATION_HEADER` names.

        Raises:
            InvalidCorrelation: it is empty or cannot be the name of a header.
        """
        return cls.parse(environment.get(HEADER_VARIABLE, ""))

    def value(self, headers: Headers) -> str | None:
        """The value of the first header that has one; None if no header has one.

        Raises:
            InvalidCorrelation: the value is not valid.
        """
        for name, raw in headers:
            if name == self.header:
                text = raw.decode("latin-1").strip()
                found = text if self.member is None else _member(text, self.member)
                if found:
                    return check_correlation(found)
        return None


def _member(baggage: str, wanted: str) -> str | None:
    for entry in baggage.split(","):
        key, _, value = entry.partition(";")[0].partition("=")
        if key.strip() == wanted:
            return unquote(value.strip())
    return None
