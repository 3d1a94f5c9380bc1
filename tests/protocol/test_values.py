"""Small parts that the larger tests do not reach on their own."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st
from nacl import _sodium
from nacl import bindings as sodium

from protocol import crypto
from protocol.addresses import parse_ntf_server, parse_smp_queue_ntf, parse_smp_server
from protocol.blocks import pack_batches
from protocol.commands import CredentialRule, check_credentials
from protocol.crypto import (
    BoxError,
    X25519PublicKey,
    box,
    decode_x25519_public,
    hkdf_sha512,
    hkdf_sha512_pair,
    open_box,
)
from protocol.device_token import ApnsToken, Provider, decode_device_token, encode_device_token
from protocol.encoding import EntityId, Writer, large, nonce, unb64
from protocol.error_codec import decode_error
from protocol.errors import (
    CMD_HAS_AUTH,
    INTERNAL,
    DecodeError,
    ErrorType,
    ProtocolError,
    TooLarge,
    store_error,
)
from protocol.ntf_commands import NTF_COMMANDS, Ping
from protocol.push_messages import decode_pn_messages, open_push, seal_push
from protocol.smp_codec import SMP_COMMANDS
from protocol.smp_messages import LinkData, NewLink, QueueMode, Send
from tests.builders import ed448, ed25519, new, queue_ntf, smp_server, web_push_token, x25519

HASH = "QEFCQ0RFRkdISUpLTE1OT1BRUlNUVVZXWFlaW1xdXl8="


def test_box_is_crypto_box() -> None:
    ours, theirs = x25519("serverX"), x25519("clientX")
    number, text = os.urandom(24), b"text"
    precomputed = sodium.crypto_box_beforenm(theirs.public.raw, ours.raw)
    boxed = box(ours.exchange(theirs.public), number, text)
    assert boxed == sodium.crypto_box_easy_afternm(text, number, precomputed)
    assert open_box(theirs.exchange(ours.public), number, boxed) == text
    with pytest.raises(BoxError):
        open_box(bytes(32), number, boxed)
    with pytest.raises(BoxError):
        open_box(bytes(32), number, b"short")


@given(st.binary(min_size=32, max_size=32))
def test_both_ways_to_hsalsa20(key: bytes) -> None:
    assert crypto._hsalsa20(key) == crypto._hsalsa20_from_keystream(key)


def test_hsalsa20_is_found_or_not() -> None:
    assert crypto._hsalsa20_in("/nonexistent.so") is None
    assert crypto._hsalsa20_in(hashlib.__spec__.origin or "") is None
    native = crypto._hsalsa20_in(_sodium.__file__)
    assert native is not None
    with pytest.raises(ValueError, match="32 bytes"):
        native(b"short")


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_hkdf(key: bytes, info: bytes) -> None:
    expected = HKDF(hashes.SHA512(), 128, b"", info).derive(key)
    assert b"".join(hkdf_sha512_pair(key, info)) == expected
    assert hkdf_sha512(b"salt", key, info, 20) == HKDF(hashes.SHA512(), 20, b"salt", info).derive(key)


def test_keys() -> None:
    for key in (ed25519(), ed448()):
        assert key.public.verify(key.sign(b"text"), b"text")
        assert not key.public.verify(key.sign(b"text"), b"other")
    assert decode_x25519_public(x25519().public.der) == x25519().public
    with pytest.raises(DecodeError):
        decode_x25519_public(ed25519().public.der)
    with pytest.raises(DecodeError):
        x25519().exchange(X25519PublicKey(bytes(32)))


def test_nonces_are_cut_or_filled() -> None:
    assert nonce(b"ab") == b"ab" + bytes(22)
    assert nonce(bytes(range(30))) == bytes(range(24))


@pytest.mark.parametrize("text", [b"a", b"ab+c", b"ab/c", b"a b=", b"\xff\xff", b"ab==cd"])
def test_not_base64url(text: bytes) -> None:
    with pytest.raises(DecodeError):
        unb64(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"ntf://{HASH}@host",
        f"smp://{HASH}@",
        f"smp://{HASH}@host:0",
        f"smp://{HASH}@host:65536",
        f"smp://{HASH}@host:123456",
        f"smp://{HASH}@host:١",
        f"smp://{HASH}@ho st",
        f"smp://{HASH}@höst",
        f"smp://{HASH}@host\ud800",
        f"smp://{HASH}@::1",
        f"smp://{HASH}@host/path",
        f"smp://{HASH}@host,",
        f"smp://{HASH}@" + "h" * 256,
        f"smp://{HASH}@" + ",".join(["h"] * 256),
        "smp://QEFC@host",
        "smp://Q@host",
    ],
)
def test_no_addresses(text: str) -> None:
    with pytest.raises(DecodeError):
        parse_smp_server(text)


def test_addresses() -> None:
    assert parse_smp_server(f"smp://{HASH}@host").port_number == 5223
    assert parse_smp_server(f"smp://{HASH.rstrip('=')}@host:1").port_number == 1
    assert parse_ntf_server(f"ntf://{HASH}@host").port_number == 443
    assert parse_smp_server(f"smp://{HASH}@[::1]:7000").hosts == ("[::1]",)
    with pytest.raises(DecodeError):
        parse_smp_queue_ntf(b"no slash")
    assert str(smp_server()) == f"smp://{HASH}@localhost:5223"


@pytest.mark.parametrize(
    "text",
    [
        "PROXY",
        "OTHER NO_SESSION",
        "PROXY OTHER TIMEOUT",
        "PROXY BROKER OTHER TIMEOUT",
        "PROXY BROKER NETWORK OTHER",
        "PROXY BROKER NETWORK OTHER \x01x",
        "PROXY BROKER NETWORK TLS \x05x",
        "PROXY BROKER RESPONSE \x01",
        "PROXY BROKER TRANSPORT OTHER",
        "PROXY PROTOCOL OTHER",
        "PROXY PROTOCOL " * 6 + "AUTH",
        "CMD",
        "CMD OTHER",
        "BLOCKED reason=other",
        "BLOCKED reason=spam,other",
        "NAME OTHER",
        "AUTH ",
        "",
    ],
)
def test_no_errors(text: str) -> None:
    with pytest.raises(DecodeError):
        decode_error(text.encode())


def test_errors_carry_their_answer() -> None:
    assert str(ProtocolError(INTERNAL)) == "INTERNAL"
    error = store_error("ü" * 300)
    assert decode_error(error.text) == error
    assert len(error.text) == 206


def test_lists_on_the_wire_are_short_and_not_empty() -> None:
    for values in ([], [b""] * 256):
        with pytest.raises(ValueError, match="1 to 255"):
            Writer().push_nonempty(values, Writer.push_short)


def test_later_flags_of_send_are_ignored() -> None:
    assert SMP_COMMANDS.decode(b"SEND Txyz body", 19) == Send(True, b"body")
    for bad in (b"SEND T", b"SEND X body", b"SEND "):
        with pytest.raises(DecodeError):
            SMP_COMMANDS.decode(bad, 19)


def test_credentials_are_part_of_the_table() -> None:
    assert NTF_COMMANDS.credentials(Ping()) is CredentialRule.NOTHING
    assert SMP_COMMANDS.credentials(Send(True, b"")) is CredentialRule.ENTITY_ONLY


def test_pushes() -> None:
    secret = os.urandom(32)
    number = os.urandom(24)
    boxed = seal_push(secret, number, b"data")
    assert len(boxed) == 3072 + 16
    assert open_push(secret, number, boxed) == b"data"
    with pytest.raises(TooLarge):
        seal_push(secret, number, bytes(3071))


def test_too_large_for_a_block() -> None:
    assert pack_batches([bytes(507)], 512) == [b"\1" + large(bytes(507))]
    with pytest.raises(TooLarge):
        pack_batches([bytes(508)], 512)


def test_only_hexadecimal_device_tokens_have_one_spelling() -> None:
    assert ApnsToken(Provider.APNS_DEV, b"AB").token == b"ab"
    assert ApnsToken(Provider.APNS_NULL, b"Any Text").token == b"Any Text"


def test_provider_tags() -> None:
    assert [provider.tag for provider in Provider] == ["AD", "AP", "AT", "AN", "FC", "WP"]


def test_web_push_keys_have_one_size() -> None:
    good = encode_device_token(web_push_token())
    assert decode_device_token(good) == web_push_token()
    for token in (replace(web_push_token(), auth=b"short"), replace(web_push_token(), p256dh=b"short")):
        with pytest.raises(DecodeError):
            decode_device_token(encode_device_token(token))


@pytest.mark.parametrize("timestamp", [b"-1", b"1.5", b"", b"9" * 19, b"1" * 20, b"1".zfill(20)])
def test_timestamps_of_pushes(timestamp: bytes) -> None:
    entry = queue_ntf().text + b" %s AAAA AAAA"
    assert decode_pn_messages(entry % str(2**63 - 1).encode())
    with pytest.raises(DecodeError):
        decode_pn_messages(entry % timestamp)


@pytest.mark.parametrize("mode", QueueMode)
def test_links(mode: QueueMode) -> None:
    link_id = EntityId(b"link") if mode is QueueMode.CONTACT else None
    link = NewLink(link_id, EntityId(b"sender"), LinkData(b"fixed", b"user"))
    command = replace(new(), mode=mode, link=link)
    assert SMP_COMMANDS.decode(SMP_COMMANDS.encode(command, 19), 19) == command


@pytest.mark.parametrize(
    ("auth", "entity", "error"), [(b"", b"", None), (b"a", b"", CMD_HAS_AUTH), (b"", b"e", CMD_HAS_AUTH)]
)
def test_commands_that_need_nothing(auth: bytes, entity: bytes, error: ErrorType | None) -> None:
    assert check_credentials(CredentialRule.NOTHING, auth, EntityId(entity)) == error
