"""Layers of encryption: what was changed, or sealed for somebody else, does not open."""

from __future__ import annotations

import os

import pytest

from protocol.crypto import BoxError
from protocol.encoding import CorrId
from protocol.errors import DecodeError, TooLarge
from protocol.link_crypto import (
    FIXED_DATA_PADDED,
    USER_DATA_PADDED,
    contact_link_keys,
    invitation_data_key,
    link_key_of,
    open_link_data,
    seal_fixed_data,
    seal_user_data,
    sign_piece,
    split_signed,
)
from protocol.proxy import (
    ClientLayer,
    Forwarded,
    open_forwarded,
    open_forwarded_answer,
    relay_session_key,
    seal_forwarded,
)
from protocol.signed_key import sign_key
from tests.builders import corr_id, ed25519, server_chain, x25519


def test_link_data() -> None:
    signed = sign_piece(ed25519(), b"fixed data")
    link_key = link_key_of(split_signed(signed)[1])
    link_id, data_key = contact_link_keys(link_key)
    assert (len(link_id), len(data_key)) == (24, 32)
    assert repr(contact_link_keys(link_key)) == "ContactLinkKeys()"
    number = os.urandom(24)
    fixed = seal_fixed_data(data_key, number, signed)
    user = seal_user_data(data_key, number, signed)
    assert (len(fixed), len(user)) == (FIXED_DATA_PADDED + 40, USER_DATA_PADDED + 40)
    for sealed in (fixed, user):
        signature, piece = split_signed(open_link_data(data_key, sealed))
        assert piece == b"fixed data"
        assert ed25519().public.verify(signature, piece)
        with pytest.raises(DecodeError):
            open_link_data(invitation_data_key(link_key), sealed)
    with pytest.raises(DecodeError):
        open_link_data(data_key, b"short")
    with pytest.raises(TooLarge):
        seal_fixed_data(data_key, number, bytes(FIXED_DATA_PADDED - 1))


def test_what_was_sealed_for_others_does_not_open() -> None:
    layer = ClientLayer.agree(x25519("clientX"), x25519("serverX").public, corr_id())
    same = ClientLayer.agree(x25519("serverX"), x25519("clientX").public, corr_id())
    other = ClientLayer(layer.secret, corr_id(2))
    assert same.open_command(layer.seal_command(b"SEND")) == b"SEND"
    assert layer.open_answer(same.seal_answer(b"OK")) == b"OK"
    with pytest.raises(BoxError):
        other.open_command(layer.seal_command(b"SEND"))
    with pytest.raises(DecodeError):
        other.open_answer(same.seal_answer(b"OK"))
    forwarded = Forwarded(corr_id(), 19, x25519().public, b"body")
    boxed = seal_forwarded(bytes(32), corr_id(3), forwarded)
    assert open_forwarded(bytes(32), corr_id(3), boxed) == forwarded
    with pytest.raises(DecodeError):
        open_forwarded(bytes(32), CorrId(b""), boxed)
    with pytest.raises(DecodeError):
        open_forwarded_answer(bytes(32), corr_id(3), boxed)


def test_only_x25519_keys_are_session_keys() -> None:
    signer = ed25519("serverCertSk")
    assert relay_session_key(server_chain(), sign_key(signer, x25519().public)) == x25519().public
    with pytest.raises(DecodeError):
        relay_session_key(server_chain(), sign_key(signer, ed25519().public))
