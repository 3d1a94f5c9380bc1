"""As which service the agent logs in to each router, and which queues the router counts to that service.

A queue remembers the id of the service that it was subscribed for. So when a router gives the service another
id, nothing has to be cleared: the old queues are just not the new service's, and are subscribed one by one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_der_private_key

from agent.duplex.events import SubscriptionEnded
from agent.duplex.store import Transact, Tx
from agent.duplex.tables import receive_queue_of
from protocol.addresses import SmpServer
from protocol.encoding import EntityId
from protocol.errors import TE_BAD_SERVICE
from protocol.ids_hash import ids_hash
from protocol.session_params import ServiceSession
from protocol.smp_handshake import ServiceRole
from protocol.smp_messages import QueueSet
from smp_client.errors import HandshakeFailed
from smp_client.session import Service, SmpEvents, SmpSession
from transport.certificates import Credentials, make_service

Dial = Callable[[SmpServer, SmpEvents, Service | None], Awaitable[SmpSession]]

NAME = "agent"
"In the certificate; all agents have the same."


class Logins:
    """Connects to routers, as a service where the user wants that and we have queues."""

    def __init__(
        self, transact: Transact, dial: Dial, servers: Iterable[SmpServer], *, enabled: bool
    ) -> None:
        """`servers`: where queues are made; others see no certificate until there is a queue of ours."""
        self._transact = transact
        self._dial = dial
        self.servers = {server.canonical for server in servers}
        self._enabled = enabled
        self._refused: set[SmpServer] = set()

    async def connect(self, server: SmpServer, on_events: SmpEvents) -> SmpSession:
        """A session with the router; raises `ClientError`."""
        service = await self._service(server)
        try:
            session = await self._dial(server, on_events, service)
        except HandshakeFailed as failure:
            if service is None or failure.error != TE_BAD_SERVICE:
                raise
            await self._transact(lambda tx: forget_service(tx, server))
            return await self._dial(server, on_events, None)
        if service is not None:
            agreed = session.params.service
            await self._transact(lambda tx: adopt_service(tx, server, agreed))
        return session

    async def _service(self, server: SmpServer) -> Service | None:
        if server in self._refused:
            self._refused.discard(server)
            return None
        if not self._enabled:
            return None
        ours = server in self.servers
        credentials = await self._transact(lambda tx: service_credentials(tx, server, ours=ours))
        return None if credentials is None else Service(credentials, ServiceRole.MESSAGING)

    async def refused(self, server: SmpServer) -> None:
        """The router will not have the service: the next session goes without, the one after with a new one.

        So a router that refuses every service still serves every queue.
        """
        self._refused.add(server)
        await self._transact(lambda tx: forget_service(tx, server))


def service_credentials(tx: Tx, server: SmpServer, *, ours: bool) -> Credentials | None:
    """Stored before they are used; none for a router where we have no queues and make none."""
    sql = "SELECT certificate, private_key FROM services WHERE server = ?"
    row = tx.db.execute(sql, (str(server),)).fetchone()
    if row is not None:
        key = load_der_private_key(row["private_key"], password=None)
        assert isinstance(key, Ed25519PrivateKey)
        return Credentials((row["certificate"],), key)
    has_queues = "SELECT 1 FROM receive_queues WHERE server = ? LIMIT 1"
    if not ours and tx.db.execute(has_queues, (str(server),)).fetchone() is None:
        return None
    made = make_service(datetime.fromtimestamp(tx.now, UTC), NAME)
    sql = "INSERT INTO services (server, certificate, private_key) VALUES (?, ?, ?)"
    tx.db.execute(sql, (str(server), made.chain[0], made.signing_key.der))
    return made


def adopt_service(tx: Tx, server: SmpServer, session: ServiceSession | None) -> None:
    """A new session: what the router calls our service now, if it knows services at all."""
    if session is not None:
        sql = "UPDATE services SET service_id = ? WHERE server = ?"
        tx.db.execute(sql, (session.service_id, str(server)))
    else:
        tx.db.execute("DELETE FROM services WHERE server = ? AND service_id IS NOT NULL", (str(server),))


def forget_service(tx: Tx, server: SmpServer) -> None:
    tx.db.execute("DELETE FROM services WHERE server = ?", (str(server),))


def service_queues(db: sqlite3.Connection, server: SmpServer, service_id: EntityId) -> QueueSet:
    """Also those that are being deleted: until that is done the router has them."""
    sql = "SELECT recipient_id FROM receive_queues WHERE server = ? AND service_id = ?"
    ids = [recipient_id for (recipient_id,) in db.execute(sql, (str(server), service_id))]
    return QueueSet(len(ids), ids_hash(ids))


def set_queue_services(tx: Tx, found: Iterable[tuple[int, EntityId | None]]) -> None:
    """To which service the router counts queues, as it said."""
    sql = "UPDATE receive_queues SET service_id = ? WHERE queue_id = ? AND service_id IS NOT ?"
    tx.db.executemany(sql, ((service_id, queue_id, service_id) for queue_id, service_id in found))


def subscriptions_ended(tx: Tx, server: SmpServer, recipient_ids: Iterable[EntityId]) -> None:
    """Another client took queues: the router does not count them to our service any more."""
    for recipient_id in recipient_ids:
        queue = receive_queue_of(tx.db, server, recipient_id)
        if queue is not None:
            set_queue_services(tx, [(queue.queue_id, None)])
            tx.events.append(SubscriptionEnded(queue.connection_id))
