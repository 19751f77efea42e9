"""Threads of a scheduler: as many with 256 peers at first contact as with one."""

from __future__ import annotations

import socket

import pytest

from kvferry.link.commands import RenewLease, StartQuery
from kvferry.link.query_client import QueryClient
from kvferry.link.renewer import LeaseRenewer
from tests.link.channel import ANY_ADDRESS, HOST, listening, many_hosts
from tests.link.test_query_client import query
from tests.link.test_renewer import LONG_S, lease
from tests.processes import task_count
from tests.waiting import wait_until

PEERS = 256


@pytest.mark.slow
def test_threads_of_a_scheduler_do_not_grow_with_its_peers(
    renewer: LeaseRenewer,
) -> None:
    """It renews leases of 256 producers and queries as many silent ones, while 256 clients are connected to it."""
    queries = QueryClient(renewer.links, "decode-0", lambda *_: None)
    silent = [socket.create_server((HOST, 0)) for _ in range(PEERS)]
    ports = [one.getsockname()[1] for one in silent]
    clients: list[socket.socket] = []
    hosts = many_hosts(PEERS)
    try:
        with listening(host=ANY_ADDRESS) as (listener, port):

            def connect(first: int, end: int) -> None:
                renewer.submit(
                    RenewLease(lease(port, host=host, lease_s=LONG_S), at_once=True)
                    for host in hosts[first:end]
                )
                queries.submit(
                    StartQuery((HOST, ports[number]), query(number))
                    for number in range(first, end)
                )
                for _ in range(first, end):
                    clients.append(socket.create_connection((HOST, port)))
                for _ in range(first, end):
                    listener.inbox.get(timeout=30)
                wait_until(
                    lambda: len(queries.snapshot().producers) == end,
                    "all of them are queried",
                )

            connect(0, 1)
            with_one = task_count()
            connect(1, PEERS)
            # Those of tests before this one may end meanwhile.
            assert task_count() <= with_one
    finally:
        for one in (*silent, *clients):
            one.close()
