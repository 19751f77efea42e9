"""Foreign text in terminals and logs: nothing reorders, hides or controls what stands around it."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import unicodedata
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.visible import escape_logs, visible, visible_json

BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u061c"
HIDDEN = "\u200b\u200c\u200d\u2060\ufeff\u00ad\u180e\U000e0041"
CONTROL = "\x00\x07\x08\t\n\r\x1b\x7f\x80\x85\x9b\u2028\u2029"
HALVES = "\ud800\udfff"


@pytest.mark.parametrize("character", BIDI + HIDDEN + CONTROL + HALVES, ids=ascii)
def test_a_character_that_is_not_shown_as_itself_is_escaped(character: str) -> None:
    shown = visible(f"req=a{character}b")
    assert shown == f"req=a{ascii(character)[1:-1]}b"
    assert shown.isprintable()


@pytest.mark.parametrize(
    "text", ["", "cmpl-1-0-9f3a", "Zürich → 東京", "שלום", "a b", "\\u202e"]
)
def test_what_can_be_shown_is_unchanged(text: str) -> None:
    assert visible(text) == text


@given(st.text())
def test_no_text_leaves_a_character_that_is_not_printable(text: str) -> None:
    shown = visible(text)
    assert not any(
        unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
        for c in shown
    )


@given(st.dictionaries(st.text(), st.text()))
def test_json_is_read_back_unchanged(plain: dict[str, str]) -> None:
    shown = visible_json(json.dumps(plain, indent=1, ensure_ascii=False))
    assert json.loads(shown) == plain
    assert not set(shown) & set(BIDI + HIDDEN + HALVES + "\x7f\x9b\u2028")


HOSTILE = f"a{BIDI}{HIDDEN}\x1b[2J\x9b2J\r\nERROR forged"


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What a handler of the root logger writes."""
    stream, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    root.addHandler(handler)
    escape_logs()
    yield stream
    root.removeHandler(handler)


def test_log_lines_show_foreign_text_escaped(written: io.StringIO) -> None:
    logger = logging.getLogger("kvferry.scheduler.test")
    logger.error("req=%s is computed here: %s", HOSTILE, ValueError(HOSTILE))
    assert (
        written.getvalue()
        == f"req={visible(HOSTILE)} is computed here: {visible(HOSTILE)}\n"
    )


def test_tracebacks_show_foreign_text_escaped_and_keep_their_lines(
    written: io.StringIO,
) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logging.getLogger("kvferry.worker.test").exception("an internal error")
    first, *lines = written.getvalue().splitlines()
    assert first == "an internal error"
    assert lines[0] == "Traceback (most recent call last):"
    assert all(line.isprintable() for line in lines)


def test_lines_of_others_and_printable_ones_are_left_alone(
    written: io.StringIO,
) -> None:
    for _ in range(2):
        escape_logs()
    logging.getLogger("another").error("two\nlines")
    logging.getLogger("kvferry.test").error("req=%s slot=%d", "a", 7)
    assert written.getvalue() == "two\nlines\nreq=a slot=7\n"


def test_without_a_handler_warnings_still_reach_standard_error_once() -> None:
    program = (
        "import logging; from kvferry.protocol.visible import escape_logs; escape_logs();"
        "log = logging.getLogger('kvferry.test'); log.warning('req=%s', 'a' + chr(0x202e)); log.info('not shown')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert (ended.stdout, ended.stderr) == ("", "req=a\\u202e\n")
