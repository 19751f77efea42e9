"""The guards behind the nine promises, how each is switched off, and the tests that must then fail.

    KVFERRY_GUARD_OFF=mac python -m pytest -p tests.faults.guards_off tests/worker/engines/test_bad_orders.py

A guard is switched off by putting something else in the place of one function of the product. This module imports
nothing of the product before that.
"""

from __future__ import annotations

from tests.faults import switches
from tests.faults.switches import Guard

_ENGINES = "tests/worker/engines"
_TAKEN_BACK = "tests/engine_core/test_taken_back.py"
_WITHDRAWAL = f"{_ENGINES}/test_withdrawal.py"
_SLEEP = "tests/engine_core/test_sleep.py"
_PREFIX_LEASES = "tests/engine_core/test_prefix_leases.py"
_PREFIX_PULLS = "tests/engine_core/test_prefix_pulls.py"

GUARDS = (
    Guard(
        "fence-after",
        "the slot is read again after the data",
        (1, 2, 9),
        "kvferry.worker.loads.load:LeaseFence.check_after",
        switches.no_steps,
        (
            f"{_ENGINES}/test_fence.py::test_a_load_whose_blocks_were_given_away_during_the_read_is_never_good[nixl]",
            f"{_ENGINES}/test_fence.py::test_a_lease_that_computes_again_after_the_read_is_no_good_either",
            f"{_PREFIX_PULLS}::test_a_prefix_that_is_rewritten_between_the_two_readings_is_not_believed",
        ),
    ),
    Guard(
        "fence-before",
        "the slot is read before the data",
        (2, 9),
        "kvferry.worker.loads.load:LeaseFence.wait_until_ready",
        switches.no_steps,
        (
            f"{_ENGINES}/test_fence.py::test_a_lease_that_ended_before_the_read_is_not_read_from",
            f"{_PREFIX_PULLS}::test_a_prefix_that_was_rewritten_before_it_is_read_is_not_read",
        ),
    ),
    Guard(
        "fence-ready",
        "only READY is good after the data",
        (1,),
        "kvferry.worker.loads.load:LeaseFence.check_after",
        switches.computing_will_do,
        (
            f"{_ENGINES}/test_fence.py::test_a_lease_that_computes_again_after_the_read_is_no_good_either",
        ),
    ),
    Guard(
        "slot-cleared",
        "a slot is cleared before its blocks are given away",
        (1, 2),
        "kvferry.worker.leases:LeaseTable._clear",
        switches.slot_stays,
        (
            f"{_ENGINES}/test_fence.py::test_a_lease_that_ended_before_the_read_is_not_read_from[memory]",
        ),
    ),
    Guard(
        "ready",
        "a slot says READY when the device has finished with the blocks, not earlier",
        (1,),
        "kvferry.worker.leases:LeaseTable.advance",
        switches.ready_at_once,
        (
            f"{_ENGINES}/test_good_loads.py::test_a_slot_says_ready_only_when_the_device_has_finished_with_the_blocks",
        ),
    ),
    Guard(
        "progress",
        "a slot reports the tokens of a step when the device has finished it, not earlier",
        (1,),
        "kvferry.worker.leases:ServedStream.take_tokens",
        switches.report_at_once,
        (
            "tests/worker/test_stream_rows.py::test_tokens_are_reported_step_by_step_while_several_are_in_flight",
        ),
    ),
    Guard(
        "preempted",
        "a prompt that is preempted while it is read goes on under another epoch",
        (1, 2),
        "kvferry.scheduler.producer.ledger:PublishedStreams.restart",
        switches.nothing,
        (
            "tests/faults/test_fence_attack.py::"
            "test_every_load_of_a_prompt_that_was_preempted_while_it_was_read_ends_with_the_right_bytes[direct]",
        ),
    ),
    Guard(
        "unsettled",
        "nothing of a request is published while a load within the step may turn out to have failed",
        (1,),
        "kvferry.connector.scheduler_side.taken_back:TakeBacks.is_unsettled",
        switches.always(False),
        (
            f"{_TAKEN_BACK}::test_a_decoder_that_reads_at_once_never_gets_what_a_failed_load_left"
            "[in one step-in turn-recompute]",
            f"{_TAKEN_BACK}::test_a_decoder_that_reads_at_once_never_gets_what_a_failed_load_left"
            "[in parts-overlapping-fail]",
        ),
    ),
    Guard(
        "raised-step",
        "nothing is readable that a step which raised was to write",
        (1,),
        "kvferry.connector.worker_side.side:StepWatch.has_raised",
        switches.always(False),
        (
            "tests/engine_core/test_raised_steps.py::test_nothing_of_a_step_that_raised_is_read"
            "[in one step-in turn-first runner]",
            "tests/engine_core/test_raised_steps.py::test_nothing_of_a_step_that_raised_is_read"
            "[in parts-overlapping-second runner]",
        ),
    ),
    Guard(
        "taken-back",
        "what relies on blocks that were not filled is not offered, nor hit by later prompts",
        (1,),
        "kvferry.connector.scheduler_side.tickets:TicketBuilder.taken_back",
        switches.nothing,
        (
            f"{_TAKEN_BACK}::test_a_prompt_is_not_hit_whose_load_failed_and_that_nobody_computes_again",
            f"{_TAKEN_BACK}::test_a_report_that_comes_too_late_ends_the_lease",
        ),
    ),
    Guard(
        "device-mark",
        "nothing is read into blocks that the device may still write",
        (1,),
        "kvferry.worker.loads.load:Load.steps",
        switches.load_at_once,
        (
            f"{_ENGINES}/test_good_loads.py::test_nothing_is_read_into_blocks_that_the_device_may_still_write",
        ),
    ),
    Guard(
        "digests",
        "matched tokens end at the last equal digest",
        (1,),
        "kvferry.connector.scheduler_side.intake:shared_tokens",
        switches.whatever_comes,
        (
            "tests/engine_core/test_consumer.py::"
            "test_one_params_object_over_a_batch_serves_only_the_prompt_that_it_was_made_for[b]",
            "tests/engine_core/test_consumer.py::test_a_turn_that_was_tokenised_anew_takes_what_it_certainly_shares",
        ),
    ),
    Guard(
        "mac",
        "params have the MAC of the engine that wrote them",
        (1,),
        "kvferry.worker.loads.load:check_params_mac",
        switches.nothing,
        (
            f"{_ENGINES}/test_bad_orders.py::test_params_that_a_client_has_changed_fail_by_their_mac",
        ),
    ),
    Guard(
        "epochs",
        "a lease is named by its slot and its epoch",
        (1, 6),
        "kvferry.worker.leases:LeaseTable._find",
        switches.any_epoch,
        (
            "tests/worker/test_leases.py::test_orders_of_a_former_lease_do_not_touch_the_next_one_of_the_slot",
            f"{_ENGINES}/test_notifications.py::test_a_guessed_epoch_among_a_thousand_frees_nothing",
        ),
    ),
    Guard(
        "tails",
        "what a load did not write of its blocks is zeroed",
        (1,),
        "kvferry.worker.loads.load:TailZeroing.zero",
        switches.nothing,
        (
            f"{_ENGINES}/test_good_loads.py::test_a_load_brings_every_byte_and_both_sides_are_notified_once",
        ),
    ),
    Guard(
        "quarantine",
        "a failed load's blocks are named while anything may write them",
        (2,),
        "kvferry.worker.loads.load:Load.settle",
        switches.always_safe,
        (
            f"{_ENGINES}/test_deadlines.py::"
            "test_a_stuck_load_is_reported_at_once_and_its_blocks_are_named_until_its_read_has_ended",
        ),
    ),
    Guard(
        "pinned",
        "blocks that are named so are kept out of the pool",
        (2,),
        "kvferry.scheduler.consumer.ledger:QuarantinedBlocks._pin",
        switches.pin_nothing,
        (
            "tests/engine_core/test_quarantined_blocks.py::test_the_blocks_stay_out_of_the_pool_until_the_transfer_is_dead",
        ),
    ),
    Guard(
        "admission",
        "a failed load, or one that waits for pinned blocks, lets the requests behind it pass",
        (6,),
        "kvferry.connector.scheduler_side.admission:Admission.must_wait",
        switches.always(False),
        (
            "tests/engine_core/test_stalls.py::"
            "test_a_prompt_that_cannot_fit_beside_pinned_blocks_lets_others_pass_until_they_return",
            "tests/engine_core/test_stalls.py::"
            "test_several_failed_loads_of_one_producer_that_stands_still_let_a_short_prompt_pass",
        ),
    ),
    Guard(
        "distinct-done",
        "a worker that notifies twice counts once",
        (2,),
        "kvferry.worker.leases:LeaseTable.done",
        switches.count_messages,
        (
            "tests/worker/test_leases.py::test_a_worker_that_repeats_itself_does_not_stand_for_its_sibling",
            f"{_ENGINES}/test_notifications.py::"
            "test_one_worker_that_repeats_itself_does_not_free_what_its_sibling_still_reads",
        ),
    ),
    Guard(
        "expiry",
        "a lease without renewals ends",
        (3,),
        "kvferry.link.awake_clock:AwakeClock.wind",
        switches.always(0.0),
        (
            "tests/scheduler/test_lease_clock.py::test_the_clock_starts_when_the_request_has_ended",
            "tests/engine_core/test_engine_loop.py::"
            "test_an_unclaimed_lease_expires_in_time_although_the_engine_has_no_requests",
        ),
    ),
    Guard(
        "deadline",
        "a load has a deadline",
        (3,),
        "kvferry.worker.loads.state:Deadline.missed",
        switches.nothing,
        (
            f"{_ENGINES}/test_deadlines.py::"
            "test_a_load_of_a_producer_that_never_finishes_misses_its_deadline_and_leaves_nothing_alive",
        ),
    ),
    Guard(
        "aborts",
        "an abort ends the load, so that no producer can keep its blocks",
        (6,),
        "kvferry.worker.loads.runner:LoadRunner.cancel",
        switches.nothing,
        (
            f"{_ENGINES}/test_aborted_loads.py::"
            "test_what_waits_without_a_read_in_flight_frees_its_blocks_at_once[its producer]",
        ),
    ),
    Guard(
        "longest",
        "no progress holds a load for ever",
        (6,),
        "kvferry.worker.loads.state:Deadline.longest_missed",
        switches.nothing,
        (
            f"{_ENGINES}/test_waiting_loads.py::"
            "test_a_producer_that_changes_a_slot_for_ever_does_not_hold_a_load_for_ever",
        ),
    ),
    Guard(
        "shares",
        "a peer that stands still never takes the last of the staging pool",
        (6,),
        "kvferry.worker.staging.pool:StagingPool._is_over_share",
        switches.always(False),
        (
            "tests/worker/test_staging_pool.py::test_peers_that_stand_still_leave_room_for_the_next_however_many_they_are",
        ),
    ),
    Guard(
        "former-lives",
        "state of an engine's former life is dropped when it comes back",
        (4,),
        "kvferry.worker.peers.registry:PeerRegistry._retire_former_lives",
        switches.nothing,
        (
            "tests/worker/peers/test_peer_registry.py::test_a_former_life_is_kept_while_reads_from_it_are_under_way",
            f"{_ENGINES}/test_peers.py::"
            "test_an_engine_that_restarted_is_connected_anew_and_its_former_life_is_forgotten[nixl]",
        ),
    ),
    Guard(
        "lost-peers",
        "a peer that is lost is connected anew",
        (4,),
        "kvferry.worker.peers.registry:PeerRegistry.lost",
        switches.nothing,
        (
            f"{_ENGINES}/test_peers.py::test_a_peer_that_dies_during_a_read_fails_the_load_at_once",
        ),
    ),
    Guard(
        "boots",
        "params of a former life are refused",
        (4,),
        "kvferry.worker.peers.first_contact:FirstContact._plan",
        switches.accept_any_boot,
        (
            f"{_ENGINES}/test_peers.py::test_params_of_a_former_life_are_refused_when_only_the_new_one_is_known",
        ),
    ),
    Guard(
        "boots-received",
        "messages to a former life are ignored",
        (4, 6),
        "kvferry.scheduler.producer.ledger:ProducerLedger.receive",
        switches.skip_the_boot_check,
        (
            "tests/scheduler/test_step.py::test_messages_to_another_boot_are_counted_and_change_nothing",
        ),
    ),
    Guard(
        "renewals",
        "a renewal gives a lease its full time again",
        (5,),
        "kvferry.scheduler.producer.ledger:ProducerLedger.renew",
        switches.renew_nothing,
        (
            "tests/scheduler/test_lease_clock.py::test_a_renewal_gives_the_full_time_again",
            "tests/scheduler/test_lease_clock.py::"
            "test_a_consumer_that_stalls_for_less_than_the_lease_minus_one_heartbeat_loses_nothing",
        ),
    ),
    Guard(
        "awake",
        "a lease's clock stands while its producer does",
        (5,),
        "kvferry.link.awake_clock:AwakeClock.wind",
        switches.count_sleep,
        (
            "tests/scheduler/test_lease_clock.py::test_a_pause_of_the_producer_does_not_expire_leases",
        ),
    ),
    Guard(
        "awake-loads",
        "the deadlines of loads stand while their consumer does",
        (5,),
        "kvferry.link.awake_clock:AwakeClock.wind",
        switches.count_sleep,
        (
            "tests/worker/test_load_runner.py::test_a_pause_of_this_process_fails_no_load_and_time_awake_does",
        ),
    ),
    Guard(
        "listener",
        "nothing that arrives ends the listener's thread",
        (6,),
        "kvferry.link.guarded_socket:GuardedSocket.guarded",
        switches.unguarded,
        (
            "tests/link/test_listener.py::test_unexpected_exceptions_are_counted_and_the_next_asker_is_answered",
        ),
    ),
    Guard(
        "places",
        "no host that clients name gets more connections and turns to connect than are free",
        (5,),
        "kvferry.link.connection_slots:has_share",
        switches.always(True),
        (
            "tests/link/test_connection_slots.py::"
            "test_silent_addresses_of_one_host_delay_no_other_host_and_none_that_was_connected_before",
            "tests/link/test_connection_slots.py::test_waiting_addresses_are_bounded_and_one_host_leaves_room_for_others",
        ),
    ),
    Guard(
        "curve-auth",
        "with a secret, only peers that have it are admitted",
        (6,),
        "kvferry.link.guarded_socket:CurveAuth._admits",
        switches.always(True),
        (
            "tests/link/test_secrets.py::test_a_key_that_is_not_of_a_listed_secret_is_not_admitted",
        ),
    ),
    Guard(
        "allowed-hosts",
        "nothing is sent to a host that is not listed",
        (6,),
        "kvferry.connector.scheduler_side.intake:RemotePromptIntake.may_connect",
        switches.always(True),
        (
            "tests/engine_core/test_allowed_hosts.py::"
            "test_whatever_names_a_host_that_is_not_listed_leads_to_no_connection_and_no_look_up[a prompt-127.0.0.1]",
            "tests/engine_core/test_allowed_hosts.py::"
            "test_whatever_names_a_host_that_is_not_listed_leads_to_no_connection_and_no_look_up[a turn-localhost]",
        ),
    ),
    Guard(
        "protected-mode",
        "without a secret and a list only this host's engines are producers",
        (1, 6),
        "kvferry.link.allowed_hosts:AllowedHosts.why_not",
        switches.always(None),
        (
            "tests/engine_core/test_allowed_hosts.py::"
            "test_a_client_that_listens_elsewhere_is_no_producer[a prompt-recompute]",
            "tests/engine_core/test_allowed_hosts.py::"
            "test_a_client_that_listens_elsewhere_is_no_producer[both legs at once-fail]",
        ),
    ),
    Guard(
        "found-addresses",
        "the address that a name leads to is judged too",
        (1, 6),
        "kvferry.link.allowed_hosts:AllowedHosts.why_not_found",
        switches.always(None),
        (
            "tests/link/test_allowed_connections.py::test_a_name_of_this_host_must_lead_to_this_host",
        ),
    ),
    Guard(
        "refusals",
        "another model is refused by the field that differs",
        (7,),
        "kvferry.plan.planner:_model_reasons",
        switches.always(()),
        (
            "tests/plan/test_refusals.py::test_another_model_is_refused_by_the_fact_that_differs",
        ),
    ),
    Guard(
        "settings",
        "another setting that changes values is refused by its name",
        (1, 7),
        "kvferry.plan.planner:_setting_reasons",
        switches.always(()),
        (
            "tests/plan/test_refusals.py::"
            "test_a_setting_that_differs_is_named_with_both_values_and_the_option_that_changes_it",
            "tests/connector/test_settings.py::test_longrope_is_refused_where_the_lengths_choose_other_factors",
            "tests/connector/test_settings.py::"
            "test_a_configuration_from_elsewhere_is_compared_not_the_one_beside_the_weights",
        ),
    ),
    Guard(
        "heads",
        "a producer with more heads serves another model",
        (1, 7),
        "kvferry.plan.planner:_num_heads",
        switches.always({}),
        (
            "tests/plan/test_refusals.py::test_a_producer_with_more_heads_serves_another_model",
        ),
    ),
    Guard(
        "adapters",
        "adapters are told apart by their content",
        (1,),
        "kvferry.connector.engine.adapters:Adapters.content_of",
        switches.by_name,
        (
            "tests/connector/test_adapters.py::test_two_versions_under_one_name_are_two_adapters",
        ),
    ),
    Guard(
        "weights",
        "prompts of updated weights share nothing with those of before",
        (1,),
        "kvferry.connector.vllm.core:RunningWeights.version",
        switches.always(""),
        (
            "tests/engine_core/test_engine_loop.py::"
            "test_the_version_of_weights_is_read_from_the_core_and_empty_before_they_are_updated",
        ),
    ),
    Guard(
        "whole-prompts",
        "what is not causal is loaded for the same whole prompt only",
        (1,),
        "kvferry.connector.engine.local_engine:LocalEngine.needs_whole_prompts",
        switches.never,
        (
            "tests/engine_core/test_whole_prompts.py::"
            "test_only_the_whole_prompt_is_taken_and_for_no_other_prompt[a token more]",
        ),
    ),
    Guard(
        "sleep-leases",
        "all leases end through the fence before an agent is closed for a sleep",
        (1, 2),
        "kvferry.worker.leases:LeaseTable.end_all",
        switches.end_nothing,
        (
            f"{_WITHDRAWAL}::test_a_read_that_ends_before_the_agent_is_closed_does_not_count",
        ),
    ),
    Guard(
        "sleep-loads",
        "no load that only waits keeps an engine awake",
        (6,),
        "kvferry.worker.loads.runner:LoadRunner.fail_all",
        switches.nothing,
        (
            f"{_WITHDRAWAL}::test_loads_under_way_fail_and_leave_nothing_in_the_pages[memory]",
        ),
    ),
    Guard(
        "sleep-reads",
        "pages stay while reads may write into them",
        (2,),
        "kvferry.worker.transfer_thread:TransferThread._may_write",
        switches.always([]),
        (f"{_WITHDRAWAL}::test_a_read_that_does_not_end_keeps_the_pages_and_says_why",),
    ),
    Guard(
        "sleep-unreported",
        "what was loaded and not reported before a sleep has failed",
        (1,),
        "kvferry.worker.worker:FerryWorker._fail_unreported",
        switches.nothing,
        (
            f"{_WITHDRAWAL}::test_what_was_loaded_and_not_reported_before_a_sleep_has_failed",
        ),
    ),
    Guard(
        "sleep-maps",
        "a sleeping consumer maps nothing of its peers",
        (4,),
        "kvferry.worker.peers.registry:PeerRegistry.close",
        switches.nothing,
        (
            f"{_WITHDRAWAL}::test_what_was_mapped_is_unmapped_before_the_consumer_sleeps",
        ),
    ),
    Guard(
        "sleep-agent",
        "no agent answers for pages that may go",
        (2,),
        "kvferry.worker.fabric.nixl:NixlFabric.close",
        switches.nothing,
        (f"{_WITHDRAWAL}::test_no_agent_answers_for_pages_that_may_go",),
    ),
    Guard(
        "sleep-contacts",
        "an agent stays until the peers that were described it have connected",
        (6,),
        "kvferry.link.guarded_socket:GuardedSocket.wait_for_contacts",
        switches.always(True),
        (
            f"{_WITHDRAWAL}::test_an_agent_stays_until_peers_that_know_of_it_have_connected[memory]",
        ),
    ),
    Guard(
        "sleep-handshakes",
        "nobody is described the agent of a sleeping engine",
        (4,),
        "kvferry.link.server:SideChannelListener.withdraw",
        switches.nothing,
        (f"{_WITHDRAWAL}::test_handshakes_are_refused_during_a_sleep",),
    ),
    Guard(
        "sleep-refused",
        "a worker that cannot withdraw stops the sleep",
        (2,),
        "kvferry.connector.vllm.sleep:_withdraw_all",
        switches.nothing,
        (f"{_SLEEP}::test_a_worker_that_cannot_withdraw_stops_the_sleep_and_says_why",),
    ),
    Guard(
        "sleep-generations",
        "tickets of before a sleep are of another boot, with another key",
        (1, 4),
        "kvferry.connector.engine.local_engine:MemoryIdentity.renew",
        switches.nothing,
        (f"{_SLEEP}::test_tickets_of_before_are_of_another_boot_and_key",),
    ),
    Guard(
        "recomputes",
        "a prompt that is computed locally instead is counted",
        (8,),
        "kvferry.link.counters:Counters.add",
        switches.count_no_recomputes,
        (
            "tests/engine_core/test_metrics.py::test_outcomes_of_remote_prompts_are_in_prometheus_by_reason",
        ),
    ),
    Guard(
        "prefix-first",
        "leases of prefixes go before all others, as soon as their blocks may be needed",
        (9,),
        "kvferry.scheduler.producer.eviction_order:rank_of",
        switches.prefixes_go_last,
        (
            f"{_PREFIX_LEASES}::test_the_engines_own_requests_do_not_wait_for_prefixes",
            f"{_PREFIX_LEASES}::test_a_request_that_does_not_fit_beside_a_prefix_gets_its_blocks",
        ),
    ),
    Guard(
        "prefix-share",
        "leases of prefixes have a share of the blocks and of the slots",
        (9,),
        "kvferry.connector.scheduler_side.prefixes:SHARE",
        switches.bound_of(1),
        (
            f"{_PREFIX_LEASES}::test_prefixes_have_their_share_of_the_cache",
            f"{_PREFIX_LEASES}::test_prefixes_have_their_share_of_the_slots",
        ),
    ),
    Guard(
        "prefix-reserve",
        "none is opened while few blocks or slots are free",
        (9,),
        "kvferry.connector.scheduler_side.prefixes:RESERVED",
        switches.bound_of(1 << 30),
        (
            f"{_PREFIX_LEASES}::test_no_prefix_is_held_while_few_blocks_are_free",
            f"{_PREFIX_LEASES}::test_no_prefix_is_held_while_few_slots_are_free",
        ),
    ),
    Guard(
        "prefix-parts",
        "a step takes references on a part of a long prefix",
        (9,),
        "kvferry.connector.scheduler_side.prefixes:PrefixLeases._go_on",
        switches.take_all_at_once,
        (f"{_PREFIX_LEASES}::test_a_long_prefix_is_taken_in_several_steps",),
    ),
    Guard(
        "prefix-returns",
        "a step gives back a part of them",
        (9,),
        "kvferry.scheduler.producer.block_references:BlockReferences._return_some",
        switches.return_all_at_once,
        (
            "tests/scheduler/test_reservations.py::test_the_end_of_a_prefix_is_given_back_first",
        ),
    ),
    Guard(
        "prefix-pauses",
        "a query that takes long gives the interpreter's lock to the engine's thread meanwhile",
        (9,),
        "kvferry.link.lock_pauses:LockPauses.pause",
        switches.nothing,
        (
            "tests/scheduler/test_prefix_directory.py::"
            "test_the_engines_thread_gets_its_turn_while_a_long_prompt_is_listed_and_looked_up",
        ),
    ),
    Guard(
        "prefix-digests",
        "a prefix is given only to who presents the digests of its tokens",
        (9,),
        "kvferry.scheduler.producer.prefix_directory:PrefixIndex.leading",
        switches.all_that_is_listed,
        (
            "tests/scheduler/test_prefix_index.py::test_who_lacks_what_else_determines_a_cache_finds_nothing",
            "tests/scheduler/test_prefix_directory.py::"
            "test_who_cannot_present_a_prefix_learns_at_once_that_there_is_none[other tokens]",
        ),
    ),
    Guard(
        "prefix-hosts",
        "a host that a request names without an announcement is asked only if it is listed, or with a secret",
        (9,),
        "kvferry.link.allowed_hosts:TrustedHosts.why_not_unannounced",
        switches.always(None),
        (
            "tests/link/test_allowed_hosts.py::"
            "test_a_source_without_an_announcement_must_be_listed_or_share_a_secret",
        ),
    ),
    Guard(
        "prefix-wait",
        "a request waits for a prefix no longer than computing it takes, and never long",
        (9,),
        "kvferry.scheduler.consumer.pull_estimate:PullEstimate.wait_s",
        switches.always(3600.0),
        (
            "tests/scheduler/test_pull_estimate.py::"
            "test_a_request_waits_no_longer_than_computing_takes_and_never_long",
        ),
    ),
    Guard(
        "prefix-given-up",
        "when that time is over it waits no more",
        (9,),
        "kvferry.scheduler.consumer.prefix_searches:PrefixSearches.give_up",
        switches.no_steps,
        (
            "tests/scheduler/test_prefix_searches.py::test_when_its_time_is_over_a_request_waits_no_more",
        ),
    ),
    Guard(
        "prefix-kept",
        "a block of a prefix that was found is checked by its hash when it is kept",
        (1,),
        "kvferry.connector.vllm.prefix_cache:PrefixCache.keep",
        switches.whatever_blocks_have,
        (
            f"{_PREFIX_LEASES}::test_a_prefix_that_is_gone_before_the_step_is_looked_up_again",
        ),
    ),
    Guard(
        "prefix-compared",
        "a prefix is loaded only as far as its digests are those of the prompt",
        (1,),
        "kvferry.protocol.digests:GrowingChain.shared_tokens",
        switches.whatever_comes,
        (
            "tests/engine_core/test_prefix_params.py::"
            "test_an_answer_of_no_use_costs_a_computation[of another prompt]",
        ),
    ),
)
