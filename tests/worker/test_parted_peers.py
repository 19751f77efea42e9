"""Peers that were removed while they lived: NIXL keeps them until there are too many, or their metadata changes."""

from __future__ import annotations

from kvferry.worker.fabric.nixl_handles import PartedPeers


def test_a_peer_is_taken_back_once_and_is_never_forgotten_meanwhile() -> None:
    forgotten: list[str] = []
    parted = PartedPeers(forgotten.append)
    parted.add("a", b"1")
    assert parted.take("a", b"1")
    assert not parted.take("a", b"1")
    assert not parted.take("b", b"1")
    assert forgotten == []


def test_one_with_other_metadata_is_forgotten_first() -> None:
    forgotten: list[str] = []
    parted = PartedPeers(forgotten.append)
    parted.add("a", b"1")
    assert not parted.take("a", b"2")
    assert forgotten == ["a"]


def test_of_too_many_the_one_that_was_left_first_is_forgotten_and_in_the_end_all() -> None:
    forgotten: list[str] = []
    parted = PartedPeers(forgotten.append, most=2)
    for name in "abc":
        parted.add(name, b"1")
    assert forgotten == ["a"]
    parted.clear()
    assert forgotten == ["a", "b", "c"]
