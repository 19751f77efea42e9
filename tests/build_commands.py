"""Commands that make an environment: what they say, or why they failed."""

from __future__ import annotations

import os
import subprocess

_TIMEOUT_S = 1200.0
_SHOWN_COMMAND = 400
_SHOWN_OUTPUT = 4000


class BuildFailed(Exception):
    """An environment could not be made; the text says what failed, and the end of what was said."""


def said_by(*command: str) -> str:
    """The standard output of a command.

    Raises:
        BuildFailed: it failed, or did not end.
    """
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]}: {error}") from error
    if done.returncode:
        shown = " ".join(command)[:_SHOWN_COMMAND]
        output = (done.stdout + done.stderr)[-_SHOWN_OUTPUT:]
        raise BuildFailed(f"{shown}: exit status {done.returncode}\n{output}")
    return done.stdout
