"""NEW: a queue at one of our routers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from agent.duplex.creation import NewQueue
from agent.duplex.links import OwnLink
from agent.duplex.records import QueueStatus, ReceiveQueue
from agent.duplex.replies import RouterRefused, TemporaryFailure
from agent.duplex.secrets import Secrets
from agent.errors import Prohibited
from protocol.addresses import SmpServer
from protocol.crypto import Ed25519PrivateKey, X25519PrivateKey
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


class QueueKeys(NamedTuple):
    recipient: Ed25519PrivateKey
    dh: X25519PrivateKey
    e2e: X25519PrivateKey


class QueueMaker:
    def __init__(
        self,
        servers: Sequence[SmpServer],
        secrets: Secrets,
        ask: Ask,
        *,
        subscribe: bool = True,
        passwords: Mapping[SmpServer, bytes] | None = None,
    ) -> None:
        """Without `subscribe` the queues are to be read with GET."""
        self.servers = servers
        self._secrets = secrets
        self._ask = ask
        self._subscribe = subscribe
        self._passwords = {server.canonical: word for server, word in (passwords or {}).items()}
        self._failed: set[SmpServer] = set()
        "Where it was tried in vain: the next attempt is made elsewhere, until it was tried everywhere."

    def choose(self, *avoid: Sequence[SmpServer]) -> SmpServer:
        """A router of ours other than the first of these, or else than the second, if there is one."""
        if not self.servers:
            raise Prohibited("there is no router to make queues at")
        others = next(filter(None, map(self._others, avoid)), list(self.servers))
        untried = [server for server in others if server.canonical not in self._failed]
        if not untried:
            self._failed.difference_update(server.canonical for server in others)
        choices = untried or others
        return choices[self._secrets.below(len(choices))]

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
        keys = QueueKeys(self._secrets.ed25519(), self._secrets.x25519(), self._secrets.x25519())
        queue, _ = await self._new(server, mode, keys)
        return replace(queue, client_version=client_version, replaces=replaces)

    async def make_for(self, new: NewQueue, own_link: OwnLink) -> tuple[ReceiveQueue, EntityId]:
        """The queue of a short link, and the link's id."""
        keys, link = QueueKeys(new.recipient_key, new.dh_key, new.e2e_key), new.new_link(own_link)
        queue, link_id = await self._new(new.server, new.mode, keys, link, new.corr_id)
        if queue.sender_id != link.sender_id or link_id is None:
            raise RouterRefused(INTERNAL)
        return queue, link_id

    async def _new(
        self,
        server: SmpServer,
        mode: QueueMode,
        keys: QueueKeys,
        link: NewLink | None = None,
        corr_id: CorrId | None = None,
    ) -> tuple[ReceiveQueue, EntityId | None]:
        """With the link's id, if there is one."""
        recipient_key, dh_key, e2e_key = keys
        command = New(
            recipient_key=recipient_key.public,
            dh_key=dh_key.public,
            password=self._passwords.get(server.canonical),
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
            e2e_key=e2e_key,
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
