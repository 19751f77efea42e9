"""The integrity check of a worker at any moment: its transfer thread, which owns the sums, is asked for it."""

from __future__ import annotations

from concurrent.futures import Future

from kvferry.protocol.errors import LocalProtocolError
from kvferry.worker.transfer_thread import TransferThread
from kvferry.worker.worker import FerryWorker

ANSWER_WITHIN_S = 30.0


def check_worker(worker: FerryWorker, *, idle: bool = False) -> None:
    """Check the integrity of a worker between two steps of its transfer thread; waits. One that has ended has none.

    Args:
        idle: also check that nothing is under way: no load, no first read, no quarantined load. Peers may be known and
            leases held.

    Raises:
        LocalProtocolError: with all the sums, or the thread does not answer.
    """
    thread = worker._thread
    if not thread._thread.is_alive():
        return
    answer: Future[None] = Future()

    def check() -> None:
        try:
            thread._integrity.check()
            if idle:
                _check_rest(thread)
        except Exception as error:  # noqa: BLE001 - raised in the test's thread
            answer.set_exception(error)
        else:
            answer.set_result(None)

    thread._inbox.put(check)
    try:
        answer.result(ANSWER_WITHIN_S)
    except TimeoutError:
        raise LocalProtocolError(
            f"the transfer thread has not answered within {ANSWER_WITHIN_S:g} s"
        ) from None


def _check_rest(thread: TransferThread) -> None:
    has = thread.reader.fabric.open_handles()
    left = {
        "loads wait": thread.runner.waiting(),
        "loads run or are quarantined": len(list(thread.runner.alive())),
        "first reads have not ended": len(thread.registry.first_reads.all()),
        "handles were not taken back": len(thread.reader.refused()),
        "transfers are open": has.transfers,
        "peers are leaving": has.leaving,
    }
    found = [f"{count} {what}" for what, count in left.items() if count]
    if found:
        raise LocalProtocolError(f"{'; '.join(found)}. {thread._integrity.describe()}")
