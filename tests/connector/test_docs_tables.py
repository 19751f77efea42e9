"""The tables and the command output of the documentation are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.generate_docs import COMMANDS_PAGE, PAGE, PICTURE, filled, pages


@pytest.mark.parametrize("page", [PAGE, COMMANDS_PAGE, PICTURE], ids=lambda page: page.name)
def test_what_is_generated_in_the_documentation_is_up_to_date(page: Path) -> None:
    assert page.read_text() == pages()[page], "run `python -m scripts.generate_docs`"


def test_a_page_without_a_place_for_a_generated_part_is_noticed() -> None:
    with pytest.raises(SystemExit, match="config"):
        filled("no place")
