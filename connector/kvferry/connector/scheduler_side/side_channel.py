"""The side channel of one engine's scheduler: its two threads, and what they and the ledgers pass to each other.

The listener answers handshakes, and receives renewals and releases of this engine's leases. The renewer sends those of
leases that this engine holds on others. The prewarmer finds the producers in `prewarm_peers`: it starts at the engine
loop's first poll, since before that the engine can neither be woken nor step; a producer that has answered waits for
the next step, and an idle engine is woken for it.
"""

from __future__ import annotations

import collections
import ipaddress
import logging
import time
from collections.abc import Callable, Iterable

from kvferry.connector.allowed_hosts import AllowedHosts, warn_of_trust
from kvferry.connector.config import FerryConfig
from kvferry.connector.config_values import address_of
from kvferry.connector.engine.local_engine import LocalEngine, write_description
from kvferry.connector.messages import workers_of
from kvferry.connector.scheduler_side.prompt_queries import PromptQueries
from kvferry.protocol.handshake import EngineDescription, LeaseName, ModelFacts
from kvferry.protocol.load_notifier import LoadListener
from kvferry.protocol.orders import Prewarm
from kvferry.protocol.prompt_queries import announced_id
from kvferry.protocol.side_channel.hosts import HOST_VARIABLE, host_port
from kvferry.protocol.side_channel.secrets import VARIABLE, Secrets
from kvferry.scheduler.consumer.ledger import ConsumerLedger
from kvferry.scheduler.counters import Counters
from kvferry.scheduler.producer.ledger import ProducerLedger
from kvferry.scheduler.producer.prompt_directory import PromptDirectory
from kvferry.scheduler.side_channel.heartbeat import LeaseRenewer
from kvferry.scheduler.side_channel.prewarmer import PeerPrewarmer
from kvferry.scheduler.side_channel.query_client import QueryClient
from kvferry.scheduler.side_channel.server import SideChannelListener
from kvferry.scheduler.step import receive_messages

logger = logging.getLogger(__name__)


class SideChannel:
    """The listener of an engine that others read from, the renewer of one that reads, and the prewarmer.

    Args:
        facts: of this engine, for its description.
        allowed: hosts that this engine may connect to.
        run_due: called by the listener's thread, twice a second or more.
        wake: has the engine's loop look for reasons to step; thread-safe.
        load_listener: hears this engine's workers ring; this channel's thread takes the rings.

    Attributes:
        local: this engine.
        asking: its own questions.
        listener: None if no engine reads from this one.
        renewer: None if this engine reads from no other.

    Raises:
        InvalidConfig: the address is in use, or the secrets are invalid.
    """

    def __init__(
        self,
        local: LocalEngine,
        facts: ModelFacts,
        config: FerryConfig,
        secrets: Secrets,
        allowed: AllowedHosts,
        leases: ProducerLedger,
        loads: ConsumerLedger,
        counters: Counters,
        run_due: Callable[[], None],
        asking: PromptQueries,
        directory: PromptDirectory,
        *,
        wake: Callable[[], None],
        load_listener: LoadListener | None,
    ) -> None:
        self.local = local
        self._facts = facts
        self._description_file = config.description_file
        self._leases = leases
        self._loads = loads
        self._counters = counters
        self.asking = asking
        self._streams = config.streaming == "auto"
        self._query_client: QueryClient | None = None
        self._found: collections.deque[Prewarm] = collections.deque()
        self._wake = wake
        self._is_searching = False
        self.listener = self._listen(secrets, run_due, directory) if local.is_read_from else None
        try:
            self.renewer = LeaseRenewer(counters, secrets, allowed) if local.reads else None
        except BaseException:
            if self.listener is not None:
                self.listener.close()
            raise
        self._prewarmer: PeerPrewarmer | None = None
        if self.renewer is not None:
            warn_of_trust(allowed, secrets)
            if load_listener is not None:
                self.renewer.client.watch(load_listener.fileno(), load_listener.take_rings)
            own_id = announced_id(local.boot, local.engine_id)
            self._query_client = QueryClient(
                self.renewer.client, own_id, counters, asking.on_answer, self.renewer.proven
            )
        if self.renewer is not None and config.prewarm_peers:
            peers, timeout_s = map(address_of, config.prewarm_peers), config.handshake_timeout_s
            client = self.renewer.client
            self._prewarmer = PeerPrewarmer(
                client, peers, local.engine_id, local.boot, self._on_producer, timeout_s
            )

    @property
    def announces(self) -> bool:
        """Whether routers may send both legs of a request at once: a consumer that can ask has shaken hands."""
        return self._streams and self.listener is not None and self.listener.has_query_clients

    def publish(self, handshakes: Iterable[object]) -> None:
        """Take the workers' descriptions, and answer handshakes from now on.

        Raises:
            InvalidConfig: `description_file` cannot be written, or a description is not kvferry's.
        """
        described = workers_of(handshakes)
        if not described:
            return
        engine = EngineDescription(
            engine_id=self.local.engine_id,
            boot=self.local.boot,
            mac_key=self.local.mac_key,
            facts=self._facts,
            topology=self.local.topology,
            groups=self.local.groups,
            workers=described,
        )
        if self.listener is not None:
            self.listener.publish(engine)
        if self._description_file is not None:
            logger.info(
                "wrote the engine's description: %s",
                write_description(self._description_file, engine),
            )

    def poll(self) -> bool:
        """Called by the engine's loop. Returns whether a producer waits for a step."""
        if self._prewarmer is not None and not self._is_searching:
            self._is_searching = True
            self._prewarmer.start()
        return bool(self._found)

    def receive(self) -> None:
        """Apply the renewals and releases that have arrived, and prewarm the producers that have answered."""
        if self.listener is not None:
            receive_messages(self.listener.inbox, self._leases, self.local.boot, self._counters)
        self.poll()
        while self._found:
            self._loads.prewarms.expect(self._found.popleft(), time.monotonic())

    def flush(self) -> None:
        """Pass commands and questions to the thread that sends them."""
        if self.renewer is not None and (commands := self._loads.take_commands()):
            self.renewer.submit(commands)
        if self._query_client is not None and (
            query_commands := self.asking.queries.take_commands()
        ):
            self._query_client.submit(query_commands)

    def close(self) -> None:
        """Send the last commands, and stop the threads. Idempotent."""
        self.flush()
        for part in (self.listener, self.renewer):
            if part is not None:
                part.close()

    def _listen(
        self, secrets: Secrets, run_due: Callable[[], None], directory: PromptDirectory
    ) -> SideChannelListener:
        local, leases = self.local, self._leases

        def knows(boot: str, name: LeaseName) -> bool:
            return boot == local.boot and name in leases.slots

        listener = SideChannelListener(
            local.host, local.port, self._counters, secrets, leases.clock, run_due, knows, directory
        )
        where = host_port(local.host, local.port)
        if listener.address != local.host:
            where = f"{where} ({listener.address})"
        if ipaddress.ip_address(listener.address).is_loopback:
            logger.warning(
                "the side channel on %s is only reached from this host: for decoders on other hosts set %s to an "
                "address of this one that they reach",
                where,
                HOST_VARIABLE,
            )
        elif not secrets:
            logger.warning(
                "the side channel on %s answers every client that can reach it; set %s, or keep it on a trusted "
                "network",
                where,
                VARIABLE,
            )
        return listener

    def _on_producer(self, producer: Prewarm) -> None:
        """Called on the client's thread."""
        if self.renewer is not None:
            self.renewer.proven.add((producer.host, producer.port))
        self._found.append(producer)
        self._wake()
