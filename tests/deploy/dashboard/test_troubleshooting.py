"""The troubleshooting page quotes metrics and log lines as the source has them, and leaves no warning out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.deploy.dashboard.promql import samples

REPOSITORY = Path(__file__).resolve().parents[3]
PAGE = REPOSITORY / "docs" / "troubleshooting.md"
TEXT = PAGE.read_text()
PARTS = ("protocol", "plan", "trace", "link", "scheduler", "worker", "connector")
GAP = "…"
WARNINGS = ("warning", "error", "exception", "critical")

METRIC = re.compile(r"(vllm:[a-z_]+)(?:\{(\w+)=\"(\w+)\"\})?")
LABEL = re.compile(r"\{(\w+)=\"(\w+)\"\}")


def log_lines(text: str) -> list[str]:
    """The code spans of every **Log** part and of the column `line` of tables, and of other parts those with a gap."""
    found = []
    for part in re.split(r"\n(?=- \*\*|#|\n)", text):
        if "| reason | line |" in part:
            lines = [
                row.split("|")[2] for row in part.splitlines() if row.startswith("| `")
            ]
            found += [span for line in lines for span in re.findall(r"`([^`]+)`", line)]
        spans = [re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", part)]
        is_log = part.startswith("- **Log:**")
        found += [
            span
            for span in spans
            if ("…" in span and span != "…")
            or (is_log and " " in span and not LABEL.search(span))
        ]
    return found


def pieces_of(template: str) -> list[str | None]:
    """The texts of a line that logging fills in, with None for what is filled in."""
    return [
        None if number % 2 else text
        for number, text in enumerate(re.split(r"(%(?:\.\d+)?[sdrfg])", template))
    ]


def filled(template: str) -> str:
    """A regular expression for what becomes of such a line."""
    return "".join(
        ".*" if text is None else re.escape(text) for text in pieces_of(template)
    )


def warning_lines() -> dict[str, str]:
    """Templates of all lines that are logged as a warning or worse. Template → where."""
    found = {}
    for part in PARTS:
        for file in sorted((REPOSITORY / part / "kvferry").rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and node.func.attr in WARNINGS
                    and ast.unparse(node.func.value) == "logger"
                ):
                    assert isinstance(node.args[0], ast.Constant), (
                        f"{file.name}:{node.lineno}"
                    )
                    found[str(node.args[0].value)] = f"{file.name}:{node.lineno}"
    return found


def unknown_metrics(text: str) -> list[str]:
    known = samples()
    wrong = []
    for name, label, value in METRIC.findall(text):
        sample = known.get(name) or known.get(f"{name}_bucket")
        if sample is None or (label and value not in sample.labels.get(label, ())):
            wrong.append(f'{name}{{{label}="{value}"}}' if label else name)
    every = {
        (label, value)
        for sample in known.values()
        for label, values in sample.labels.items()
        for value in values
    }
    return wrong + [
        f'{label}="{value}"'
        for label, value in LABEL.findall(text)
        if (label, value) not in every
    ]


def test_every_metric_on_the_page_is_exported_under_that_label() -> None:
    assert len(METRIC.findall(TEXT)) > 50
    assert unknown_metrics(TEXT) == []


def test_every_warning_of_the_source_is_on_the_page() -> None:
    lines = log_lines(TEXT)
    templates = warning_lines()
    assert len(templates) > 20
    missing = [
        f"{where}: {template}"
        for template, where in templates.items()
        if not any(re.fullmatch(filled(template), line) for line in lines)
    ]
    assert missing == []


def texts_of_the_source() -> str:
    """All texts of the source, one a line, with a gap where something is filled in."""
    found = []
    for part in PARTS:
        for file in sorted((REPOSITORY / part / "kvferry").rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    values = [
                        value.value if isinstance(value, ast.Constant) else GAP
                        for value in node.values
                    ]
                    found.append("".join(map(str, values)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"%(?:\.\d+)?[sdrfg]", GAP, node.value))
    return "\n".join(found)


def test_every_line_on_the_page_is_one_of_the_source() -> None:
    texts = texts_of_the_source()
    templates = warning_lines()
    quoted = [
        span
        for part in re.split(r"\n(?=- \*\*|#|\n)", TEXT)
        if part.startswith("- **Log:**")
        for span in log_lines(part)
    ]
    assert len(quoted) > 50
    unknown = [
        f"{line}: {piece}"
        for line in quoted
        if not any(re.fullmatch(filled(template), line) for template in templates)
        for piece in re.split(GAP, line)
        # An `InputError` puts its own words before what was expected.
        if len(piece.split()) > 2
        and piece.removeprefix("; expected ").strip(" ();:,") not in texts
    ]
    assert unknown == []


def test_every_reason_and_every_counter_of_trouble_is_on_the_page() -> None:
    for name in ("local_recomputes", "failed_loads", "side_channel_refusals"):
        reasons = samples()[f"vllm:kvferry_{name}_total"].labels["reason"]
        assert [
            reason for reason in reasons if f'{{reason="{reason}"}}' not in TEXT
        ] == []
    fine = re.compile(r"turn_loads|planned_bytes|post_time|bytes_transferred")
    stems = {re.sub(r"_(bucket|sum|count)$", "", name) for name in samples()}
    assert [
        stem for stem in sorted(stems) if stem not in TEXT and not fine.search(stem)
    ] == ["vllm:request_success_total"]
