"""Free ports."""

from __future__ import annotations

import random
import socket

# Below the range from which kernels commonly take ports for outgoing connections: an engine needs a minute to start,
# and a port of that range could be gone by then.
_LOWEST, _HIGHEST = 12000, 32000


def free_ports(count: int, host: str = "127.0.0.1", rng: random.Random | None = None) -> list[int]:
    """Different ports on which no process listens now.

    Another process may still take one before it is used: then the engine says so in its log and the run ends.

    Raises:
        OSError: hardly any port is free.
    """
    chooser = rng or random.Random()
    found: list[int] = []
    for port in chooser.sample(range(_LOWEST, _HIGHEST), min(count + 2000, _HIGHEST - _LOWEST)):
        if len(found) == count:
            break
        if _is_free(host, port):
            found.append(port)
    if len(found) < count:
        raise OSError(f"only {len(found)} free ports were found from {_LOWEST} to {_HIGHEST}; {count} are needed")
    return found


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as attempt:
        try:
            attempt.bind((host, port))
        except OSError:
            return False
    return True
