r"""Text from outside, as terminals and logs may show it.

Request ids come from clients, names of engines and hosts from peers, and both may hold any character. A terminal obeys
control characters, reorders the text around `U+202E`, and does not show others at all. So every character that is not
printable is escaped as in Python's literals, `\x1b` and `\u202e`: nothing is hidden, and two texts that differ look
different.
"""

from __future__ import annotations

import logging


def visible(text: str) -> str:
    """The text with every character escaped that is not printable.

    Escaped are control and format characters (bidirectional, zero width), line separators, unassigned and private
    characters, halves of surrogate pairs, and spaces other than `U+0020`.
    """
    if text.isprintable():
        return text
    return "".join(map(_escaped, text))


def visible_lines(text: str) -> str:
    """As `visible`, for text with lines of its own, such as a traceback."""
    return "\n".join(map(visible, text.split("\n")))


def visible_json(text: str) -> str:
    """JSON with the same characters escaped as JSON does it, so that it is read back unchanged."""
    return "".join(map(_json_escaped, text))


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    return ascii(character)[1:-1]


def _json_escaped(character: str) -> str:
    # Blanks stand between JSON's values only: inside of its strings they are escaped already.
    if character.isprintable() or character in "\n\t\r":
        return character
    # JSON escapes units of UTF-16, so a character beyond the first 65,536 becomes two.
    encoded = character.encode("utf-16-be", "surrogatepass")
    units = [encoded[at : at + 2].hex() for at in range(0, len(encoded), 2)]
    return "".join(f"\\u{unit}" for unit in units)


class _EscapingHandler(logging.Handler):
    """Escapes a record in place. As the first handler of the logger `kvferry` it comes before those that write."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if not message.isprintable():
            record.msg = visible(message)
            record.args = None
        if record.exc_info and not record.exc_text:
            # A formatter writes `exc_text` where there is one, so a traceback is escaped by setting it.
            traceback = _formatter.formatException(record.exc_info)
            escaped = visible_lines(traceback)
            if escaped != traceback:
                record.exc_text = escaped
        # Where a program has set up no logging, Python writes warnings to standard error by its last resort: not
        # while it finds any handler, and it finds this one. So the last resort is called from here.
        last_resort = logging.lastResort
        if last_resort is None or record.levelno < last_resort.level:
            return
        if not _is_written(record.name):
            last_resort.handle(record)


_formatter = logging.Formatter()
_escaping_handler = _EscapingHandler()


def _is_written(name: str) -> bool:
    """True if a handler other than the escaping one gets the records of this logger."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if other_handlers(logger):
            return True
        if not logger.propagate:
            return False
        logger = logger.parent
    return False


def escape_logs() -> None:
    """Have all log lines of kvferry show foreign text as `visible` does, whatever handlers write them. Idempotent."""
    ours = logging.getLogger("kvferry")
    if ours.handlers[:1] != [_escaping_handler]:
        ours.removeHandler(_escaping_handler)
        ours.handlers.insert(0, _escaping_handler)


def other_handlers(logger: logging.Logger) -> list[logging.Handler]:
    """The handlers of a logger that write, without the one that escapes."""
    return [handler for handler in logger.handlers if handler is not _escaping_handler]
