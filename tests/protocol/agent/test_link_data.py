"""The data behind short links: captured, refused, forged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protocol.addresses import SmpServer
from protocol.agent.errors import LinkError
from protocol.agent.link_data import (
    ContactUserData,
    FixedLinkData,
    InvitationUserData,
    Owner,
    UserLinkData,
    decode_fixed,
    decode_user,
    encode_fixed,
    encode_user,
    open_link,
    request_of,
)
from protocol.agent.short_links import parse_short_link
from protocol.crypto import Ed25519PrivateKey, Ed25519PublicKey
from protocol.encoding import EntityId
from protocol.errors import DecodeError
from protocol.link_crypto import (
    contact_link_keys,
    invitation_data_key,
    link_key_of,
    open_link_data,
    seal_fixed_data,
    seal_user_data,
    sign_piece,
)
from protocol.versions import VersionRange
from tests.protocol.agent import captured
from tests.protocol.agent.captured import label, raw, vectors

NONCE = bytes(24)


def fixed_data(vector: Any) -> FixedLinkData:
    root = Ed25519PublicKey(raw(vector["root_public"]))
    entity_id = vector.get("entity_id")
    return FixedLinkData(
        VersionRange(*vector["agent_versions"]),
        root,
        captured.request(vector["request"]),
        entity_id and raw(entity_id),
    )


def user_data(vector: Any) -> UserLinkData:
    versions, blob = VersionRange(*vector["agent_versions"]), raw(vector["user_data"])
    if vector["kind"] == "link_data_invitation":
        return InvitationUserData(versions, blob)
    owners = [
        Owner(raw(o["id"]), Ed25519PublicKey(raw(o["key"])), raw(o["signature"])) for o in vector["owners"]
    ]
    relays = [replace(parse_short_link(text)) for text in vector["relays"]]
    return ContactUserData(versions, vector["direct"], tuple(owners), tuple(relays), blob)


@pytest.mark.parametrize("vector", vectors("link_data_contact") + vectors("link_data_invitation"), ids=label)
def test_link_data(vector: Any) -> None:
    root = Ed25519PrivateKey(raw(vector["root_private"]))
    signer = Ed25519PrivateKey(raw(vector.get("signer_private") or vector["root_private"]))
    piece, user = encode_fixed(fixed_data(vector)), encode_user(user_data(vector))
    assert sign_piece(root, piece).hex() == vector["signed_fixed"]
    assert sign_piece(signer, user).hex() == vector["signed_user"]
    link_key = link_key_of(piece)
    assert link_key.hex() == vector["link_key"]
    if "link_id" in vector:
        link_id, data_key = contact_link_keys(link_key)
        assert link_id.hex() == vector["link_id"]
    else:
        data_key = invitation_data_key(link_key)
    assert data_key.hex() == vector["data_key"]
    sealed_fixed, sealed_user = raw(vector["encrypted_fixed"]), raw(vector["encrypted_user"])
    assert seal_fixed_data(data_key, sealed_fixed[:24], sign_piece(root, piece)) == sealed_fixed
    assert seal_user_data(data_key, sealed_user[:24], sign_piece(signer, user)) == sealed_user
    opened = open_link(link_key, data_key, sealed_fixed, sealed_user)
    assert encode_fixed(opened.fixed) == piece
    assert encode_user(opened.user) == user


@pytest.mark.parametrize("vector", vectors("link_data_refused"), ids=label)
def test_refused(vector: Any) -> None:
    wanted = LinkError if "A_LINK" in vector["error"] else DecodeError
    names = ("link_key", "data_key", "encrypted_fixed", "encrypted_user")
    with pytest.raises(wanted):
        open_link(*(raw(vector[name]) for name in names))


ROOT, OWNER, OTHER = (Ed25519PrivateKey(bytes((n,)) * 32) for n in (1, 2, 3))


def opened(fixed: FixedLinkData, user: UserLinkData, *, by: Ed25519PrivateKey = ROOT) -> UserLinkData:
    piece = encode_fixed(fixed)
    link_key = link_key_of(piece)
    key = contact_link_keys(link_key).data_key
    return open_link(
        link_key,
        key,
        seal_fixed_data(key, NONCE, sign_piece(ROOT, piece)),
        seal_user_data(key, NONCE, sign_piece(by, encode_user(user))),
    ).user


def new_owner(owner_id: bytes, key: Ed25519PublicKey, by: Ed25519PrivateKey) -> Owner:
    return Owner(owner_id, key, by.sign(owner_id + key.der))


def contact(*owners: Owner) -> tuple[FixedLinkData, ContactUserData]:
    vector = vectors("link_data_contact")[0]
    fixed = replace(fixed_data(vector), root_key=ROOT.public, entity_id=b"group")
    return fixed, ContactUserData(VersionRange(2, 7), True, owners, (), b"hi")


def test_owners() -> None:
    first, second = new_owner(b"1", OWNER.public, ROOT), new_owner(b"2", OTHER.public, OWNER)
    fixed, user = contact(first, second)
    for signer in (ROOT, OWNER, OTHER):
        assert opened(fixed, user, by=signer) == user
    assert decode_fixed(encode_fixed(fixed) + b"later") == fixed
    assert decode_user(encode_user(user) + b"later") == user


@pytest.mark.parametrize(
    "owners",
    [
        [new_owner(b"1", ROOT.public, ROOT)],
        [new_owner(b"1", OWNER.public, ROOT), new_owner(b"1", OTHER.public, ROOT)],
        [new_owner(b"1", OWNER.public, ROOT), new_owner(b"2", OWNER.public, ROOT)],
        [new_owner(b"1", OWNER.public, OTHER)],
        [new_owner(b"1", OWNER.public, OTHER), new_owner(b"2", OTHER.public, ROOT)],
    ],
    ids=["the root itself", "id twice", "key twice", "signed by nobody", "signed by a later owner"],
)
def test_owners_refused(owners: list[Owner]) -> None:
    with pytest.raises(LinkError):
        opened(*contact(*owners))


def test_an_invitation_has_one_owner() -> None:
    fixed, _ = contact()
    user = InvitationUserData(VersionRange(2, 7), b"x" * 300)
    assert opened(fixed, user) == user
    with pytest.raises(LinkError):
        opened(fixed, user, by=OTHER)


def test_fixed_data_of_somebody_else() -> None:
    fixed, user = contact()
    piece = encode_fixed(fixed)
    key = contact_link_keys(link_key_of(piece)).data_key
    sealed_user = seal_user_data(key, NONCE, sign_piece(ROOT, encode_user(user)))
    with pytest.raises(LinkError, match="signature"):
        open_link(link_key_of(piece), key, seal_fixed_data(key, NONCE, sign_piece(OTHER, piece)), sealed_user)
    with pytest.raises(LinkError, match="hash"):
        open_link(bytes(32), key, seal_fixed_data(key, NONCE, sign_piece(ROOT, piece)), sealed_user)
    assert open_link_data(key, sealed_user)


@pytest.mark.parametrize(
    "user",
    [
        b"X\0\2\0\7\0",
        b"C\0\2\0\7T\1\5\0\0\0\0\0\0\0",
        b"C\0\2\0\7T\1\x2f\0\x2c" + OWNER.public.der + b"\0\0\0",
    ],
    ids=["kind", "owner's key", "owner's signature"],
)
def test_user_data_that_does_not_parse(user: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_user(user)


def test_the_request_must_be_about_the_queue() -> None:
    fixed, _ = contact()
    queue = fixed.request.queues[0]
    assert request_of(fixed, queue.server, queue.sender_id) is fixed.request
    reached = SmpServer(queue.server.hosts[:1], "443", queue.server.key_hash)
    assert request_of(fixed, reached, queue.sender_id).queues[0].server == reached
    with pytest.raises(LinkError):
        request_of(fixed, queue.server, EntityId(b"another"))
    with pytest.raises(LinkError):
        request_of(fixed, SmpServer(("evil.example",), "", bytes(32)), queue.sender_id)
