"""The data behind a short link: what its owner signed once, and what he may change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from protocol.addresses import SmpServer
from protocol.agent.connection_requests import ConnectionRequest, pull_request, push_request
from protocol.agent.errors import LinkError
from protocol.agent.short_links import ShortLink, pull_short_link, push_short_link
from protocol.crypto import (
    ED25519_SIGNATURE_SIZE,
    Ed25519PrivateKey,
    Ed25519PublicKey,
    decode_public_key,
    push_key,
)
from protocol.encoding import EntityId, Reader, Writer
from protocol.errors import DecodeError
from protocol.link_crypto import link_key_of, open_link_data, split_signed
from protocol.versions import VersionRange, pull_version_range, push_version_range

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


def new_owner(owner_id: bytes, key: Ed25519PublicKey, by: Ed25519PrivateKey) -> Owner:
    return Owner(owner_id, key, by.sign(owner_id + key.der))


def encode_fixed(fixed: FixedLinkData) -> bytes:
    w = Writer()
    push_version_range(w, fixed.agent_versions)
    push_key(w, fixed.root_key)
    push_request(w, fixed.request)
    if fixed.entity_id is not None:
        w.push_short(fixed.entity_id)
    return w.value()


def decode_fixed(data: bytes) -> FixedLinkData:
    """What a later version may add behind is not looked at."""
    r = Reader(data)
    versions, root_key, request = pull_version_range(r), _pull_ed25519(r), pull_request(r)
    return FixedLinkData(versions, root_key, request, None if r.at_end else r.pull_short())


def encode_user(user: UserLinkData) -> bytes:
    w = Writer(b"C" if isinstance(user, ContactUserData) else b"I")
    push_version_range(w, user.agent_versions)
    if isinstance(user, ContactUserData):
        w.push_bool(user.direct)
        _push_list(w, user.owners, _push_owner)
        _push_list(w, user.relays, push_short_link)
    if len(user.blob) < _LONG_BLOB:
        w.push_short(user.blob)
    else:
        w.push_bytes(bytes((_LONG_BLOB,)))
        w.push_large(user.blob)
    return w.value()


def decode_user(data: bytes) -> UserLinkData:
    r = Reader(data)
    tag, versions = r.pull_bytes(1), pull_version_range(r)
    if tag == b"I":
        return InvitationUserData(versions, _pull_blob(r))
    if tag == b"C":
        direct = r.pull_bool()
        owners, relays = _pull_list(r, _pull_owner), _pull_list(r, pull_short_link)
        return ContactUserData(versions, direct, owners, relays, _pull_blob(r))
    raise DecodeError


def _push_list(w: Writer, items: Sequence[T], push: Callable[[Writer, T], None]) -> None:
    w.push_bytes(bytes((len(items),)))
    for item in items:
        push(w, item)


def _pull_list(r: Reader, pull: Callable[[Reader], T]) -> tuple[T, ...]:
    return tuple([pull(r) for _ in range(r.pull_byte())])


def _push_owner(w: Writer, owner: Owner) -> None:
    inner = Writer()
    inner.push_short(owner.owner_id)
    push_key(inner, owner.key)
    inner.push_short(owner.signature)
    w.push_short(inner.value())


def _pull_owner(r: Reader) -> Owner:
    inner = Reader(r.pull_short())
    owner = Owner(inner.pull_short(), _pull_ed25519(inner), inner.pull_short())
    if len(owner.signature) != ED25519_SIGNATURE_SIZE:
        raise DecodeError
    return owner


def _pull_ed25519(r: Reader) -> Ed25519PublicKey:
    key = decode_public_key(r.pull_short())
    if not isinstance(key, Ed25519PublicKey):
        raise DecodeError
    return key


def _pull_blob(r: Reader) -> bytes:
    if r.peek() == bytes((_LONG_BLOB,)):
        r.pull_bytes(1)
        return r.pull_large()
    return r.pull_short()


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
