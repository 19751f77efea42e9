"""What kvferry reads and changes of vLLM's `Request` (v1/request.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import RequestStatus

from kvferry.protocol.errors import LocalProtocolError

if TYPE_CHECKING:
    from vllm.v1.request import Request

_WAITS_FOR_BLOCKS = frozenset((RequestStatus.WAITING, RequestStatus.PREEMPTED))

_PARKED = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR

_NEEDS_BLOCKS = _WAITS_FOR_BLOCKS | {_PARKED}

_ENDED_WELL = frozenset(
    (
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_REPETITION,
    )
)


def hint_actions(request: Request) -> Sequence[object]:
    """The actions of the request's KV hints; none for a vLLM that has no hints."""
    hints = getattr(request, "kv_hints", None)
    return () if hints is None else hints.actions


def has_tokens(request: Request) -> bool:
    """True if the prompt consists of tokens, not of embeddings."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


# Status.


def is_running(request: Request) -> bool:
    """True if vLLM computes the request in its steps."""
    return request.status is RequestStatus.RUNNING


def waits_for_blocks(request: Request) -> bool:
    """True if vLLM admits the request as soon as its blocks are free and the connector lets it."""
    return request.status in _WAITS_FOR_BLOCKS


def needs_blocks(request: Request) -> bool:
    """True if the request waits without blocks, parked or not, or for its grammar.

    A request is also in one of these states after a load, failed or not. While it loads, it has the blocks for that.
    """
    return request.status in _NEEDS_BLOCKS


def waits_for_load(request: Request) -> bool:
    """True if vLLM believes that a load of the request is in flight: until it looks at the request after the end."""
    return request.status is RequestStatus.WAITING_FOR_REMOTE_KVS


def has_ended_well(request: Request) -> bool:
    """True if the request's answer is complete: neither aborted nor failed."""
    return request.status in _ENDED_WELL


def has_ended_by_error(request: Request) -> bool:
    """True if the request has ended because vLLM could not go on with it."""
    return request.status is RequestStatus.FINISHED_ERROR


# Parking.
#
# No connector can have a waiting request skipped before its prefix is looked up. But vLLM skips one whose grammar is
# not compiled yet: `Scheduler._handle_blocked_waiting_request` (v1/core/sched/scheduler.py:3191) returns False before
# the lookup for as long as a request with that status has no compiled grammar, so for ever if it has none at all. A
# request that ends is removed from its queue in any status.


def can_park(request: Request) -> bool:
    """True if `park` is possible: the request waits, and not for a grammar of its own, which would end the parking."""
    return (
        request.structured_output_request is None
        and request.status is RequestStatus.WAITING
    )


def park(request: Request) -> None:
    """Have vLLM skip a waiting request from now on, before it looks up its prefix."""
    request.status = _PARKED


def unpark(request: Request) -> None:
    """Have vLLM look at the request again; no-op if it has ended."""
    if request.status is _PARKED:
        request.status = RequestStatus.WAITING


# A prompt whose last tokens are left out.


def cut_prompt(request: Request, num_tokens: int) -> None:
    """Shorten the prompt of a request that was not scheduled yet to its first `num_tokens` tokens.

    Every copy of the prompt that `Request.__init__` makes (v1/request.py:142-232) is cut: the prompt, all tokens, which
    the view `all_token_ids` shows, and the hashes of blocks.

    Raises:
        LocalProtocolError: the prompt has no tokens.
    """
    prompt = request.prompt_token_ids
    if prompt is None:
        raise LocalProtocolError(f"req={request.request_id} has a prompt of embeddings")
    num_removed = len(prompt) - num_tokens
    # A copy: samples of one prompt share the list.
    request.prompt_token_ids = prompt[:num_tokens]
    del request._all_token_ids[num_tokens:]
    request.num_prompt_tokens = num_tokens
    # Hashes that include removed tokens: at most one a token, since a block has at least one.
    first_removed = max(0, len(request.block_hashes) - num_removed)
    del request.block_hashes[first_removed:]
    request.update_block_hashes()


# Usage.


def cached_tokens_of(request: Request) -> int | None:
    """The prompt's tokens that were in this engine's cache when the request was first scheduled.

    None if this vLLM does not tell, or the request has had its first token: then vLLM has sent the counts
    (`Request.take_prefill_stats`, v1/core/sched/scheduler.py:2208).
    """
    stats = getattr(request, "prefill_stats", None)
    cached = getattr(stats, "num_cached_tokens", None)
    if not isinstance(cached, int):
        return None
    return cached


class _ReportedStats(PrefillStats):
    """A request's `PrefillStats` that report another number of cached tokens when they are complete.

    The number is replaced in `finalize`, not at once: vLLM sets the counts again after a load that has failed
    (v1/core/sched/scheduler.py:1077), and completes them just before it sends them (:2210). The number of tokens that
    are new in the cache is derived from the true count before that, as in a sequential handover.
    """

    cached_elsewhere: int

    def finalize(self, num_cached_tokens: int) -> None:
        super().finalize(num_cached_tokens)
        self.num_cached_tokens = min(self.cached_elsewhere, self.num_prompt_tokens)


def report_cached_tokens(request: Request, cached_tokens: int) -> None:
    """Have a response's usage report as many cached tokens as the producer had, instead of what was loaded from it.

    In a sequential handover vLLM's front end reads the number in the params of the request when it arrives. With both
    legs at once it comes later, and the engine has no other way to the front end than a request's own counts.
    """
    counted = getattr(request, "prefill_stats", None)
    # Not `isinstance`: the counts may be replaced already, and another vLLM's subclass may count something else.
    if type(counted) is PrefillStats:
        reported = _ReportedStats(**vars(counted))
        reported.cached_elsewhere = cached_tokens
        request.prefill_stats = reported
