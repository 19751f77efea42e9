"""Running the command in this process."""

from __future__ import annotations

import contextlib
import io
import os
from dataclasses import dataclass
from unittest import mock

from kvferry.cli.main import main


@dataclass(frozen=True)
class Ran:
    """The result of a command."""

    code: int
    out: str
    err: str


class _Stdin(io.StringIO):
    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.buffer = io.BytesIO(content)  # type: ignore[misc]


def run(*arguments: str, stdin: bytes = b"", columns: int = 80) -> Ran:
    """Run `kvferry` with arguments, its output that wide."""
    out, err = io.StringIO(), io.StringIO()
    environ = {
        name: value for name, value in os.environ.items() if name != "FORCE_COLOR"
    } | {"COLUMNS": str(columns)}
    with (
        mock.patch.dict(os.environ, environ, clear=True),
        mock.patch("sys.stdin", _Stdin(stdin)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
    return Ran(code, out.getvalue(), err.getvalue())


def refused(*arguments: str, stdin: bytes = b"", code: int = 2) -> str:
    """Run `kvferry` with arguments that it refuses: nothing but one line on standard error, which is returned."""
    ran = run(*arguments, stdin=stdin)
    assert (ran.code, ran.out, ran.err.count("\n")) == (code, "", 1)
    assert ran.err.startswith(f"kvferry {arguments[0]}: ")
    return ran.err
