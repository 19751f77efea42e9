"""Which hosts this engine takes prompts from, by its configuration, and what its log says about the others."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from kvferry.link.allowed_hosts import ANY, AllowedHosts
from kvferry.link.secrets import VARIABLE, Secrets
from kvferry.protocol.errors import shorten
from kvferry.protocol.hosts import HOST_VARIABLE, host_is_loopback, read_host

__all__ = ["AllowedHosts", "TrustedHosts", "allowed_hosts_of", "warn_of_trust"]

logger = logging.getLogger(__name__)

_MAX_ADVISED = 256
"""Hosts that the log gives advice about; clients choose them."""


def allowed_hosts_of(
    listed: Sequence[str] | None, secrets: Secrets, own_host: str = "localhost"
) -> AllowedHosts:
    """The hosts that this engine may connect to.

    Args:
        listed: the key `allowed_hosts`; None if it is not set.
        own_host: this engine's `VLLM_NIXL_SIDE_CHANNEL_HOST`.
    """
    if listed is None:
        return AllowedHosts.without_list(secrets, own_host)
    return AllowedHosts.from_entries(listed)


def warn_of_trust(allowed: AllowedHosts, secrets: Secrets) -> None:
    """At the start of an engine that reads from others: say whom it trusts."""
    # With a secret, engines without it are refused, so the secret decides.
    if secrets:
        return
    if allowed.this_host:
        logger.warning(
            "without a secret and without allowed_hosts this engine reads only from producers on this host, and "
            "computes all other prompts itself; give all engines one %s, or list the producers' hosts in allowed_hosts",
            VARIABLE,
        )
    elif allowed.any_host:
        logger.warning(
            'allowed_hosts is ["*"] and there is no secret: anyone who can write params can make this engine read from '
            "any host, and answer others with text that this host chose; set %s on all engines",
            VARIABLE,
        )


class TrustedHosts:
    """Judges the hosts that params name.

    Used on the engine's thread: it looks no name up, and does not wait.

    Args:
        has_list: whether `allowed_hosts` is set.
        has_secret: whether the side channel has a secret.
    """

    def __init__(
        self, allowed: AllowedHosts, *, has_list: bool, has_secret: bool = False
    ) -> None:
        self._allowed = allowed
        self._has_list = has_list
        self._has_secret = has_secret
        self._advised: set[str] = set()

    def allow(self, host: str) -> bool:
        """Whether this engine may connect to a host."""
        return self._allowed.allow(host)

    def why_not(self, host: str) -> str | None:
        """Why this engine may not connect to a host; None if it may. What to do about it is logged once for a host."""
        why = self._allowed.why_not(host)
        if why is None:
            return None
        if host not in self._advised and len(self._advised) < _MAX_ADVISED:
            self._advised.add(host)
            logger.warning(
                "prompts of host %s are computed here: it %s. %s",
                shorten(host),
                why,
                self._advice(host),
            )
        return f"host {shorten(host)} {why}"

    def why_not_unannounced(self, host: str) -> str | None:
        """As `why_not`, for a host that a request names without an announcement of kvferry's.

        This host is not enough: other programs listen here too, and such a request is written by any client.
        """
        if not self._has_list and not self._has_secret:
            return f"host {shorten(host)} is not in allowed_hosts, and there is no secret here"
        return self.why_not(host)

    def _advice(self, host: str) -> str:
        """What to do so that prompts of this host are read, if it is a producer's."""
        try:
            entry = json.dumps(str(read_host(host)))
        except ValueError:
            return f"Set {HOST_VARIABLE} on its producer to an address or a name that decoders reach"
        change = f'set "allowed_hosts": [{entry}] in kv_connector_extra_config here'
        if self._has_list:
            change = f"add {entry} to allowed_hosts here"
        if host_is_loopback(host):
            # A producer's default host is a loopback address, which names this host for every engine.
            return (
                f"If its producer is on this host, {change}; if it is on another host, "
                f"set {HOST_VARIABLE} there to an address that decoders reach"
            )
        if self._has_list:
            return f"If that is a producer, {change}"
        return (
            f"If that is a producer, give both engines one {VARIABLE}, or {change} "
            f'(every program on that host is trusted then; ["{ANY}"]: every client)'
        )
