"""Every reason of an engine to step, to wait, and to wake.

A step costs vLLM's workers a second of spinning each, and its loop begins the next one a millisecond after a step that
has computed nothing. So an engine with nothing to compute must not step just to look. It has one place to rest: its
input queue. Without a request, vLLM's loop sleeps there as long as `must_step` is False. With requests, the loop is
held there within a hook (`wait_for_answers`, `wait_for_loads`). Whatever is put into the queue ends both.

Without a request, the engine steps because of

| reason | why | until | test |
| --- | --- | --- | --- |
| ORDERS | no consumer reads before the workers have the orders | that step | `test_idle_scheduler.py` |
| PREFIXES | another engine waits until blocks that it has found are held | they are | `test_prefix_leases.py` |
| QUARANTINE | only workers' reports tell when pinned blocks return | the report | `test_quarantined_blocks.py` |
| DRAIN | vLLM ends an engine without work; a consumer may still read | the last held lease | `test_drain.py` |
| PAUSE | a pause is complete without work; then no block may be held | the last held lease | `test_engine_loop.py` |
| LONG_SLEEP | leases may have been read, or may have expired | that step | `test_idle.py` |
| ANSWERS | more answers have come than one call takes | the last answer | `test_steps.py` |
| PRODUCERS | a producer in `prewarm_peers` has answered | that step | `test_first_contact.py` |

Otherwise it rests:

| requests | held in | woken by | test |
| --- | --- | --- | --- |
| none, no lease is held | vLLM's loop | input | `test_first_contact.py` |
| none, leases are held | vLLM's loop | input; `poll`, after `MAX_IDLE_S` | `test_idle.py`, `test_engine_loop.py` |
| all wait for answers | `wait_for_answers` | input; an answer; a query's end; `MAX_IDLE_S` | `test_engine_loop.py` |
| all wait for loads or answers | `wait_for_loads` | the same; a worker that notifies | `test_consumer.py` |

What is left are steps that compute nothing and are cheaper: a worker waits up to 2 ms within the step for a load
(`worker_side/side.py`), so that a short one is reported by the step that orders it; and of many requests that wait for
the same thing vLLM looks at the first few only (`Parking`). docs/design.md has the figure that keeps each. With data
parallelism or pipeline stages, where others would wait for this engine's step, it rests in vLLM's loop only.
"""

from __future__ import annotations

import enum
import logging
import time

from kvferry.connector.scheduler_side.prefixes import PrefixLeases
from kvferry.connector.scheduler_side.prompt_queries import PromptQueries
from kvferry.connector.vllm.core import EngineLoop
from kvferry.link.load_listener import LoadListener
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.producer.eviction_order import release_idle_turns
from kvferry.scheduler.producer.ledger import ProducerLedger

logger = logging.getLogger(__name__)

MAX_IDLE_S = 15.0
"""Longest rest of an engine that holds leases or has requests; its metrics are hardly older. More steps would be
costly: vLLM's workers spin for a second after each before they sleep again."""


class StepReason(enum.Enum):
    """Why an engine without requests must step; the module's docstring has the table."""

    ORDERS = enum.auto()
    PREFIXES = enum.auto()
    QUARANTINE = enum.auto()
    DRAIN = enum.auto()
    PAUSE = enum.auto()
    LONG_SLEEP = enum.auto()
    ANSWERS = enum.auto()
    PRODUCERS = enum.auto()


class Drain:
    """The drain of one engine.

    On SIGTERM an engine steps until it has no work, and held leases count as work. So leases that no consumer will read
    must end, or the engine steps until it is killed.

        time to drain (`--shutdown-timeout`)     leases of prompts     offered answers (turns)
        0 s                                      end at once           end at once
        more                                     are waited for        end; none is offered any more

    Args:
        drain_s: seconds that vLLM waits for running requests.

    Attributes:
        has_begun: whether a step has seen that the engine is to end.
    """

    def __init__(self, leases: ProducerLedger, drain_s: float) -> None:
        self.has_begun = False
        self._leases = leases
        self._drain_s = drain_s

    def step(self) -> None:
        """A step of an engine that is to end. After the first one, turns that were offered or became idle since end."""
        is_first = not self.has_begun
        self.has_begun = True
        num_ended = self._end_leases(is_first=is_first)
        if is_first:
            logger.info(
                "shutting down: %d leases ended, waiting for %d",
                num_ended,
                len(self._leases.block_references.held),
            )

    def _end_leases(self, *, is_first: bool) -> int:
        if self._drain_s:
            # In every step: the next request of a conversation goes to another engine anyway, so a turn that is held
            # when a running request ends would only keep this one.
            return release_idle_turns(self._leases, "shutdown")
        if is_first:
            return self._leases.release_all("shutdown")
        return 0


class Steps:
    """When the engine of this process steps, rests and wakes.

    Args:
        num_workers: of this engine.
        drain_s: see `Drain`.
        loop: of this engine; `queries` notifies the same one.
        load_listener: hears when a worker has ended a load; None if this engine loads nothing.
        may_wait: whether a step may take a moment: no other engine and no other stage waits for it.

    Attributes:
        drain: ends leases at the beginning of a step, when the engine is to end.
        unreported: workers that have not reported since the engine woke.
        loop, load_listener, may_wait: as given.
    """

    def __init__(
        self,
        leases: ProducerLedger,
        loads: ConsumerLedger,
        queries: PromptQueries,
        prefix_leases: PrefixLeases,
        num_workers: int,
        *,
        drain_s: float,
        loop: EngineLoop,
        load_listener: LoadListener | None,
        may_wait: bool,
    ) -> None:
        self.drain = Drain(leases, drain_s)
        self.loop = loop
        self.load_listener = load_listener
        self.may_wait = may_wait
        self._leases = leases
        self._loads = loads
        self._queries = queries
        self._prefix_leases = prefix_leases
        self._workers = frozenset(range(num_workers))
        self.unreported: set[int] = set()
        self._may_sleep = False
        self._is_pausing = False
        self._stepped_s = time.monotonic()
        self._wait_until_s: float | None = None
        self._waking_until_s = 0.0  # on the leases' clock

    # Whether to step.

    def must_step(self, *, has_producers: bool) -> bool:
        """True if the engine must step although it has no request. vLLM's loop asks before it sleeps.

        Args:
            has_producers: prewarmed producers wait for a step.
        """
        return self.reason(has_producers=has_producers) is not None

    def reason(self, *, has_producers: bool = False) -> StepReason | None:
        """Why an engine without requests must step; None if it may sleep."""
        if has_producers:
            return StepReason.PRODUCERS
        if self._queries.has_answers:
            return StepReason.ANSWERS
        return self._reason_of_leases()

    def _reason_of_leases(self) -> StepReason | None:
        is_draining = self.loop.is_ending
        if self._leases.needs_step:
            return StepReason.ORDERS
        if self._prefix_leases.needs_step:
            return StepReason.PREFIXES
        # An engine that ends needs its blocks no more: it would step until `failed_read_grace_s` has passed.
        if self._loads.quarantine.num_blocks and not is_draining:
            return StepReason.QUARANTINE
        if not self._leases.block_references.held:
            return None
        if is_draining:
            return StepReason.DRAIN
        if self.loop.is_paused:
            # As with requests. The calls that follow a pause (emptying caches, loading weights) must find no held
            # block.
            self._is_pausing = True
            return StepReason.PAUSE
        if self._has_rested_long():
            # vLLM does not ask while its loop sleeps. So it was woken: by `poll`, or by a call to empty the prefix
            # cache, which fails while blocks are held. The step may free blocks of leases that were read meanwhile.
            return StepReason.LONG_SLEEP
        self._may_sleep = True
        return None

    # A step.

    def begin(self) -> bool:
        """A step begins. Returns whether every worker must report in it, even if it has no news."""
        self._stepped_s = time.monotonic()
        self._wait_until_s = None
        if self._may_sleep:
            # While the engine slept, consumers' notifications waited at the workers. Leases that seem held may be over.
            self._may_sleep = False
            self.unreported = set(self._workers)
            self._waking_until_s = (
                self._leases.clock.awake_s + self._leases.clock.heartbeat_s
            )
        if self._is_pausing:
            # A pause may keep requests as they are. One whose prompt is complete would hold its lease until it ends,
            # which it cannot: the pause would never be complete.
            self._is_pausing = False
            self._leases.start_deadlines()
        if self.loop.is_ending:
            self.drain.step()
        return bool(self.unreported)

    @property
    def may_report_ended_leases(self) -> bool:
        """True if the next step or two may report leases that ended before the engine woke."""
        return self._may_sleep or self.is_waking

    @property
    def is_waking(self) -> bool:
        """True while reports of notifications received during sleep are outstanding: leases that seem held may be over.

        At most a heartbeat long: a worker that stands still must not keep leases from expiring or being evicted.
        """
        return (
            bool(self.unreported) and self._leases.clock.awake_s <= self._waking_until_s
        )

    # Waiting, on the loop's own thread.

    def wait_for_answers(self, num_requests: int) -> bool:
        """Wait for news if all requests wait for answers.

        Called within the hook of one of them, since vLLM asks about a waiting request again in every step.

        Args:
            num_requests: that have not ended.

        Returns:
            Whether there may be answers to take. If not, the engine must step.
        """
        if self._reason_of_leases() is not None or self._expects_reports:
            return False
        return self._wait(num_requests, num_requests)

    def wait_for_loads(self, num_requests: int) -> None:
        """Wait for news if all requests wait for loads or answers, and the workers notify of ended loads.

        Called at the end of a step that computes nothing and orders nothing. Without notifications only a step shows
        that a load has ended; then the workers wait in the step, for a moment.

        Args:
            num_requests: that have not ended.
        """
        if self.load_listener is None or not self.load_listener.hears_all_workers:
            return
        if self._reason_of_leases() is not None:
            return
        num_loading = self._loads.loading
        if num_loading and self.load_listener.has_no_news:
            self._wait(num_requests, num_requests - num_loading)
        # After the wait: what was notified until here is in this step's report.
        self.load_listener.begin_step()

    def _wait(self, num_requests: int, num_others: int) -> bool:
        """Wait if all of the other requests wait for answers.

        Args:
            num_requests: that have not ended.
            num_others: those of them that are not loading.

        Returns:
            Whether there may be answers to take.
        """
        if not self.may_wait or num_others > self._queries.num_waiting:
            return False
        # Another child of a MultiConnector may hold the blocks of requests that have ended: it saves them, and reports
        # that, in steps. Aborted loads are held as well, and their workers notify.
        num_aborted = self._loads.in_flight - self._loads.loading
        if self.loop.num_requests > num_requests + num_aborted:
            return False
        now_s = time.monotonic()
        if self._wait_until_s is None:
            # Not from the last step on: a request may arrive after a sleep of hours, and would step once for nothing.
            self._wait_until_s = now_s + MAX_IDLE_S
        if now_s >= self._wait_until_s:
            return False
        until_s = self._wait_until_s
        next_query_s = self._queries.next_s()
        if next_query_s is not None:
            until_s = min(until_s, next_query_s)
        if self._queries.has_answers or until_s <= now_s:
            return True
        return self.loop.wait(until_s - now_s)

    @property
    def _expects_reports(self) -> bool:
        """True if the next step may report the end of a load, an aborted one included."""
        if not self._loads.in_flight:
            return False
        listener = self.load_listener
        is_quiet = (
            listener is not None and listener.hears_all_workers and listener.has_no_news
        )
        return not is_quiet

    # Waking, on any thread.

    def wake(self) -> None:
        """Have the loop look for reasons to step."""
        self.loop.wake()

    def poll(self) -> None:
        """Wake an engine that has rested for `MAX_IDLE_S`. Called by the listener's thread, twice a second or more."""
        if self._may_sleep and self._has_rested_long():
            self.loop.wake()

    def close(self) -> None:
        """Idempotent. The thread that watches the load listener must have ended."""
        if self.load_listener is not None:
            self.load_listener.close()

    def _has_rested_long(self) -> bool:
        return time.monotonic() >= self._stepped_s + MAX_IDLE_S
