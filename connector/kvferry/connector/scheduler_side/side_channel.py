"""The side channel of one engine's scheduler: its two threads, and what they and the ledgers pass to each other.

kvferry-listener        answers handshakes and queries; receives renewals and releases of this engine's leases
kvferry-side-channel    renews and releases the leases that this engine holds on others, asks about prompts, finds
                        the producers in `prewarm_peers`, hears of ended loads
"""

from __future__ import annotations

import collections
import ipaddress
import logging
import time
from collections.abc import Iterable

from kvferry.connector.config import FerryConfig
from kvferry.connector.engine.local_engine import write_description
from kvferry.connector.messages import workers_of
from kvferry.connector.scheduler_side.prompt_queries import PromptQueries
from kvferry.connector.scheduler_side.requests import SchedulerContext
from kvferry.connector.scheduler_side.steps import Steps
from kvferry.link.allowed_hosts import AllowedHosts, warn_of_trust
from kvferry.link.client import SideChannelClient
from kvferry.link.peer_link import PeerLinks
from kvferry.link.prewarmer import PeerPrewarmer
from kvferry.link.query_client import QueryClient
from kvferry.link.renewer import LeaseRenewer
from kvferry.link.secrets import VARIABLE, Secrets
from kvferry.link.server import SideChannelListener
from kvferry.protocol.handshake import (
    EngineDescription,
    LeaseName,
    ModelFacts,
    WorkerDescription,
)
from kvferry.protocol.hosts import HOST_VARIABLE, address_of, host_port
from kvferry.protocol.orders import Prewarm
from kvferry.scheduler.producer.prefix_directory import PrefixDirectory
from kvferry.scheduler.producer.prompt_directory import PromptDirectory

logger = logging.getLogger(__name__)


class SideChannel:
    """The listener of an engine that others read from; renewer, query client and prewarmer of one that reads.

    Args:
        steps: polled on the listener's thread; woken when a producer has answered. Its load listener is received on the
            client's thread.
        directory, prefixes: what other engines query; None where no prefix of this engine may be read.
        facts: of this engine, for its description.
        allowed: hosts that this engine may connect to.
        names_all_ranks: whether a consumer that asks this engine hears of every data-parallel rank that may have its
            prompt.

    Attributes:
        local: this engine.
        queries: its own about prompts.
        listener: None if no engine reads from this one.
        renewer: None if this engine reads from no other. Its end is also that of the query client and the prewarmer.
        query_client: None if this engine reads from no other.

    Raises:
        InvalidConfig: the address is in use, or the secrets are invalid.
    """

    def __init__(
        self,
        context: SchedulerContext,
        steps: Steps,
        queries: PromptQueries,
        directory: PromptDirectory,
        prefixes: PrefixDirectory | None,
        *,
        facts: ModelFacts,
        config: FerryConfig,
        secrets: Secrets,
        allowed: AllowedHosts,
        names_all_ranks: bool,
    ) -> None:
        self.local = context.local
        self.queries = queries
        self.listener: SideChannelListener | None = None
        self.renewer: LeaseRenewer | None = None
        self.query_client: QueryClient | None = None
        self._facts = facts
        self._workers: tuple[WorkerDescription, ...] = ()
        self._is_withdrawn = False
        self._description_file = config.description_file
        self._may_announce = config.streaming == "auto"
        self._leases = context.leases
        self._loads = context.loads
        self._counters = context.counters
        self._steps = steps
        self._prewarmer: PeerPrewarmer | None = None
        self._is_prewarming = False
        self._prewarmed: collections.deque[Prewarm] = collections.deque()
        if self._may_announce and self.local.is_read_from and not names_all_ranks:
            # A decoder would wait for its answer from the wrong ranks (`UNKNOWN_S`) with each such prompt.
            self._may_announce = False
            logger.warning(
                "routers are not told to send both legs at once: not all data-parallel ranks of this engine's front "
                "end are known to be on this host"
            )
        try:
            if self.local.is_read_from:
                self.listener = self._listen(secrets, directory, prefixes)
            if self.local.reads:
                self._connect(config, secrets, allowed)
        except BaseException:
            # The listener's thread would go on, and keep the port from the engine's next attempt to start.
            for part in (self.listener, self.renewer):
                if part is not None:
                    part.close()
            raise

    @property
    def announces(self) -> bool:
        """True if routers may send both legs of a request at once: a consumer that can ask has shaken hands."""
        if not self._may_announce or self.listener is None:
            return False
        return self.listener.has_query_clients

    def publish(self, handshakes: Iterable[object]) -> None:
        """Take the workers' descriptions, and answer handshakes from now on.

        Raises:
            InvalidConfig: `description_file` cannot be written, or a description is not kvferry's.
        """
        described = workers_of(handshakes)
        # vLLM 0.33 passes descriptions on after every wake-up, also where the memory has not been withdrawn.
        if not described or (described == self._workers and not self._is_withdrawn):
            return
        memory = self.local.memory
        if self._workers:
            memory.renew()
            logger.info("the caches are registered again: %s", memory)
        self._workers = described
        self._is_withdrawn = False
        engine = EngineDescription(
            engine_id=self.local.engine_id,
            boot=memory.boot,
            mac_key=memory.mac_key,
            facts=self._facts,
            topology=self.local.topology,
            groups=self.local.groups,
            workers=described,
            generation=memory.generation,
        )
        if self.listener is not None:
            self.listener.publish(engine)
        if self._description_file is not None:
            path = write_description(self._description_file, engine)
            logger.info("wrote the engine's description: %s", path)

    def withdraw(self) -> None:
        """The workers withdraw their memory: refuse handshakes until `publish`."""
        self._is_withdrawn = True
        if self.listener is not None:
            self.listener.withdraw()

    def poll(self) -> bool:
        """Called by the engine's loop. Returns whether a producer waits for a step."""
        # Begun here and not at the start: before the loop runs, the engine can neither be woken nor step.
        if self._prewarmer is not None and not self._is_prewarming:
            self._is_prewarming = True
            self._prewarmer.start()
        return bool(self._prewarmed)

    def receive(self) -> None:
        """Apply the renewals and releases that have arrived, and prewarm the producers that have answered."""
        if self.listener is not None and self.listener.inbox.received:
            messages = self.listener.inbox.take()
            self._leases.receive(messages, self.local.memory.boot)
        if self._prewarmer is not None:
            self.poll()
        while self._prewarmed:
            self._loads.prewarms.expect(self._prewarmed.popleft(), time.monotonic())

    def flush(self) -> None:
        """Pass commands and queries to the thread that sends them."""
        if self.renewer is not None:
            commands = self._loads.take_commands()
            if commands:
                self.renewer.submit(commands)
        if self.query_client is not None and self.queries.commands.waiting:
            self.query_client.submit(self.queries.commands.take())

    def close(self) -> None:
        """Send the last commands, and stop the threads. Idempotent."""
        self.flush()
        for part in (self.listener, self.renewer):
            if part is not None:
                part.close()

    def _connect(
        self,
        config: FerryConfig,
        secrets: Secrets,
        allowed: AllowedHosts,
    ) -> None:
        """Start the client's thread, and give it all that it does for an engine that reads from others."""
        client = SideChannelClient(secrets, allowed)
        links = PeerLinks(client, self._counters)
        self.renewer = LeaseRenewer(links)
        warn_of_trust(allowed, secrets)
        load_listener = self._steps.load_listener
        if load_listener is not None:
            # One more descriptor in a thread that waits for sockets anyway, in place of a thread.
            client.watch(load_listener.fileno(), load_listener.receive)
        self.query_client = QueryClient(
            links,
            self.local.announced_id,
            self.queries.on_answer,
            self.queries.on_found,
        )
        if config.prewarm_peers:
            self._prewarmer = PeerPrewarmer(
                links,
                map(address_of, config.prewarm_peers),
                self.local.engine_id,
                lambda: self.local.memory.boot,
                self._on_producer,
                config.handshake_timeout_s,
            )

    def _listen(
        self,
        secrets: Secrets,
        directory: PromptDirectory,
        prefixes: PrefixDirectory | None,
    ) -> SideChannelListener:
        local = self.local
        slots = self._leases.slots

        def knows(boot: str, name: LeaseName) -> bool:
            # On the listener's thread, so that a flood of messages about other leases costs the steps nothing.
            return boot == local.memory.boot and name in slots

        listener = SideChannelListener(
            local.host,
            local.port,
            self._counters,
            secrets,
            self._leases.clock,
            self._steps.poll,
            knows,
            directory,
            prefixes,
        )
        self._warn_of_address(listener.address, secrets)
        return listener

    def _warn_of_address(self, address: str, secrets: Secrets) -> None:
        where = host_port(self.local.host, self.local.port)
        if address != self.local.host:
            where = f"{where} ({address})"
        if ipaddress.ip_address(address).is_loopback:
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

    def _on_producer(self, producer: Prewarm) -> None:
        """Called on the client's thread."""
        # A step takes it from here: the ledger is the step thread's. An idle engine is woken for that.
        self._prewarmed.append(producer)
        self._steps.wake()
