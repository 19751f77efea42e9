"""The tables of the documentation are those of the code."""

from __future__ import annotations

from scripts.generate_docs import PAGE, filled


def test_the_generated_tables_of_the_operations_page_are_up_to_date() -> None:
    text = PAGE.read_text()
    assert filled(text) == text, "run `python -m scripts.generate_docs`"
