"""NEW: a queue at one of our routers."""

from __future__ import annotations

import random as chance
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from agent.duplex.links import PreparedLink
from agent.duplex.records import QueueStatus, ReceiveQueue
from agent.duplex.replies import RouterRefused, TemporaryFailure
from agent.duplex.secrets import Secrets
from agent.errors import Prohibited
from protocol.addresses import SmpServer
from protocol.encoding import NO_ENTITY, CorrId, EntityId
from protocol.errors import INTERNAL, DecodeError
from protocol.queue_uri import SMP_CLIENT_VERSIONS
from protocol.smp_messages import Ids, New, NewLink, QueueMode, SmpCommand, SmpMessage
from smp_client.requests import Request


class Ask(Protocol):
    """Raises RouterFailure for no answer and for `ERR`."""

    async def __call__(
        self, server: SmpServer, request: Request[SmpCommand], corr_id: CorrId | None = None
    ) -> SmpMessage: ...


class QueueMaker:
    def __init__(
        self, servers: Sequence[SmpServer], secrets: Secrets, ask: Ask, *, subscribe: bool = True
    ) -> None:
        """Without `subscribe` the queues are to be read with GET."""
        self.servers = servers
        self._secrets = secrets
        self._ask = ask
        self._subscribe = subscribe
        self._failed: set[SmpServer] = set()
        "Where it was tried in vain: the next attempt is made elsewhere, until it was tried everywhere."

    def choose(self, *avoid: Sequence[SmpServer]) -> SmpServer:
        """A router of ours other than the first of these, or else than the second, if there is one."""
        if not self.servers:
            raise Prohibited("there is no router to make queues at")
        choices = filter(None, (self._others(servers) for servers in avoid))
        others = next(choices, list(self.servers))
        untried = [server for server in others if server.canonical not in self._failed]
        if not untried:
            self._failed.difference_update(server.canonical for server in others)
        return chance.choice(untried or others)

    def _others(self, avoid: Sequence[SmpServer]) -> list[SmpServer]:
        named = {server.canonical for server in avoid}
        return [server for server in self.servers if server.canonical not in named]

    async def make(
        self,
        server: SmpServer,
        mode: QueueMode,
        *,
        client_version: int = SMP_CLIENT_VERSIONS.max,
        replaces: int | None = None,
    ) -> ReceiveQueue:
        """A queue that the store does not know yet. If the answer is lost, nobody will ever use the queue."""
        queue, _ = await self._new(server, mode)
        return replace(queue, client_version=client_version, replaces=replaces)

    async def make_for(self, prepared: PreparedLink, user_data: bytes) -> tuple[ReceiveQueue, EntityId]:
        """The queue of a short link, and the link's id."""
        link = prepared.new_link(self._secrets, user_data)
        queue, link_id = await self._new(prepared.server, prepared.mode, link, prepared.corr_id)
        if queue.sender_id != link.sender_id or link_id is None:
            raise RouterRefused(INTERNAL)
        return replace(queue, e2e_key=prepared.e2e_key), link_id

    async def _new(
        self, server: SmpServer, mode: QueueMode, link: NewLink | None = None, corr_id: CorrId | None = None
    ) -> tuple[ReceiveQueue, EntityId | None]:
        """With the link's id, if there is one."""
        recipient_key, dh_key = self._secrets.ed25519(), self._secrets.x25519()
        command = New(
            recipient_key=recipient_key.public,
            dh_key=dh_key.public,
            subscribe=self._subscribe,
            mode=mode,
            link=link,
        )
        self._failed.add(server.canonical)
        ids = await self._ask(server, Request(NO_ENTITY, command, recipient_key), corr_id)
        self._failed.discard(server.canonical)
        if not isinstance(ids, Ids):
            raise RouterRefused(INTERNAL)
        try:
            router_secret = dh_key.exchange(ids.dh_key)
        except DecodeError:
            raise TemporaryFailure("the router's key is of no use") from None
        queue = ReceiveQueue(
            queue_id=0,
            connection_id=0,
            server=server.canonical,
            recipient_id=ids.recipient_id,
            recipient_key=recipient_key,
            router_secret=router_secret,
            e2e_key=self._secrets.x25519(),
            e2e_secret=None,
            sender_id=ids.sender_id,
            sender_key=None,
            status=QueueStatus.NEW,
            client_version=SMP_CLIENT_VERSIONS.max,
            # An old router cannot let senders secure queues.
            mode=mode if mode is QueueMode.CONTACT else ids.mode,
            is_primary=True,
            replaces=None,
            switch=None,
            deleting=False,
            service_id=ids.service_id,
        )
        return queue, ids.link_id
