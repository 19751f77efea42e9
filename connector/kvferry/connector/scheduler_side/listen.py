"""Opens the side channel of an engine that others read from, at its configured address."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable

from kvferry.connector.engine.local_engine import LocalEngine
from kvferry.protocol.handshake import LeaseName
from kvferry.protocol.side_channel.secrets import Secrets
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.side_channel.server import SideChannelListener
from kvferry.scheduler.state.counters import Counters

logger = logging.getLogger(__name__)


def listen(
    local: LocalEngine, counters: Counters, secrets: Secrets, leases: ProducerLedger, tick: Callable[[], None]
) -> SideChannelListener | None:
    """This engine's listener; None if no engine reads from it.

    Raises:
        InvalidConfig: the address is in use, or the secrets are invalid.
    """
    if not local.is_read_from:
        return None
    if not secrets and not _is_loopback(local.host):
        logger.warning(
            "the side channel on %s:%d answers every client that can reach it; set KVFERRY_SECRET_FILE, or keep it on "
            "a trusted network",
            local.host,
            local.port,
        )

    def knows(boot: str, name: LeaseName) -> bool:
        return boot == local.boot and leases.knows(name)

    return SideChannelListener(local.host, local.port, counters, secrets, leases.clock, tick, knows)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
