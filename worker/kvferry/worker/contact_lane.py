"""How many first contacts wait or are under way at once, of hosts that are known to answer and of strangers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field

from kvferry.worker.peer import PeerKey


@dataclass(frozen=True, slots=True)
class ContactLimits:
    """Most contacts. A *stranger* is a host that has never answered, or did not the last time.

    Attributes:
        at_once, strangers_at_once: under way, of all hosts and of all strangers.
        per_host, per_stranger: under way with one of them.
        asked, asked_of_a_stranger: waiting or under way.
    """

    at_once: int
    strangers_at_once: int
    per_host: int
    per_stranger: int
    asked: int
    asked_of_a_stranger: int


@dataclass(slots=True)
class ContactLane:
    """Contacts that share limits."""

    limits: ContactLimits
    waiting: dict[PeerKey, None] = field(default_factory=dict)
    asking: set[PeerKey] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.asking)

    def __contains__(self, key: PeerKey) -> bool:
        return key in self.waiting or key in self.asking

    def why_full(self, host: str, answered: Container[str]) -> str | None:
        """Why nobody of this host can be added; None when somebody can."""
        if len(self) >= self.limits.asked:
            return f"{len(self)} other engines have not answered yet"
        if host not in answered:
            of_host = sum(other.host == host for other in (*self.waiting, *self.asking))
            if of_host >= self.limits.asked_of_a_stranger:
                return f"{of_host} engines of this host have not answered yet"
        return None

    def begin(self, answered: Container[str]) -> list[PeerKey]:
        """Who is to be asked now; they are under way from here on."""
        limits, begun = self.limits, []
        hosts = Counter(key.host for key in self.asking)
        strangers = sum(count for host, count in hosts.items() if host not in answered)
        for key in list(self.waiting):
            if len(self.asking) >= limits.at_once:
                break
            is_stranger = key.host not in answered
            if is_stranger and strangers >= limits.strangers_at_once:
                continue
            if hosts[key.host] >= (limits.per_stranger if is_stranger else limits.per_host):
                continue
            del self.waiting[key]
            self.asking.add(key)
            hosts[key.host] += 1
            strangers += is_stranger
            begun.append(key)
        return begun
