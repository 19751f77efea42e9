"""Panels of loads: times, bytes and failures."""

from __future__ import annotations

from scripts.dashboard_parts import (
    RANGE,
    Panel,
    Query,
    Row,
    mean,
    quantiles,
    rate,
    selector,
    total,
)

_READ_SPEED = f"{rate('nixl_bytes_transferred_sum')} / {rate('nixl_xfer_time_seconds_sum')}"
_RECOMPUTES = "kvferry_local_recomputes_total"
_POOL_USED = (
    f"max by (instance) ({selector('kvferry_staging_used_bytes')}) / "
    f"max by (instance) ({selector('kvferry_staging_pool_bytes')} > 0)"
)
_PEER_SECONDS = f"{rate('kvferry_peer_load_seconds_total', by='peer')} / {rate('kvferry_peer_loads_total', by='peer')}"

HANDOVER = Row(
    "Handover",
    (
        Panel(
            "Handover time",
            "From a prompt's arrival at the decoder until its blocks were loaded, a first contact included.",
            "s",
            quantiles("kvferry_handover_seconds"),
        ),
        Panel(
            "Load time",
            "From a load's order to its last byte. Far below the handover time: prompts wait in the scheduler.",
            "s",
            quantiles("kvferry_load_seconds"),
        ),
        Panel(
            "Where the time goes, mean",
            "What a handover is made of, in its order. The rest is a last look at the fence, and the report.",
            "s",
            (
                Query(mean("kvferry_order_wait_seconds"), "until it is ordered"),
                Query(mean("kvferry_load_queue_seconds"), "until its turn"),
                Query(mean("kvferry_load_connecting_seconds"), "connecting to the producer"),
                Query(mean("kvferry_load_fence_seconds"), "until the producer is ready"),
                Query(mean("kvferry_load_read_seconds"), "reading"),
            ),
            stacked=True,
        ),
        Panel(
            "Inside reading, mean",
            "Parts of reading, which overlap: relayout is of staged loads alone.",
            "s",
            (
                Query(mean("kvferry_load_read_seconds"), "reading"),
                Query(mean("nixl_xfer_time_seconds"), "transfer"),
                Query(mean("nixl_post_time_seconds"), "post"),
                Query(mean("kvferry_relayout_seconds"), "relayout"),
            ),
        ),
        Panel(
            "First contacts",
            "Time of a description, a plan and a first read; and how many there are: more than at a start, and engines "
            "restart or are forgotten.",
            "s",
            (
                *quantiles("kvferry_handshake_seconds", (0.5, 0.99)),
                Query(rate("kvferry_handshake_seconds_count"), "a second"),
            ),
        ),
        Panel(
            "In flight and waiting",
            "Loads that were ordered and have not ended, and prompts whose load has not been ordered.",
            "short",
            (
                Query(total("kvferry_loads_now", by="instance"), "{{instance}} in flight"),
                Query(total("kvferry_prompts_waiting_now", by="instance"), "{{instance}} waiting"),
            ),
        ),
        Panel(
            "Handover times, all",
            "How many handovers took how long.",
            "s",
            (
                Query(
                    f"sum by (le) (increase({selector('kvferry_handover_seconds_bucket')}[{RANGE}]))",
                    "{{le}}",
                ),
            ),
            kind="heatmap",
            width=12,
        ),
        Panel(
            "Loads by engine",
            "Prompts ordered to be loaded, and those of them that read a conversation's last turn from its decoder.",
            "ops",
            (
                Query(rate("kvferry_loads_total", by="instance"), "{{instance}}"),
                Query(rate("kvferry_turn_loads_total", by="instance"), "{{instance}} turns"),
            ),
            width=12,
        ),
    ),
)

TRANSFER = Row(
    "Transfer",
    (
        Panel("Transfer time", "Of a load, as NIXL measured it.", "s", quantiles("nixl_xfer_time_seconds")),
        Panel(
            "Post time", "To post a load's transfers, as NIXL measured it.", "s", quantiles("nixl_post_time_seconds")
        ),
        Panel(
            "Speed of reads",
            "Bytes over transfer time: what a load gets while it reads, not what the link carries.",
            "Bps",
            (Query(_READ_SPEED, "while reading"),),
        ),
        Panel(
            "Bytes",
            "By decoder as NIXL counted them, and all by the transfer plans of good loads.",
            "Bps",
            (
                Query(rate("nixl_bytes_transferred_sum", by="instance"), "{{instance}}"),
                Query(rate("kvferry_planned_bytes_total"), "all, planned"),
            ),
        ),
        Panel("Bytes of a load", "As NIXL counted them.", "bytes", quantiles("nixl_bytes_transferred")),
        Panel(
            "Run length",
            "Mean bytes of a load that lie together on both sides. Short ones are staged where that is cheaper; "
            "`kvferry plan` says what would make runs longer.",
            "bytes",
            quantiles("kvferry_run_bytes", (0.1, 0.5, 0.9)),
        ),
        Panel(
            "Loads by plan",
            "`direct`: read into the cache. `staged`: through the pool. `none`: this worker lacks nothing.",
            "ops",
            (Query(rate("kvferry_placed_loads_total", by="plan"), "{{plan}}"),),
            stacked=True,
        ),
        Panel(
            "Staged bytes and the pool",
            "Share of the bytes that go through the pool, and of the pool that is in use, of the worker with most.",
            "percentunit",
            (
                Query(f"{rate('kvferry_staged_bytes_total')} / {rate('kvferry_planned_bytes_total')}", "staged"),
                Query(_POOL_USED, "{{instance}} pool"),
            ),
        ),
        Panel(
            "Descriptors of a load",
            "As NIXL counted them: each costs microseconds.",
            "short",
            quantiles("nixl_num_descriptors"),
        ),
        Panel(
            "Merging",
            "Descriptors by the plan for each that NIXL counted: how many neighbours were merged.",
            "short",
            (
                Query(
                    f"{rate('kvferry_planned_descriptors_total')} / {rate('nixl_num_descriptors_sum')}",
                    "planned for each",
                ),
            ),
        ),
        Panel(
            "Failed transfers and notifications",
            "Loads that failed, by worker, and notifications that could not be sent.",
            "ops",
            (
                Query(rate("nixl_num_failed_transfers_total", by="instance"), "{{instance}} transfers"),
                Query(rate("nixl_num_failed_notifications_total", by="instance"), "{{instance}} notifications"),
            ),
        ),
    ),
)

PRODUCERS = Row(
    "Producers, as their readers see them",
    (
        Panel(
            "Loads by producer",
            "Good loads: how the router spreads prompts. `other`: producers beyond `max_peer_labels`.",
            "ops",
            (Query(rate("kvferry_peer_loads_total", by="peer"), "{{peer}}"),),
            stacked=True,
        ),
        Panel(
            "Bytes by producer",
            "By the transfer plans of good loads.",
            "Bps",
            (Query(rate("kvferry_peer_bytes_total", by="peer"), "{{peer}}"),),
            stacked=True,
        ),
        Panel(
            "Time of a load by producer, mean",
            "One that is above the others: that engine, its host or its link.",
            "s",
            (Query(_PEER_SECONDS, "{{peer}}"),),
        ),
        Panel(
            "Failed loads by producer",
            "All from one: look there. `other` are also those from which nothing good ever came.",
            "ops",
            (Query(rate("kvferry_peer_failed_loads_total", by="peer"), "{{peer}}"),),
            stacked=True,
            width=12,
        ),
        Panel(
            "Producers known",
            "Ready to be read from, of the worker with most.",
            "short",
            (Query(f"max by (instance) ({selector('kvferry_peers_now')})", "{{instance}}"),),
            width=12,
        ),
    ),
)

FAILURES = Row(
    "Recomputes and failures",
    (
        Panel(
            "Computed here instead, by reason",
            "Prompts that came with params of another engine. docs/troubleshooting.md has every reason.",
            "ops",
            (Query(rate(_RECOMPUTES, by="reason"), "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            "Failed loads, by reason",
            "Counted by every worker that failed. docs/troubleshooting.md has every reason.",
            "ops",
            (Query(rate("kvferry_failed_loads_total", by="reason"), "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            "Failed requests",
            "Requests that ended with an error because their load failed; only under the policy `fail`.",
            "ops",
            (Query(rate("kvferry_failed_requests_total", by="instance"), "{{instance}}"),),
        ),
    ),
)
