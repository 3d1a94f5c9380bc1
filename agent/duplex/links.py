"""Short links: what a router keeps for a link, made before the queue exists, read by whoever has the link."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from agent.duplex.mapping import Table
from agent.duplex.records import ReceiveQueue
from agent.duplex.secrets import Secrets
from agent.duplex.store import Tx
from agent.duplex.tables import receive_queues
from agent.errors import Prohibited
from protocol.addresses import SmpServer
from protocol.agent.connection_requests import ConnectionRequest, ContactRequest, InvitationRequest
from protocol.agent.e2e_params import E2eKeys
from protocol.agent.link_data import (
    ContactUserData,
    FixedLinkData,
    InvitationUserData,
    UserLinkData,
    encode_fixed,
    encode_user,
    open_link,
    request_of,
)
from protocol.agent.short_links import LinkKind, ShortLink
from protocol.agent.versions import AGENT_VERSIONS, E2E_VERSIONS
from protocol.crypto import Ed25519PrivateKey, X25519PrivateKey
from protocol.encoding import NO_ENTITY, CorrId, EntityId
from protocol.errors import DecodeError, TooLarge
from protocol.link_crypto import (
    contact_link_keys,
    invitation_data_key,
    link_key_of,
    seal_fixed_data,
    seal_user_data,
    sender_id_of,
    sign_piece,
)
from protocol.queue_uri import SMP_CLIENT_VERSIONS, QueueUri
from protocol.smp_messages import LinkData, Lnk, NewLink, QueueMode

MAX_ENTITY_ID = 255


@dataclass(frozen=True, slots=True)
class PreparedLink:
    """All that NEW needs, and the link that will lead to the queue: made without the network or the store."""

    server: SmpServer
    mode: QueueMode
    corr_id: CorrId = field(repr=False)
    "Gives the sender's id: the same NEW can be sent again."
    e2e_key: X25519PrivateKey
    root_key: Ed25519PrivateKey
    keys: E2eKeys | None
    fixed: bytes = field(repr=False)
    "Sealed; it never changes."
    link_key: bytes = field(repr=False)

    @property
    def link_id(self) -> EntityId | None:
        """Of an address; an invitation's is made by the router."""
        return contact_link_keys(self.link_key).link_id if self.keys is None else None

    @property
    def data_key(self) -> bytes:
        return data_key_of(self.link_key, is_address=self.keys is None)

    def link(self, link_id: EntityId | None = None) -> ShortLink:
        kind = LinkKind.CONTACT if self.keys is None else LinkKind.INVITATION
        return ShortLink(kind, self.server, self.link_key, link_id)

    def new_link(self, secrets: Secrets, user_data: bytes) -> NewLink:
        user = sealed_user_data(
            secrets, self.root_key, self.data_key, user_data, is_address=self.keys is None
        )
        return NewLink(self.link_id, sender_id_of(self.corr_id), LinkData(self.fixed, user))


def data_key_of(link_key: bytes, *, is_address: bool) -> bytes:
    return contact_link_keys(link_key).data_key if is_address else invitation_data_key(link_key)


def own_request(queue: QueueUri, keys: E2eKeys | None) -> ConnectionRequest:
    """What a link of ours offers: with keys it is an invitation, without an address."""
    if keys is None:
        return ContactRequest(AGENT_VERSIONS, (queue,))
    return InvitationRequest(AGENT_VERSIONS, (queue,), keys.uri(E2E_VERSIONS))


def prepare_link(
    secrets: Secrets,
    server: SmpServer,
    keys: E2eKeys | None,
    root_key: Ed25519PrivateKey,
    entity_id: bytes | None,
) -> PreparedLink:
    corr_id, e2e_key = CorrId(secrets.nonce()), secrets.x25519()
    mode = QueueMode.CONTACT if keys is None else QueueMode.MESSAGING
    queue = QueueUri(SMP_CLIENT_VERSIONS, server, sender_id_of(corr_id), e2e_key.public, mode)
    request = own_request(queue, keys)
    if entity_id is not None and len(entity_id) > MAX_ENTITY_ID:
        raise Prohibited("the id for the link is too long")
    piece = encode_fixed(FixedLinkData(AGENT_VERSIONS, root_key.public, request, entity_id))
    link_key = link_key_of(piece)
    data_key = data_key_of(link_key, is_address=keys is None)
    with _fitting():
        fixed = seal_fixed_data(data_key, secrets.nonce(), sign_piece(root_key, piece))
    return PreparedLink(server, mode, corr_id, e2e_key, root_key, keys, fixed, link_key)


def sealed_user_data(
    secrets: Secrets, root_key: Ed25519PrivateKey, data_key: bytes, blob: bytes, *, is_address: bool
) -> bytes:
    user: UserLinkData = InvitationUserData(AGENT_VERSIONS, blob)
    if is_address:
        user = ContactUserData(AGENT_VERSIONS, True, (), (), blob)
    with _fitting():
        return seal_user_data(data_key, secrets.nonce(), sign_piece(root_key, encode_user(user)))


@contextmanager
def _fitting() -> Iterator[None]:
    """Links are our user's own: what is too long is for him to know, before anything is sent."""
    try:
        yield
    except (TooLarge, OverflowError):
        raise Prohibited("the data of the link is too long") from None


# Our own links


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnLink:
    connection_id: int
    link_id: EntityId = field(repr=False)
    "Empty until the router has made it."
    link_key: bytes = field(repr=False)
    root_key: Ed25519PrivateKey
    fixed: bytes = field(repr=False)
    is_address: bool


_LINKS = Table("links", OwnLink, "connection_id")
forget_link = _LINKS.drop
own_link_of = _LINKS.get
set_link = _LINKS.set


def keep_link(tx: Tx, connection_id: int, prepared: PreparedLink) -> None:
    link = OwnLink(
        connection_id=connection_id,
        link_id=prepared.link_id or NO_ENTITY,
        link_key=prepared.link_key,
        root_key=prepared.root_key,
        fixed=prepared.fixed,
        is_address=prepared.keys is None,
    )
    _LINKS.add(tx, link)


def own_link(db: sqlite3.Connection, connection_id: int) -> tuple[OwnLink, ReceiveQueue]:
    """With the queue that it leads to."""
    link, queues = _LINKS.get(db, connection_id), receive_queues(db, connection_id)
    if link is None or not queues:
        raise Prohibited("this connection has no short link")
    return link, queues[0]


# Links of others


def with_whole_server(link: ShortLink, known: Sequence[SmpServer]) -> ShortLink:
    """A link may name a host only: then the router is one that we know."""
    if link.server.key_hash:
        return link
    for server in known:
        if server.hosts[0] == link.server.hosts[0]:
            return replace(link, server=server)
    raise DecodeError


def securing_key(tx: Tx, link: ShortLink) -> X25519PrivateKey:
    """The key for LKEY: the router takes the first that it sees, so it is the same each time."""
    where = (str(link.server), link.link_id)
    tx.db.execute(
        "INSERT INTO link_keys VALUES (?, ?, ?) ON CONFLICT DO NOTHING", (*where, tx.secrets.x25519().raw)
    )
    row = tx.db.execute("SELECT auth_key FROM link_keys WHERE server = ? AND link_id = ?", where).fetchone()
    return X25519PrivateKey(row["auth_key"])


def behind(link: ShortLink, answer: Lnk) -> tuple[ConnectionRequest, bytes]:
    """The request, and what the owner shows.

    LinkError if the router's data is not what the link was made of, DecodeError if it is none.
    """
    is_address = link.link_id is None
    data_key = data_key_of(link.link_key, is_address=is_address)
    opened = open_link(link.link_key, data_key, answer.data.fixed, answer.data.user)
    request = request_of(opened.fixed, link.server, answer.sender_id)
    if isinstance(request, ContactRequest) is not is_address:
        raise DecodeError
    return request, opened.user.blob
