"""Integrity of a scheduler side: its ledgers agree with themselves, with vLLM's block pool and with vLLM's requests."""

from __future__ import annotations

from kvferry.connector.scheduler_side.side import SchedulerSide
from kvferry.protocol.errors import LocalProtocolError
from kvferry.scheduler.requests import LeaseState, RemotePromptState
from tests.harness.ledgers import check_ledgers


def check_scheduler_side(side: SchedulerSide) -> None:
    """Check both ledgers, and that they know the requests that vLLM has.

    Raises:
        LocalProtocolError: with the counts that disagree.
    """
    check_ledgers(side.leases, side.loads)
    unfinished = {entry.request_id for entry in side.requests}
    running = side.leases.leases(LeaseState.INTENDED, LeaseState.COMPUTING)
    leased = {lease.request_id for lease in running}
    remote = set(
        side.loads.requests(*set(RemotePromptState) - {RemotePromptState.ABORTED})
    )
    aborted = set(side.loads.requests(RemotePromptState.ABORTED))
    # A lease that is held and a load that was aborted outlive their request; all others end with it.
    if not leased | remote <= unfinished or aborted & unfinished:
        raise LocalProtocolError(
            f"{len(unfinished)} requests have not ended; of {len(leased)} with a running lease "
            f"{len(leased - unfinished)} have, of {len(remote)} remote prompts {len(remote - unfinished)} have, of "
            f"{len(aborted)} aborted loads {len(aborted & unfinished)} have not"
        )
