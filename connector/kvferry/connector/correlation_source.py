"""Where in the headers of an HTTP request a client's correlation value is, and its reading.

X-Correlation-Id     the value of that header
baggage:request-id   the member `request-id` of W3C Baggage, a header that vllm-router passes on where it drops others
traceparent          a header like any other, and passed on too
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from kvferry.connector.correlation import check_correlation
from kvferry.protocol.errors import InvalidCorrelation

HEADER_VARIABLE = "KVFERRY_CORRELATION_HEADER"
_BAGGAGE = "baggage"
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")

Headers = Iterable[tuple[bytes, bytes]]
"""As ASGI has them: names are lower case."""


@dataclass(frozen=True, slots=True)
class CorrelationSource:
    """A header, or one member of the header `baggage`.

    Attributes:
        header: lower case.
        member: None for the whole header.
    """

    header: bytes
    member: str | None = None

    @classmethod
    def parse(cls, text: str) -> CorrelationSource:
        """A header's name, or `baggage:KEY`.

        Raises:
            InvalidCorrelation: it is neither.
        """
        header, colon, member = text.partition(":")
        is_member = colon and header.lower() == _BAGGAGE and _TOKEN.fullmatch(member)
        if not _TOKEN.fullmatch(header) or (colon and not is_member):
            raise InvalidCorrelation(HEADER_VARIABLE, text, "the name of a header, or `baggage:KEY`")
        return cls(header.lower().encode(), member if colon else None)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> CorrelationSource:
        """What `KVFERRY_CORRELATION_HEADER` names.

        Raises:
            InvalidCorrelation: it names nothing, or nothing that can be a header.
        """
        return cls.parse(environment.get(HEADER_VARIABLE, ""))

    def value(self, headers: Headers) -> str | None:
        """The value of the first header that has one; None where there is none.

        Raises:
            InvalidCorrelation: it cannot be used.
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
