"""Ports for tests, which run beside others."""

from __future__ import annotations

from scripts.accuracy.devices import free_ports


def free_port() -> int:
    """A port without a listener, which the kernel gives to no outgoing connection meanwhile."""
    return free_ports(1)[0]
