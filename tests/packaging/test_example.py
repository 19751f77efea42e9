"""`examples/`, run as its first lines say, with the installed wheel."""

from __future__ import annotations

from tests.packaging.outside import ROOT, Installed

EXAMPLE = ROOT / "examples" / "two_engines_without_vllm.py"


def test_two_processes_hand_a_prompt_over_between_unequal_layouts(
    installed: Installed,
) -> None:
    said = installed.python(str(EXAMPLE)).splitlines()
    assert "consumer: 100 tokens, failed: no, every byte is equal: True" in said
    assert "producer: the prompt was read, its blocks are free" in said
    assert len(EXAMPLE.read_text().splitlines()) <= 100
