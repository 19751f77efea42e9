"""Peers that were removed while they lived: NIXL keeps them until there are too many, or their metadata changes."""

from __future__ import annotations

import pytest

from kvferry.worker.fabric.errors import InvalidMetadata
from kvferry.worker.fabric.nixl_handles import NixlPeers
from kvferry.worker.fabric.port import PeerAgent

A, B, C = (PeerAgent(name) for name in "abc")


class Scene:
    """The handles that NIXL is given, and those that it is to forget."""

    def __init__(self, most_parted: int = 8) -> None:
        self.calls: list[str] = []
        load, forget = (lambda name, _: self.calls.append(f"+{name}")), (lambda name: self.calls.append(f"-{name}"))
        self.peers = NixlPeers(load, forget, most_parted)

    def part(self, name: PeerAgent, metadata: bytes = b"1") -> None:
        self.peers.add(name, metadata)
        self.peers.remove(name)


def test_a_peer_that_comes_back_is_not_loaded_again_and_never_forgotten_meanwhile() -> None:
    scene = Scene()
    scene.part(A)
    scene.peers.add(A, b"1")
    with pytest.raises(InvalidMetadata, match="known already"):
        scene.peers.add(A, b"1")
    assert scene.calls == ["+a"]


def test_one_with_other_metadata_is_forgotten_first() -> None:
    scene = Scene()
    scene.part(A)
    scene.peers.add(A, b"2")
    assert scene.calls == ["+a", "-a", "+a"]


def test_of_too_many_the_one_that_was_left_first_is_forgotten_and_in_the_end_all() -> None:
    scene = Scene(most_parted=2)
    for name in (A, B, C):
        scene.part(name)
    assert scene.calls == ["+a", "+b", "+c", "-a"]
    scene.peers.clear()
    assert scene.calls[4:] == ["-b", "-c"]


def test_one_whose_requests_failed_is_forgotten_at_once() -> None:
    scene = Scene()
    scene.peers.add(A, b"1")
    scene.peers.get("test", A).is_sound = False
    scene.peers.remove(A)
    assert scene.calls == ["+a", "-a"]
