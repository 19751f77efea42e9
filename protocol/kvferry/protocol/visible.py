r"""Text from outside, as terminals and logs may show it.

Request ids come from clients, names of engines and hosts from peers, and both may hold any character. A terminal obeys
control characters, and reorders what stands around `U+202E`; others are not shown at all. So whatever is not printable
is escaped as in Python's literals, `\x1b` and `\u202e`: nothing is hidden, and two texts that differ look different.
"""

from __future__ import annotations

import logging


def visible(text: str) -> str:
    """The text with every character escaped that is not printable: control, format (bidirectional, zero width), line
    separators, unassigned, private and half of a surrogate pair. Spaces other than `U+0020` are escaped too."""
    return (
        text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)
    )


def visible_lines(text: str) -> str:
    """The same for text whose lines are its author's, as those of a traceback."""
    return "\n".join(map(visible, text.split("\n")))


def visible_json(text: str) -> str:
    """JSON with the same characters escaped as JSON has it, so that it is read back unchanged. Only its strings can
    contain them, but for the blanks between its values, which are kept."""
    return "".join(c if c.isprintable() or c in "\n\t\r" else _json_escaped(c) for c in text)


def _escaped(character: str) -> str:
    return ascii(character)[1:-1]


def _json_escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


class _Escaping(logging.Handler):
    """Escapes a record before the handlers that write it get it: it is the first handler of the logger `kvferry`."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if not message.isprintable():
            record.msg = visible(message)
            record.args = None
        if record.exc_info and not record.exc_text:
            shown = _formatter.formatException(record.exc_info)
            if visible_lines(shown) != shown:
                record.exc_text = visible_lines(shown)
        last = logging.lastResort
        if last is not None and record.levelno >= last.level and not _is_written(record.name):
            last.handle(record)


_formatter = logging.Formatter()
_escaping = _Escaping()


def _is_written(name: str) -> bool:
    """Whether a handler other than this writes records of a logger. Where there is none, Python writes warnings to
    standard error; it counts this one."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(handler is not _escaping for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def escape_logs() -> None:
    """Have all log lines of kvferry show foreign text as `visible` does, whatever handlers write them. Idempotent."""
    ours = logging.getLogger("kvferry")
    if ours.handlers[:1] != [_escaping]:
        ours.removeHandler(_escaping)
        ours.handlers.insert(0, _escaping)


def other_handlers(logger: logging.Logger) -> list[logging.Handler]:
    """The handlers that write what the logger gets."""
    return [handler for handler in logger.handlers if handler is not _escaping]
