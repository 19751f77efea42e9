"""Panels of leases, turns, quarantined blocks and the side channel."""

from __future__ import annotations

from scripts.dashboard_parts import (
    Panel,
    Query,
    Row,
    growth,
    quantiles,
    rate,
    selector,
    total,
)

LEASES = Row(
    "Leases of prompts (producers)",
    (
        Panel(
            "Opened and not",
            "Leases opened, refused because no slot was free, and prompts that cannot be decoded elsewhere.",
            "ops",
            (
                Query(rate("kvferry_leases_opened_total"), "opened"),
                Query(rate("kvferry_leases_refused_total"), "refused"),
                Query(rate("kvferry_prefills_kept_total"), "kept"),
            ),
        ),
        Panel(
            "How they end",
            "`done`: read. `release`: given back. `expired`: no consumer read. `evicted`: others needed the blocks.",
            "ops",
            (Query(rate("kvferry_leases_released_total", by="how"), "{{how}}"),),
            stacked=True,
        ),
        Panel(
            "Leases now, and slots",
            "Of prompts and of turns: those whose requests run, and those whose blocks are held.",
            "short",
            (
                Query(total("kvferry_leases_held_now", by="instance"), "{{instance}} held"),
                Query(total("kvferry_leases_computing_now", by="instance"), "{{instance}} computing"),
                Query(total("kvferry_lease_slots", by="instance"), "{{instance}} slots"),
            ),
        ),
        Panel(
            "Blocks of leases, and the cache",
            "Share of the blocks that held leases refer to; and vLLM's own share in use, which counts them.",
            "percentunit",
            (
                Query(f"max by (instance) ({selector('kvferry_leased_fraction_now')})", "{{instance}} leases"),
                Query(f"max by (instance) ({selector('kv_cache_usage_perc')})", "{{instance}} cache"),
            ),
        ),
        Panel(
            "Blocks of leases",
            "Blocks that held leases refer to.",
            "short",
            (Query(total("kvferry_leased_blocks_now", by="instance"), "{{instance}}"),),
        ),
        Panel(
            "Seconds left of a lease",
            "When a prompt's lease was read or given back. Near 0: decoders come just in time, or too late.",
            "s",
            quantiles("kvferry_lease_seconds_left", (0.01, 0.1, 0.5)),
        ),
        Panel(
            "Too late",
            "Leases that ran out, and what was said about leases that were over or never were.",
            "ops",
            (
                Query(rate("nixl_num_kv_expired_reqs_total"), "ran out"),
                Query(rate("nixl_num_notifications_after_expiry_total"), "notifications after the end"),
                Query(rate("kvferry_unknown_renewals_total"), "unknown renewals"),
                Query(rate("kvferry_unknown_releases_total"), "unknown releases"),
            ),
            width=12,
        ),
        Panel(
            "What consumers say",
            "Renewals of other engines' leases, and leases that were given back unread.",
            "ops",
            (
                Query(rate("kvferry_heartbeats_total", by="instance"), "{{instance}} renewals"),
                Query(rate("kvferry_leases_given_back_total", by="instance"), "{{instance}} given back"),
            ),
            width=12,
        ),
    ),
)

TURNS = Row(
    "Turns (decoders that offer their answers)",
    (
        Panel(
            "Offered and not",
            "Leases opened for answers, answers offered, and answers that could not be, because no slot was free.",
            "ops",
            (
                Query(rate("kvferry_turns_opened_total"), "opened"),
                Query(rate("kvferry_turns_offered_total"), "offered"),
                Query(rate("kvferry_turns_refused_total"), "refused"),
            ),
            width=12,
        ),
        Panel(
            "How they end",
            "`done`: read by the next turn. `expired`: it did not come. `evicted`: others needed the blocks.",
            "ops",
            (Query(rate("kvferry_turns_released_total", by="how"), "{{how}}"),),
            stacked=True,
            width=12,
        ),
    ),
)

QUARANTINE = Row(
    "Quarantine and bugs",
    (
        Panel(
            "In quarantine now",
            "Requests whose load failed and whose blocks may still be written, and these blocks.",
            "short",
            (
                Query(total("kvferry_quarantined_requests_now", by="instance"), "{{instance}} requests"),
                Query(total("kvferry_quarantined_blocks_now", by="instance"), "{{instance}} blocks"),
            ),
        ),
        Panel(
            "Oldest in quarantine",
            "Longer than a minute or two: a producer stands still in the middle of a read.",
            "s",
            (Query(f"max by (instance) ({selector('kvferry_oldest_quarantine_seconds')})", "{{instance}}"),),
        ),
        Panel(
            "Into quarantine",
            "Loads and blocks by worker, and failed reads whose memory came back only after the grace.",
            "ops",
            (
                Query(rate("kvferry_quarantined_loads_total"), "loads"),
                Query(rate("kvferry_quarantined_blocks_total"), "blocks"),
                Query(rate("kvferry_read_graces_over_total"), "graces over"),
            ),
        ),
        Panel(
            "Bugs reported",
            "Wrong sums and unreadable orders, by engine. Report the log line.",
            "short",
            (
                Query(growth("kvferry_integrity_errors_total", by="instance"), "{{instance}} integrity"),
                Query(growth("kvferry_lost_orders_total", by="instance"), "{{instance}} orders"),
            ),
            width=24,
        ),
    ),
)

SIDE_CHANNEL = Row(
    "Side channel",
    (
        Panel(
            "Handshakes served",
            "Descriptions given to other engines: many after a restart, then few.",
            "ops",
            (Query(rate("kvferry_handshakes_served_total", by="instance"), "{{instance}}"),),
        ),
        Panel(
            "Refused connections, by reason",
            "`other_secret`, `one_sided`: no secret in common. `unfinished`: probes. `too_many`: a flood.",
            "ops",
            (Query(rate("kvferry_side_channel_refusals_total", by="reason"), "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            "What went wrong",
            "Messages that could not be sent, came too fast, could not be used, or were not kvferry's.",
            "ops",
            (
                Query(rate("kvferry_side_channel_errors_total"), "not sent"),
                Query(rate("kvferry_dropped_messages_total"), "dropped"),
                Query(rate("kvferry_bad_frames_total"), "bad frames"),
                Query(rate("kvferry_bad_notifications_total"), "bad notifications"),
            ),
        ),
    ),
)
