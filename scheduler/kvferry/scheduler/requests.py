"""One record of a request: all that the engine's thread knows of it without vLLM, in one table.

The ledgers, the open queries and the list of prompts for others each own one field of the record, and find a request
here and nowhere else. A record outlives its request: blocks are held when a prefill has ended, and an aborted load is
known until its workers have reported. It is dropped when nothing is left of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.scheduler.consumer.pending_query import PendingQuery
from kvferry.scheduler.consumer.prefix_search import PrefixSearch
from kvferry.scheduler.consumer.remote_prompt import RemotePrompt
from kvferry.scheduler.producer.lease import ProducerLease
from kvferry.scheduler.producer.listed_prompt import ListedPrompt


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request, and what is left of an earlier one with its id.

    Attributes:
        is_unfinished: whether the engine has the request.
        lease: on its blocks; also after its end, while they are held. Owned by `ProducerLedger`.
        prompt: its prompt in another engine's cache; also after its end, while its load is aborted. Owned by
            `ConsumerLedger`.
        query: the open query about its prompt that it waits for. Owned by `PendingQueries`.
        search: which engines have the first part of its prompt, as long as it waits to hear. Owned by
            `PrefixSearches`.
        listed: its prompt, for other engines that query it. Owned by `PromptDirectory`.
    """

    request_id: str
    is_unfinished: bool = False
    lease: ProducerLease | None = None
    prompt: RemotePrompt | None = None
    query: PendingQuery | None = None
    search: PrefixSearch | None = None
    listed: ListedPrompt | None = None

    @property
    def waits_for_answer(self) -> bool:
        """True if the request waits for what another engine says."""
        return self.query is not None or self.search is not None


class RequestTable:
    """The records of one engine, by request id. Used on the engine's thread only."""

    def __init__(self) -> None:
        self._by_id: dict[str, RequestRecord] = {}

    def __iter__(self) -> Iterator[RequestRecord]:
        """All records, of requests that have ended too. The table must not change meanwhile."""
        return iter(self._by_id.values())

    def find(self, request_id: str) -> RequestRecord | None:
        """The record of a request; None if nothing is known of it."""
        return self._by_id.get(request_id)

    def enter(self, request_id: str) -> RequestRecord:
        """The record of a request, a new one if nothing was known of it."""
        record = self._by_id.get(request_id)
        if record is None:
            record = RequestRecord(request_id)
            self._by_id[request_id] = record
        return record

    def drop_if_over(self, record: RequestRecord) -> None:
        """Forget a record of which nothing is left. Called whenever a field of it has been cleared."""
        is_over = (
            not record.is_unfinished
            and record.lease is None
            and record.prompt is None
            and record.query is None
            and record.search is None
            and record.listed is None
        )
        if is_over:
            self._by_id.pop(record.request_id, None)
