"""One example of each thing a parser refuses, so that every refusal is met in every run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from protocol.addresses import pull_smp_server
from protocol.blocks import pack_batches, unpad
from protocol.crypto import X25519PublicKey, decode_private_key
from protocol.device_token import decode_device_token
from protocol.encoding import Reader, short, split_short, split_three_shorts, split_two_shorts
from protocol.errors import CMD_SYNTAX, DecodeError
from protocol.ntf_commands import NTF_COMMANDS
from protocol.push_messages import open_nmsg_meta, open_push
from protocol.signed_key import open_signed_key, sign_key
from protocol.smp_codec import SMP_COMMANDS, SMP_MESSAGES
from protocol.smp_messages import Nsubs
from protocol.versions import SMP_RCV_SERVICE, SMP_SERVICE_CERTS
from tests.builders import ed25519, fixed, ids, new, server_chain, snew, tnew, x25519

HASH = short(fixed("keyHash"))


@pytest.mark.parametrize(
    "wire",
    [
        b"\0\0" + HASH,
        b"\1\4host\2\xff\xff" + HASH,
        b"\1\4host" + short(b"012345") + HASH,
        b"\1\4host\1x" + HASH,
        b"\1\4ho:t\0" + HASH,
        b"\1\0\0" + HASH,
        b"\1\4host\0\4hash",
    ],
    ids=["no hosts", "port not text", "port too long", "port no number", "colon", "empty", "hash"],
)
def test_servers(wire: bytes) -> None:
    with pytest.raises(DecodeError):
        pull_smp_server(Reader(wire))


@pytest.mark.parametrize("padded", [b"", b"\0", b"\0\2a"])
def test_padding(padded: bytes) -> None:
    with pytest.raises(DecodeError):
        unpad(padded)


@pytest.mark.parametrize(
    ("split", "strings"), [(split_short, 1), (split_two_shorts, 2), (split_three_shorts, 3)]
)
def test_short_strings_that_are_cut(split: Callable[[bytes], tuple[bytes, ...]], strings: int) -> None:
    whole = b"\2ab" * strings
    assert split(whole) == (*[b"ab"] * strings, b"")
    for end in range(len(whole)):
        with pytest.raises(DecodeError):
            split(whole[:end])


def test_nothing_to_send_is_no_block() -> None:
    assert pack_batches([], 512) == []


def test_keys_and_tokens() -> None:
    with pytest.raises(DecodeError):
        decode_private_key(ed25519().der + b"\0")
    for token in (b"XX\1t", b"A", b"", b"AD\1tt"):
        with pytest.raises(DecodeError):
            decode_device_token(token)


def test_pushes() -> None:
    for boxed in (b"", bytes(144)):
        with pytest.raises(DecodeError):
            open_push(bytes(32), bytes(24), boxed)
        with pytest.raises(DecodeError):
            open_nmsg_meta(bytes(32), bytes(24), boxed)


def test_signature_of_another_algorithm_than_named() -> None:
    good = sign_key(ed25519("serverCertSk"), x25519().public)
    renamed = good.replace(bytes.fromhex("06032b6570"), bytes.fromhex("06032b6571"))
    unused_bits = good[:-65] + b"\1" + good[-64:]
    for bad in (renamed, unused_bits):
        assert bad != good
        with pytest.raises(DecodeError):
            open_signed_key(server_chain()[0], bad, X25519PublicKey)


def test_commands() -> None:
    wires = [
        NTF_COMMANDS.encode(tnew(), 3).replace(b"TNEW T", b"TNEW X"),
        NTF_COMMANDS.encode(snew(), 3).replace(b"SNEW S", b"SNEW X"),
    ]
    for wire in wires:
        with pytest.raises(DecodeError) as refused:
            NTF_COMMANDS.decode(wire, 3)
        assert refused.value.error == CMD_SYNTAX


def test_a_tag_alone_is_a_command_of_few_versions() -> None:
    """A service of an older version does not count its queues; no other word may lack its parameters."""
    assert SMP_COMMANDS.decode(b"NSUBS", SMP_RCV_SERVICE - 1) == Nsubs()
    with pytest.raises(DecodeError) as refused:
        SMP_COMMANDS.decode(b"NSUBS", SMP_RCV_SERVICE)
    assert refused.value.error == CMD_SYNTAX
    with pytest.raises(DecodeError) as refused:
        SMP_MESSAGES.decode(b"SOK", SMP_SERVICE_CERTS - 1)
    assert refused.value.error == CMD_SYNTAX


def test_smp() -> None:
    created = SMP_COMMANDS.encode(new(), 19)
    assert created.endswith(b"0S00")
    for tail in (b"0X00", b"2S00", b"0S1X00", b"0S0", b"0S000"):
        with pytest.raises(DecodeError):
            SMP_COMMANDS.decode(created[:-4] + tail, 19)
    with pytest.raises(DecodeError):
        SMP_MESSAGES.decode(SMP_MESSAGES.encode(ids(), 15)[:-2] + b"1X0", 15)
    for queues in (bytes(8) + short(bytes(15)), bytes(8), bytes(7)):
        with pytest.raises(DecodeError):
            SMP_MESSAGES.decode(b"SOKS " + queues, 19)
    with pytest.raises(DecodeError):
        SMP_MESSAGES.decode(b"PKEY \0\0\x13\0\x08", 19)  # a range that ends before it begins
