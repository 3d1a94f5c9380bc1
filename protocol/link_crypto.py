"""The crypto of short links: what the router keeps of a link is sealed with keys made from the link itself.

`signed` pieces (fixed data, user data) are a signature and what it covers; what they contain is the agent's
business.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from protocol.blocks import pad, unpad
from protocol.crypto import (
    KEY_SIZE,
    Ed25519PrivateKey,
    box,
    hkdf_sha512,
    open_box,
)
from protocol.encoding import NONCE_SIZE, CorrId, EntityId, Reader, nonce, short
from protocol.hiding import hides_bytes

LINK_ID_SIZE = 24
LINK_KEY_SIZE = 32
FIXED_DATA_PADDED = 2008
USER_DATA_PADDED = 13784


@hides_bytes
class ContactLinkKeys(NamedTuple):
    """A contact link is found by an id that its key gives; an invitation's id is made by the router."""

    link_id: EntityId
    data_key: bytes


def sender_id_of(corr_id: CorrId) -> EntityId:
    """The sender id of a queue that NEW creates with a link: known beforehand, the same when repeated."""
    return EntityId(hashlib.sha3_384(corr_id).digest()[:LINK_ID_SIZE])


def link_key_of(fixed_data: bytes) -> bytes:
    """The secret in the link: it also proves the fixed data, from which it is made."""
    return hashlib.sha3_256(fixed_data).digest()


def contact_link_keys(link_key: bytes) -> ContactLinkKeys:
    keys = hkdf_sha512(b"", link_key, b"SimpleXContactLink", LINK_ID_SIZE + KEY_SIZE)
    return ContactLinkKeys(EntityId(keys[:LINK_ID_SIZE]), keys[LINK_ID_SIZE:])


def invitation_data_key(link_key: bytes) -> bytes:
    return hkdf_sha512(b"", link_key, b"SimpleXInvLink", KEY_SIZE)


def sign_piece(key: Ed25519PrivateKey, piece: bytes) -> bytes:
    return short(key.sign(piece)) + piece


def split_signed(signed: bytes) -> tuple[bytes, bytes]:
    """(signature, piece); nothing is verified yet, since the key may stand in the piece."""
    r = Reader(signed)
    return r.pull_short(), r.pull_tail()


def seal_fixed_data(data_key: bytes, number: bytes, signed: bytes) -> bytes:
    """`number` is the nonce: 24 random bytes."""
    return number + box(data_key, number, pad(signed, FIXED_DATA_PADDED))


def seal_user_data(data_key: bytes, number: bytes, signed: bytes) -> bytes:
    return number + box(data_key, number, pad(signed, USER_DATA_PADDED))


def open_link_data(data_key: bytes, sealed: bytes) -> bytes:
    """The signed piece inside; any padded size is taken. DecodeError for what does not open."""
    return unpad(open_box(data_key, nonce(sealed[:NONCE_SIZE]), sealed[NONCE_SIZE:]))
