"""Every metric of kvferry: its name, its meaning and the values of its label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.link.guarded_socket import REASONS
from kvferry.protocol.orders import FailureReason
from kvferry.protocol.queries import PrefixRefusal

# Up to the default of `load_timeout_s`.
_SECONDS = (
    0.0002,
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
    60.0,
)
# Powers of 4: 16 KiB to 16 GiB for a load, 256 B to 256 MiB for one descriptor.
_BYTES = tuple(float(1 << power) for power in range(14, 37, 2))
_RUNS = tuple(float(1 << power) for power in range(8, 29, 2))
_LEFT_SECONDS = (
    0.0,
    1.0,
    2.0,
    5.0,
    10.0,
    15.0,
    20.0,
    25.0,
    30.0,
    45.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
_COUNTS = tuple(float(1 << power) for power in range(0, 21, 2))

RECOMPUTE_REASONS = (
    "foreign_params",
    "invalid_params",
    "other_prompt",
    "lease_in_use",
    "lease_over",
    "local_engine",
    "host_not_allowed",
    "prompt_embeds",
    "prompt_unknown",
    "prefill_failed",
    "no_lease",
    "too_many_queries",
    "window_edge",
    "wrong_role",
    "turns_off",
    "session_update",
    "below_threshold",
    "not_wanted",
    "load_failed",
    "blocks_pinned",
    "reset",
)
PREFIX_REASONS = (
    "invalid_source",
    "host_not_allowed",
    "local_engine",
    "too_many_queries",
    "below_threshold",
    "local_hit",
    "no_prefix",
    "no_lease",
    "prefix_off",
    "no_answer",
    "too_late",
    "invalid_answer",
    "other_prompt",
    "lease_in_use",
    "lease_over",
    "window_edge",
    "not_wanted",
    "load_failed",
    "blocks_pinned",
    "reset",
)
STREAM_REFUSALS = ("rows", "engine", "consumer", "window")
RELEASE_WAYS = (
    "done",
    "release",
    "expired",
    "abandoned",
    "evicted",
    "reset",
    "shutdown",
)
PLACINGS = ("direct", "staged", "mapped", "mixed", "none")
PEER = "peer"
"""The label of metrics by producer."""
OTHER_PEERS = "other"
"""The label of all producers without a label of their own (`PeerLabels`)."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A counter, a gauge or a histogram.

    Attributes:
        label: the name of its label; empty for a metric without one.
        values: the values of the label that exist from the start. Further ones of `PEER` are created with the loads.
        buckets: of a histogram.
    """

    exported: str
    doc: str
    label: str = ""
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _by_peer(exported: str, doc: str) -> Metric:
    return Metric(exported, doc, PEER, (OTHER_PEERS,))


# Metrics with the meaning of one of vLLM's NixlConnector have its name (`nixl_…`), so that dashboards keep working.
COUNTERS: Mapping[str, Metric] = {
    "loads": Metric(
        "kvferry_loads", "Prompts whose load from another engine was ordered."
    ),
    "turn_loads": Metric(
        "kvferry_turn_loads", "Loads that read a last turn from its decoder."
    ),
    "prefix_loads": Metric(
        "kvferry_prefix_loads",
        "Loads that read the first part of a prompt from an engine that had it in its cache.",
    ),
    "prefix_tokens_loaded": Metric(
        "kvferry_prefix_tokens_loaded",
        "Tokens of prefixes that were loaded from other engines, by good loads.",
    ),
    "prefix_queries": Metric(
        "kvferry_prefix_queries",
        "Prompts for which other engines were asked for the first part.",
    ),
    "prefixes_found": Metric(
        "kvferry_prefixes_found",
        "Prompts of which a queried engine had a long enough first part, in time.",
    ),
    "prefixes_not_pulled": Metric(
        "kvferry_prefixes_not_pulled",
        "Prompts whose first part was computed here although sources for it were named or configured.",
        "reason",
        PREFIX_REASONS,
    ),
    "planned_bytes": Metric(
        "kvferry_planned_bytes",
        "Bytes of good loads, by the transfer plan: staged, mapped and read in place.",
    ),
    "planned_descriptors": Metric(
        "kvferry_planned_descriptors",
        "Descriptors of good loads, by the transfer plan, before neighbours are merged.",
    ),
    "staged_bytes": Metric(
        "kvferry_staged_bytes", "Planned bytes that went through the staging pool."
    ),
    "mapped_bytes": Metric(
        "kvferry_mapped_bytes",
        "Planned bytes that were copied from the mapped memory of a producer on the same host, without NIXL.",
    ),
    "early_bytes": Metric(
        "kvferry_early_bytes",
        "Planned bytes that were read before the prefill had ended, while it computed the rest.",
    ),
    "placed_loads": Metric(
        "kvferry_placed_loads",
        "Good loads, by worker and how the plan places their reads: in the cache (direct), in the staging pool, copied "
        "from mapped memory, several of these (mixed), or none, since this worker lacks nothing.",
        "plan",
        PLACINGS,
    ),
    "peer_loads": _by_peer(
        "kvferry_peer_loads",
        "Good loads, by worker and producer; the first `max_peer_labels` producers have names.",
    ),
    "peer_bytes": _by_peer(
        "kvferry_peer_bytes",
        "Bytes of good loads, by producer and by the transfer plan.",
    ),
    "peer_load_s": _by_peer(
        "kvferry_peer_load_seconds",
        "Sum of the seconds of good loads from order to last byte, by producer.",
    ),
    "peer_failed_loads": _by_peer(
        "kvferry_peer_failed_loads",
        "Failed loads, by worker and producer; a producer has a name after its first good load.",
    ),
    "local_recomputes": Metric(
        "kvferry_local_recomputes",
        "Prompts that came with params of a remote prefill or of a last turn and were computed here instead.",
        "reason",
        RECOMPUTE_REASONS,
    ),
    "failed_requests": Metric(
        "kvferry_failed_requests",
        "Requests that vLLM ended with an error because their load failed (policy `fail`).",
    ),
    "failed_loads": Metric(
        "kvferry_failed_loads",
        "Failed loads, by worker and reason.",
        "reason",
        tuple(
            reason.value
            for reason in FailureReason
            if reason is not FailureReason.ABORTED
        ),
    ),
    "aborted_loads": Metric(
        "kvferry_aborted_loads",
        "Loads that were cancelled because their request was aborted, by worker.",
    ),
    "failed_transfers": Metric("nixl_num_failed_transfers", "Failed loads, by worker."),
    "failed_notifications": Metric(
        "nixl_num_failed_notifications", "Notifications that could not be sent."
    ),
    "expired": Metric(
        "nixl_num_kv_expired_reqs", "Leases that expired before their blocks were read."
    ),
    "quarantined_loads": Metric(
        "kvferry_quarantined_loads",
        "Failed loads whose blocks might still have been written, by worker.",
    ),
    "quarantined_blocks": Metric(
        "kvferry_quarantined_blocks",
        "Blocks of failed loads that might still have been written, by worker.",
    ),
    "stalled_heartbeats": Metric(
        "kvferry_stalled_heartbeats",
        "Heartbeats in which nothing was computed, although requests waited, blocks were free or kept by ended loads, "
        "and no load was in flight.",
    ),
    "graces_over": Metric(
        "kvferry_read_graces_over",
        "Failed reads whose memory was freed after `failed_read_grace_s`, without proof that they had ended.",
    ),
    "late_notifications": Metric(
        "nixl_num_notifications_after_expiry",
        "Notifications about leases that had ended.",
    ),
    "bad_notifications": Metric(
        "kvferry_bad_notifications", "Notifications not in kvferry's format."
    ),
    "leases_opened": Metric(
        "kvferry_leases_opened", "Leases opened for prompts to be decoded elsewhere."
    ),
    "leases_refused": Metric(
        "kvferry_leases_refused", "Prompts served without a lease: no slot was free."
    ),
    "streams": Metric(
        "kvferry_streams",
        "Prompts that a consumer could read while they were computed.",
    ),
    "stream_restarts": Metric(
        "kvferry_stream_restarts",
        "Times that a prompt was preempted while a consumer read it, and the consumer had to begin again.",
    ),
    "streams_refused": Metric(
        "kvferry_streams_refused",
        "Prompts queried while they were computed that could be read only when complete: all `rows` were used, this "
        "`engine` or the `consumer` cannot stream or is set not to, or a `window` may not reach back far enough for "
        "the consumer's larger blocks.",
        "reason",
        STREAM_REFUSALS,
    ),
    "prefills_kept": Metric(
        "kvferry_prefills_kept",
        "Prompts that were to be decoded elsewhere and cannot: streamed input, embeddings, or no token to leave out.",
    ),
    "leases_released": Metric(
        "kvferry_leases_released",
        "Ended leases of prompts, by how they ended; `abandoned`: never held; `evicted`: their blocks were needed.",
        "how",
        RELEASE_WAYS,
    ),
    "turns_opened": Metric(
        "kvferry_turns_opened", "Leases opened for answers that may be offered."
    ),
    "turns_refused": Metric(
        "kvferry_turns_refused", "Answers that are not offered: no slot was free."
    ),
    "turns_offered": Metric(
        "kvferry_turns_offered", "Answers offered to the next turn."
    ),
    "turns_released": Metric(
        "kvferry_turns_released",
        "Ended leases of turns, by how they ended; `abandoned`: never offered; `evicted`: their blocks were needed.",
        "how",
        RELEASE_WAYS,
    ),
    "prefixes_opened": Metric(
        "kvferry_prefixes_opened",
        "Leases opened for prefixes that another engine reads from this engine's cache.",
    ),
    "prefixes_refused": Metric(
        "kvferry_prefixes_refused",
        "Queries for prefixes that got no lease: no prefix is cached, leases of prefixes have used up their share of "
        "blocks or slots, or the lease had ended when the query was repeated.",
        "reason",
        tuple(
            reason.value
            for reason in PrefixRefusal
            if reason is not PrefixRefusal.PREFIX_OFF
        ),
    ),
    "prefixes_released": Metric(
        "kvferry_prefixes_released",
        "Ended leases of prefixes, by how they ended; `evicted`: their blocks or slots were needed.",
        "how",
        RELEASE_WAYS,
    ),
    "leases_given_back": Metric(
        "kvferry_leases_given_back",
        "Leases of other engines that were given back unread.",
    ),
    "heartbeats": Metric(
        "kvferry_heartbeats", "Renewals sent for other engines' leases."
    ),
    "renewals_unknown": Metric(
        "kvferry_unknown_renewals",
        "Renewals of leases that have ended or never existed.",
    ),
    "releases_unknown": Metric(
        "kvferry_unknown_releases",
        "Releases of leases that have ended or never existed.",
    ),
    "handshakes_served": Metric(
        "kvferry_handshakes_served", "Descriptions sent to other engines."
    ),
    "dropped_messages": Metric(
        "kvferry_dropped_messages",
        "Renewals and releases that came faster than this engine took them.",
    ),
    "bad_frames": Metric("kvferry_bad_frames", "Invalid messages on the side channel."),
    "lost_orders": Metric(
        "kvferry_lost_orders",
        "Steps whose orders a worker could not decode: a bug. Their loads fail, and the worker lacks their holds.",
    ),
    "side_channel_errors": Metric(
        "kvferry_side_channel_errors", "Messages that the side channel could not send."
    ),
    "side_channel_refusals": Metric(
        "kvferry_side_channel_refusals",
        "Refused connections to this engine's side channel: another secret, a secret at one end only (one_sided), "
        "closed before that was known (unfinished), or too many connections.",
        "reason",
        REASONS,
    ),
}

GAUGES: Mapping[str, Metric] = {
    "loads_now": Metric(
        "kvferry_loads_now", "Loads that were ordered and have not ended."
    ),
    "prompts_waiting_now": Metric(
        "kvferry_prompts_waiting_now",
        "Prompts with usable params whose load has not been ordered.",
    ),
    "leases_computing_now": Metric(
        "kvferry_leases_computing_now",
        "Leases of prompts, turns and prefixes whose blocks are not held yet.",
    ),
    "leases_held_now": Metric(
        "kvferry_leases_held_now",
        "Leases of prompts, turns and prefixes whose blocks are held.",
    ),
    "lease_slots": Metric("kvferry_lease_slots", "Leases that can be open at once."),
    "leased_blocks_now": Metric(
        "kvferry_leased_blocks_now", "Blocks that held leases refer to."
    ),
    "leased_fraction_now": Metric(
        "kvferry_leased_fraction_now",
        "Fraction of the cache's blocks that held leases refer to.",
    ),
    "staging_used_bytes": Metric(
        "kvferry_staging_used_bytes",
        "Bytes of the staging pool in use, on the worker with the most.",
    ),
    "staging_pool_bytes": Metric(
        "kvferry_staging_pool_bytes", "Bytes of a worker's staging pool."
    ),
    "peers_now": Metric(
        "kvferry_peers_now",
        "Producers that are connected and ready for reads, on the worker with the most.",
    ),
    "quarantined_requests_now": Metric(
        "kvferry_quarantined_requests_now",
        "Requests whose load failed and whose blocks may still be written.",
    ),
    "quarantined_blocks_now": Metric(
        "kvferry_quarantined_blocks_now",
        "Blocks of failed loads that are out of use, since they may still be written.",
    ),
    "oldest_quarantine_s": Metric(
        "kvferry_oldest_quarantine_seconds",
        "Seconds for which the oldest quarantined blocks have been out of use.",
    ),
}

HISTOGRAMS: Mapping[str, Metric] = {
    "transfer_s": Metric(
        "nixl_xfer_time_seconds",
        "Time of a load's transfers, measured by NIXL.",
        buckets=_SECONDS,
    ),
    "post_s": Metric(
        "nixl_post_time_seconds",
        "Time to post a load's transfers, measured by NIXL.",
        buckets=_SECONDS,
    ),
    "transferred_bytes": Metric(
        "nixl_bytes_transferred", "Bytes of a load, counted by NIXL.", buckets=_BYTES
    ),
    "descriptors": Metric(
        "nixl_num_descriptors",
        "Descriptors of a load, counted by NIXL.",
        buckets=_COUNTS,
    ),
    "run_bytes": Metric(
        "kvferry_run_bytes",
        "Mean length of a load's runs: bytes that are contiguous on both sides.",
        buckets=_RUNS,
    ),
    "load_s": Metric(
        "kvferry_load_seconds",
        "Time of a load from its order to its last byte.",
        buckets=_SECONDS,
    ),
    "order_wait_s": Metric(
        "kvferry_order_wait_seconds",
        "Time from a prompt's arrival until its load was ordered: it waits for blocks, or for a step.",
        buckets=_SECONDS,
    ),
    "prefix_wait_s": Metric(
        "kvferry_prefix_wait_seconds",
        "Time for which a prompt waited for answers about its first part.",
        buckets=_SECONDS,
    ),
    "prefix_saved_s": Metric(
        "kvferry_prefix_saved_seconds",
        "Time that a good load of a prefix saved, by the estimate of computing it.",
        buckets=_SECONDS,
    ),
    "queue_s": Metric(
        "kvferry_load_queue_seconds",
        "Time from a load's order until its worker began it, by worker.",
        buckets=_SECONDS,
    ),
    "connecting_s": Metric(
        "kvferry_load_connecting_seconds",
        "Time from a load's begin until its producer was connected and the device done with the blocks' last owner.",
        buckets=_SECONDS,
    ),
    "fence_s": Metric(
        "kvferry_load_fence_seconds",
        "Time of a load from connected until the fence showed that the producer was ready.",
        buckets=_SECONDS,
    ),
    "read_s": Metric(
        "kvferry_load_read_seconds",
        "Time of a load from ready until all bytes were read and in place.",
        buckets=_SECONDS,
    ),
    "relayout_s": Metric(
        "kvferry_relayout_seconds",
        "The part of a load's read time in which bytes were copied from the staging pool into place.",
        buckets=_SECONDS,
    ),
    "handshake_s": Metric(
        "kvferry_handshake_seconds",
        "Time of a handshake with a producer, by worker: its description, the plan and a first read.",
        buckets=_SECONDS,
    ),
    "lease_left_s": Metric(
        "kvferry_lease_seconds_left",
        "Seconds left of a prompt's lease when this engine learned that it had been read or released.",
        buckets=_LEFT_SECONDS,
    ),
    "handover_s": Metric(
        "kvferry_handover_seconds",
        "Time from a prompt's arrival until its blocks were loaded.",
        buckets=_SECONDS,
    ),
}
