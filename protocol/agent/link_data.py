"""The data behind a short link: what its owner signed once, and what he may change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from protocol.addresses import SmpServer
from protocol.agent.connection_requests import REQUEST, ConnectionRequest
from protocol.agent.errors import LinkError
from protocol.agent.forms import BOOL, SHORT, VERSIONS, Form, checked, record, tagged
from protocol.agent.short_links import SHORT_LINK, ShortLink
from protocol.crypto import (
    ED25519_SIGNATURE_SIZE,
    AuthPublicKey,
    Ed25519PublicKey,
    decode_public_key,
    push_key,
)
from protocol.encoding import EntityId, Reader, Writer
from protocol.errors import DecodeError
from protocol.link_crypto import link_key_of, open_link_data, split_signed
from protocol.versions import VersionRange

T = TypeVar("T")

_LONG_BLOB = 255


@dataclass(frozen=True, slots=True)
class FixedLinkData:
    """Its hash is the link's key, so nobody can change it."""

    agent_versions: VersionRange
    root_key: Ed25519PublicKey
    request: ConnectionRequest
    entity_id: bytes | None = field(default=None, repr=False)
    "The application's, if any."


@dataclass(frozen=True, slots=True)
class InvitationUserData:
    agent_versions: VersionRange
    blob: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Owner:
    """Whoever may change the user data of an address besides the holder of the root key."""

    owner_id: bytes = field(repr=False)
    key: Ed25519PublicKey
    signature: bytes = field(repr=False)
    "Over id and key, by the root key or an earlier owner's."

    def signed_by(self, key: Ed25519PublicKey) -> bool:
        return key.verify(self.signature, self.owner_id + self.key.der)


@dataclass(frozen=True, slots=True)
class ContactUserData:
    agent_versions: VersionRange
    direct: bool
    "Requests may be sent to the queue itself."
    owners: tuple[Owner, ...]
    relays: tuple[ShortLink, ...]
    blob: bytes = field(repr=False)


UserLinkData = InvitationUserData | ContactUserData


def _ed25519(key: AuthPublicKey) -> Ed25519PublicKey:
    if not isinstance(key, Ed25519PublicKey):
        raise DecodeError
    return key


def _complete(owner: Owner) -> Owner:
    if len(owner.signature) != ED25519_SIGNATURE_SIZE:
        raise DecodeError
    return owner


def _pull_blob(r: Reader) -> bytes:
    if r.peek() == bytes((_LONG_BLOB,)):
        r.pull_bytes(1)
        return r.pull_large()
    return r.pull_short()


def _push_blob(w: Writer, blob: bytes) -> None:
    if len(blob) < _LONG_BLOB:
        w.push_short(blob)
    else:
        w.push_bytes(bytes((_LONG_BLOB,)))
        w.push_large(blob)


def _several(form: Form[T]) -> Form[tuple[T, ...]]:
    """Or none."""

    def push(w: Writer, items: tuple[T, ...]) -> None:
        w.push_bytes(bytes((len(items),)))
        for item in items:
            form.push(w, item)

    return Form(lambda r: tuple([form.pull(r) for _ in range(r.pull_byte())]), push)


_ED25519 = Form(lambda r: _ed25519(decode_public_key(r.pull_short())), push_key)
_BLOB = Form(_pull_blob, _push_blob)
_SIGNED_OWNER = checked(record(Owner, owner_id=SHORT, key=_ED25519, signature=SHORT), _complete)
_OWNER = Form(
    lambda r: _SIGNED_OWNER.pull(Reader(r.pull_short())),
    lambda w, owner: w.push_short(_SIGNED_OWNER.encode(owner)),
)
_USER: Form[UserLinkData] = tagged(
    {
        b"I": record(InvitationUserData, agent_versions=VERSIONS, blob=_BLOB),
        b"C": record(
            ContactUserData,
            agent_versions=VERSIONS,
            direct=BOOL,
            owners=_several(_OWNER),
            relays=_several(SHORT_LINK),
            blob=_BLOB,
        ),
    }
)
_FIXED = record(
    FixedLinkData,
    agent_versions=VERSIONS,
    root_key=_ED25519,
    request=REQUEST,
    entity_id=Form(
        lambda r: None if r.at_end else r.pull_short(),
        lambda w, entity_id: None if entity_id is None else w.push_short(entity_id),
    ),
)
encode_fixed, encode_user = _FIXED.encode, _USER.encode


def decode_fixed(data: bytes) -> FixedLinkData:
    """What a later version may add behind is not looked at; so in the next."""
    return _FIXED.pull(Reader(data))


def decode_user(data: bytes) -> UserLinkData:
    return _USER.pull(Reader(data))


@dataclass(frozen=True, slots=True)
class OpenedLink:
    fixed: FixedLinkData
    user: UserLinkData


def open_link(link_key: bytes, data_key: bytes, sealed_fixed: bytes, sealed_user: bytes) -> OpenedLink:
    """DecodeError for what does not open or parse, LinkError for what the owner did not make."""
    signature, piece = split_signed(open_link_data(data_key, sealed_fixed))
    if link_key_of(piece) != link_key:
        raise LinkError("link data hash")
    fixed = decode_fixed(piece)
    if not fixed.root_key.verify(signature, piece):
        raise LinkError("link data signature")
    signature, piece = split_signed(open_link_data(data_key, sealed_user))
    user = decode_user(piece)
    keys = [fixed.root_key]
    if isinstance(user, ContactUserData):
        keys += _owner_keys(fixed.root_key, user.owners)
    if not any(key.verify(signature, piece) for key in keys):
        raise LinkError("user data signature")
    return OpenedLink(fixed, user)


def _owner_keys(root_key: Ed25519PublicKey, owners: Sequence[Owner]) -> list[Ed25519PublicKey]:
    keys, ids = [root_key], set[bytes]()
    for owner in owners:
        if owner.key in keys or owner.owner_id in ids:
            raise LinkError("owner repeated")
        if not any(owner.signed_by(key) for key in keys):
            raise LinkError("owner signature")
        keys.append(owner.key)
        ids.add(owner.owner_id)
    return keys[1:]


def request_of(fixed: FixedLinkData, server: SmpServer, sender_id: EntityId) -> ConnectionRequest:
    """The request, if it is about the queue that the router gave; reached as the link says."""
    first, *others = fixed.request.queues
    if server.hosts[0] not in first.server.hosts or first.sender_id != sender_id:
        raise LinkError("connection request")
    if str(first.server) == str(server):
        return fixed.request
    return replace(fixed.request, queues=(replace(first, server=server), *others))
