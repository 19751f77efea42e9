"""The errors of a fabric, all of them `KvferryError`s that carry `operation`, `peer` and `reason`:

    FabricError
    ├── FabricClosed              the fabric was used after `close`
    ├── FabricUnavailable         the library, its backend or the registration of memory failed
    ├── InvalidMetadata           a peer's metadata cannot be used (it is untrusted input)
    ├── InvalidFabricRequest      the arguments do not fit together; nothing was posted
    │   └── DescriptorOutOfRange  … rows that leave the registered regions of their owner
    ├── PeerLost                  the peer is gone: it died, was removed, or was never added
    └── TransferFailed            a transfer ended without its data; the peer may be well

Bugs, and exceptions of NIXL that the fabric does not translate, are internal errors: the transfer thread logs them and
continues with its other work.
"""

from __future__ import annotations

import logging

from kvferry.protocol.errors import KvferryError
from kvferry.protocol.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)


class FabricError(KvferryError):
    """Base of the errors that a fabric raises.

    Args:
        operation: the operation that failed, e.g. `post read`.
        reason: what went wrong, in words.
        peer: the peer of the operation, where there is one.
    """

    def __init__(self, operation: str, reason: str, peer: str | None = None) -> None:
        self.operation = operation
        self.reason = reason
        self.peer = peer
        text = f"{operation}: {reason}"
        if peer is not None:
            text += f" (peer={peer})"
        super().__init__(text)


class FabricClosed(FabricError):
    """The fabric was used after `close`."""


class FabricUnavailable(FabricError):
    """The library, its backend or the registration of memory failed."""


class InvalidMetadata(FabricError):
    """A peer's metadata cannot be used."""


class InvalidFabricRequest(FabricError):
    """Rows, indices or a handle that do not fit together; nothing was posted."""


class DescriptorOutOfRange(InvalidFabricRequest):
    """Rows leave the registered regions of their owner."""


class PeerLost(FabricError):
    """The peer is gone: it died, was removed, or was never added."""


class TransferFailed(FabricError):
    """A transfer or a notification failed for another reason than a lost peer.

    The parts of the transfer that were posted have been cancelled, but NIXL cannot confirm it. While the peer lives,
    treat their memory as if the transfer had been released in flight. (With UCX only lost peers have been seen.)
    """


class InternalErrors(RateLimitedLog):
    """Logs internal errors with their traceback.

    There is one for the process: a broken library makes all parts fail at once, and each would fill the log.
    """

    def log(self, what: str) -> None:
        """Log the exception that is being handled.

        Args:
            what: the work that the error interrupted, and what continues.
        """
        self.exception("internal error: %s", what)


internal_errors = InternalErrors(logger)
