"""NEW: a queue at one of our routers."""

from __future__ import annotations

import random as chance
from collections.abc import Awaitable, Callable, Sequence

from agent.duplex.records import QueueStatus, ReceiveQueue
from agent.duplex.replies import RouterRefused, TemporaryFailure
from agent.duplex.secrets import Secrets
from protocol.addresses import SmpServer
from protocol.encoding import NO_ENTITY
from protocol.errors import INTERNAL, DecodeError
from protocol.queue_uri import SMP_CLIENT_VERSIONS
from protocol.smp_messages import Ids, New, QueueMode, SmpCommand, SmpMessage
from smp_client.requests import Request

Ask = Callable[[SmpServer, Request[SmpCommand]], Awaitable[SmpMessage]]


class QueueMaker:
    def __init__(self, servers: Sequence[SmpServer], secrets: Secrets, ask: Ask) -> None:
        self._servers = servers
        self._secrets = secrets
        self._ask = ask

    def choose(self, avoid: Sequence[SmpServer]) -> SmpServer:
        """A router of ours, other than those if there is another."""
        named = {server.canonical for server in avoid}
        others = [server for server in self._servers if server.canonical not in named]
        return chance.choice(others or self._servers)

    async def make(
        self,
        server: SmpServer,
        mode: QueueMode,
        *,
        client_version: int = SMP_CLIENT_VERSIONS.max,
        replaces: int | None = None,
    ) -> ReceiveQueue:
        """A queue that the store does not know yet. If the answer is lost, nobody will ever use the queue."""
        recipient_key, dh_key = self._secrets.ed25519(), self._secrets.x25519()
        command = New(recipient_key=recipient_key.public, dh_key=dh_key.public, mode=mode)
        ids = await self._ask(server, Request(NO_ENTITY, command, recipient_key))
        if not isinstance(ids, Ids):
            raise RouterRefused(INTERNAL)
        try:
            router_secret = dh_key.exchange(ids.dh_key)
        except DecodeError:
            raise TemporaryFailure("the router's key is of no use") from None
        return ReceiveQueue(
            queue_id=0,
            connection_id=0,
            server=server,
            recipient_id=ids.recipient_id,
            recipient_key=recipient_key,
            router_secret=router_secret,
            e2e_key=self._secrets.x25519(),
            e2e_secret=None,
            sender_id=ids.sender_id,
            sender_key=None,
            status=QueueStatus.NEW,
            client_version=client_version,
            # An old router cannot let senders secure queues.
            mode=mode if mode is QueueMode.CONTACT else ids.mode,
            primary=True,
            replaces=replaces,
            switch=None,
            deleting=False,
        )
