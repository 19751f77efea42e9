"""All timeouts, limits and backoffs of the link, each with its reason.

Clients choose hosts, ports and prompts, so nothing here may be left to them: whatever waits has an end, and whatever is
kept has a number. Modules read these names when they need them; a test sets one here.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_MAX_DOUBLINGS = 64
"""Of a backoff, so that 2.0 to this power still is a float."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays before an attempt is repeated: doubled with every failure in a row, between two bounds."""

    first_s: float
    longest_s: float

    def delay_s(self, failures: int) -> float:
        """The delay after so many failures in a row, at least 1."""
        doublings = min(failures - 1, _MAX_DOUBLINGS)
        delay_s = min(self.longest_s, self.first_s * 2.0**doublings)
        # Jittered by ±50 %, so that the engines of a fleet do not retry at the same time.
        return delay_s * random.uniform(0.5, 1.5)  # noqa: S311


# Time.

CONNECT_S = 5.0
"""For a connection that a message or a query waits for. As long as the default interval of renewals: then the next one
comes anyway."""

RETRY = Backoff(0.2, 2.0)
"""Between attempts to reach an engine that something waits for, or that is configured. Short, since an engine may be
about to listen."""

AVOID = Backoff(0.5, 30.0)
"""Pauses before a worker shakes hands again with a peer that failed. Long, since each attempt costs a request its time;
meanwhile prompts are computed here."""

REFUSED_S = 2.0
"""Time without a new attempt after the secrets did not match; messages for that engine are dropped meanwhile."""

IDLE_S = 60.0
"""Time for which an unused connection is kept: the next message should not have to wait for a handshake."""

REPEAT_S = 5.0
"""Open queries are sent again at this interval, and over every new connection: no answer depends on a single message.
A producer that has answered nothing for as long counts as gone, which TCP notices much later."""

CONTACTS_S = 5.0
"""Longest wait of an engine that falls asleep for peers that are connecting to its agents. It takes them milliseconds;
one that stands still must not keep it awake."""

LINGER_MS = 500
"""For messages in the queue of a connection that is closed."""

JOIN_S = 5.0
"""Longest wait for a thread to end, at shutdown."""

CANCEL_AGAIN_S = 0.1
"""Interval at which tasks are cancelled again at the end: before Python 3.12 `wait_for` can swallow a cancellation."""

LAST_WAIT_S = 1.0
"""Time for pending look-ups and connections before the end, so that waiting messages are sent."""

AFTER_BUG_S = 1.0
"""Sleep of the renewer after a turn that could not renew."""

SHORTEST_LEASE_S = 1.0
"""A shorter lease is renewed as if it had this lifetime: clients choose `lease_s` of unsigned params."""

HEARTBEATS_PER_LEASE = 6
"""As in vLLM's own connector, whose operators know what a value of `kv_lease_duration` means. The consumer renews
every `lease_s / HEARTBEATS_PER_LEASE` seconds, and the producer's clock counts a pause of its own as one such interval:
both know the same `lease_s`."""

JOINS_AT = 0.75
"""Fraction of its interval after which a lease joins a renewal that is sent for another lease of its producer."""

# At most 35 MB/s of empty frames were seen to pass ZMQ's I/O thread, which is one for all connections: about 350 kB
# between two checks, 11 MB in ZMQ's memory. Four checks a second cost 450 MB; checks without arrivals would cost an
# idle process its rest.
CHECK_INTERVAL_S = 0.01
"""Shortest interval between two checks of connections that bring bytes."""

MAX_RECONNECT_MS = 1000
"""Longest interval of ZMQ's own attempts to connect, which begins at 100 ms and doubles."""

HANDSHAKE_MS = 10_000
"""Deadline of a connection's ZMTP handshake: a client that connects and stays silent holds a connection so long."""

KEEPALIVE_IDLE_S = 30
KEEPALIVE_INTERVAL_S = 10
KEEPALIVE_PROBES = 3
"""The kernel finds out within about a minute that the other machine is gone."""

SKIPPING_S = 1e-3
"""Longest time of one turn of the listener for frames that are dropped; its other work goes on between turns."""
FRAMES_AT_ONCE = 64
"""Frames that are dropped between two readings of the clock."""

LINE_S = 1.0
"""Interval of log lines about refused connections, and about producers that cannot be queried."""
UNFINISHED_LINE_S = 60.0
"""Of those that ended during the ZMTP handshake: plain TCP probes look the same."""

# Numbers.

ATTEMPTS = 3
"""Connections in a row that the other end may cut before it has answered: a listener that restarts cuts one, a listener
with a secret cuts all of an engine that has none."""

SLOTS = 256
"""Connections that open queries need, and as many others; beyond both one that is idle is closed."""

FILES_PER_SLOT = 16
"""With fewer files for each slot there are fewer slots. They have two connections of four files each, and the process
needs others."""

MAX_WAITING = 4096
"""Most addresses of one kind that wait for their turn to be connected (`connection_slots.TurnKind`)."""

MAX_REMEMBERED = 4096
"""Most hosts and addresses that are remembered for having answered, been found or failed; the oldest is forgotten."""

MAX_SUBMISSIONS = 4096
"""Most submissions that wait for the renewer's next wake-up."""

MESSAGES_AT_ONCE = 16
"""Most messages of one connection that a client takes between two turns of its loop."""

# The longest answer may take 50 ms to decode: 16 of them held renewals to all peers up for a second.
BYTES_AT_ONCE = 1 << 20
"""Bytes after which no more are taken in this turn; as many as answers that share a frame have."""

QUEUED_MESSAGES = 64
"""Most messages that wait for one connection, in this process and in its socket."""

MAX_SIBLINGS_OF_ONE = 64
"""Most siblings of one producer that are queried; an engine has no more ranks on a host."""
MAX_SIBLINGS = 256
"""Most producers that are queried only because others have named them."""

# Further look-ups of unknown names fail at once: clients can make names up. The limit is above the number of a worker's
# handshakes with unverified hosts, which end before a slow look-up does.
MAX_LOOKUPS = 128
"""Most names that were never found, looked up or waiting for it at the same time."""
# A limit of their own, so that names that clients make up do not hold them up.
MAX_KNOWN_LOOKUPS = 32
"""Most names that were found before, looked up or waiting for it at the same time."""

LOOKUPS_AT_ONCE = 8
"""Threads that look names up of either kind, but for those that are slow: a first contact with 256 named peers had as
many threads."""
SLOW_LOOKUP_S = 0.25
"""A look-up that takes longer lets the next one begin. With 128 names that are never answered, which clients have made
up, another name then waits for 4 s at most."""

MAX_WAITING_LEASES = 1 << 16
"""Most entries in the listener's inbox, of a few hundred bytes each; one message may name 4,096 leases."""
LEASES_AT_ONCE = 64
"""Leases that are put into it between two openings of its lock, which the engine's thread needs too: 4,096 take
milliseconds."""

# More than the workers of 1,000 engines of 8 that shake hands at the same time.
MAX_CONNECTIONS = 8192
"""Most connections of a listener; half of the process's file limit if that is less."""

# Bytes.

MAX_IGNORED_BYTES = 4096
"""Of all answers of a connection that nobody has asked for, to renewals for example: they must fill neither the memory
nor the time of the loop."""
MESSAGE_BYTES = 64
"""What each of them counts for beside its bytes."""

MAX_EXCHANGED_BYTES = 2 << 20
"""Of an answer to a request that is not interpreted here."""

# The kernel doubles it. Without it a connection may have 6 MiB there, which count as received although ZMQ has not read
# them.
RECEIVE_BUFFER_BYTES = 128 << 10
"""Of TCP, for each connection."""

SPARE_BYTES = 4 * RECEIVE_BUFFER_BYTES
"""Bytes that a connection may bring beyond its longest answer: what is in TCP's buffer, and short answers behind it."""

CURVE_OVERHEAD_BYTES = 64
"""Upper bound of the bytes that encryption adds to a message."""

# Few, since their bytes count like those of a message without an end.
REQUESTS_QUEUED = 2
"""Most messages of one connection that wait to be received by the listener."""
ANSWERS_QUEUED = 8
"""Most answers that wait for one connection."""

# 512 MB of empty frames at worst. A thousand consumers that renew a hundred leases each at the same moment send a third
# of it. Connections that have ended are in no bound: the kernel forgets their bytes with them, while ZMQ keeps the
# frames. Only a secret keeps a client out that opens one after the other.
MAX_UNFINISHED_IN_ALL_BYTES = 16 << 20
"""Most bytes since their last whole messages of all open connections together; of one: `MAX_UNFINISHED_BYTES`."""

# A ticket alone may have more, up to `MAX_ANSWERS_BYTES`. But a client ends a connection that brings much more than one
# such ticket without being received, and two frames may wait.
SHARED_FRAME_BYTES = 1 << 20
"""Most bytes of a frame with several answers."""
ANSWER_BYTES = 8 << 10
"""Most bytes of an answer beside its params, with its share of a frame's other fields."""

MAX_SHOWN = 512
"""Characters of a field of `Refused`."""


# Handshakes of a worker.


@dataclass(frozen=True, slots=True)
class HandshakeLimits:
    """Limits on the number of handshakes. An *unverified* host has never answered, or did not the last time.

    Attributes:
        at_once: under way, with all hosts.
        unverified_at_once: under way, with all unverified hosts.
        per_host: under way with one host.
        per_unverified_host: under way with one unverified host.
        wanted: waiting or under way, with all hosts.
        wanted_of_unverified_host: waiting or under way, with one unverified host.
    """

    at_once: int
    unverified_at_once: int
    per_host: int
    per_unverified_host: int
    wanted: int
    wanted_of_unverified_host: int


FOR_LOADS = HandshakeLimits(
    at_once=64,
    unverified_at_once=48,
    per_host=16,
    per_unverified_host=4,
    wanted=256,
    wanted_of_unverified_host=32,
)
"""For peers that a load waits for. Each handshake under way is a connection of four files, up to the timeout if its
host drops packets; the quarter that unverified hosts cannot have is for hosts that have answered before."""

# Two unverified hosts: `PLANS_AT_ONCE` plans are made at a time, and such a host can describe an engine that takes
# seconds to plan.
AHEAD = HandshakeLimits(
    at_once=8,
    unverified_at_once=2,
    per_host=4,
    per_unverified_host=1,
    wanted=64,
    wanted_of_unverified_host=8,
)
"""For peers to be prewarmed: limits of their own, so that they take no place from a load."""

PLANS_AT_ONCE = 4
"""Descriptions that a worker decodes and plans at a time, each on a thread: it is CPU work, which would stop the loop,
and any peer can describe an engine that takes seconds."""


def has_share(count: int, taken: int, most: int) -> bool:
    """Whether a host with `count` of the `taken` places may have one more of `most`: if it has fewer than are free.

    Clients choose how many places they want, and for which host. By this rule one host gets half of them at most, two
    get a third each, and there is always one for the next. A fixed part of them was rejected: it would be too few for a
    fleet on one host.
    """
    return count < most - taken
