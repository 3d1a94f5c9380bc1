"""Bytes that are cut, changed or random: a typed error or another valid value, never another exception."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.blocks import session_chains, split_batch
from protocol.crypto import X25519PublicKey
from protocol.errors import DecodeError
from protocol.session_params import ntf_params, smp_params
from protocol.signed_key import open_signed_key, sign_key
from protocol.transmission import parse_transmission, verify
from protocol.versions import SMP_BLOCK_SIZE
from tests.builders import ed448, ed25519, fixed, server_chain, vectors, x25519
from tests.protocol.parsers import PARSERS, TYPED, understood

ALL_BITS_UP_TO = 300
"Longer inputs have a sample of their bits flipped."
SAMPLED_BITS = 400


def flips(data: bytes) -> Iterator[bytes]:
    bits = len(data) * 8
    step = 1 if len(data) <= ALL_BITS_UP_TO else max(1, bits // SAMPLED_BITS)
    for bit in range(0, bits, step):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


def prefixes(data: bytes) -> Iterator[bytes]:
    step = 1 if len(data) <= ALL_BITS_UP_TO else max(1, len(data) // SAMPLED_BITS)
    return (data[:end] for end in range(0, len(data), step))


def captured_bytes(group: str, field: str) -> dict[bytes, list[int]]:
    """Each byte string of a group once, with the first and the last version that has it."""
    found: dict[bytes, list[int]] = {}
    for vector in vectors(group):
        versions = found.setdefault(bytes.fromhex(vector[field]), [])
        versions[1:] = [vector.get("version", 0)]
    return found


MESSAGES = {
    "ntf_command": "NTF command",
    "ntf_response": "NTF response",
    "smp_command": "SMP command",
    "smp_response": "SMP message",
}


@pytest.mark.parametrize("group", MESSAGES)
def test_messages(group: str) -> None:
    for wire, versions in captured_bytes(group, "hex").items():
        for version in set(versions):
            parse = PARSERS[f"{MESSAGES[group]} v{version}"]
            assert understood(parse, wire)
            for bad in (*prefixes(wire), *flips(wire)):
                understood(parse, bad)


@pytest.mark.parametrize("group", ["ntf_transmission", "smp_transmission"])
def test_transmissions(group: str) -> None:
    name = group.replace("_", " ").replace("ntf", "NTF").replace("smp", "SMP")
    for version in (1, 2) if group.startswith("ntf") else (6, 7, 16):
        parse = PARSERS[f"{name} v{version}"]
        seen = {v["transmission_hex"] for v in vectors(group) if v["version"] == version}
        for wire in sorted(seen)[::3]:
            assert understood(parse, bytes.fromhex(wire))
            for bad in (*prefixes(bytes.fromhex(wire)), *flips(bytes.fromhex(wire))):
                understood(parse, bad)


def test_batches() -> None:
    for vector in vectors("ntf_batch"):
        if vector["version"] > 1:
            content = bytes.fromhex(vector["blocks"][0]["content_hex"])
            assert split_batch(content)
            for cut in prefixes(content):
                with pytest.raises(DecodeError):
                    split_batch(cut)
            for bad in flips(content):
                understood(PARSERS["batch"], bad)


HELLOS = {
    "ntf_server_handshake": "NTF server hello",
    "ntf_client_handshake": "NTF client hello",
    "smp_server_handshake": "SMP router hello",
    "smp_client_handshake": "SMP client hello",
    "smp_server_handshake_response": "SMP service answer",
}


@pytest.mark.parametrize("group", HELLOS)
def test_hellos(group: str) -> None:
    wires = sorted(captured_bytes(group, "hex"), key=len)
    for wire in {wires[0], wires[-1]}:
        for bad in itertools.islice(itertools.chain(prefixes(wire), flips(wire)), 0, None, 3):
            assert understood(PARSERS[HELLOS[group]], bad)  # a connection tells in events


def texts(group: str) -> Iterable[bytes]:
    return [vector["text"].encode() for vector in vectors(group) if "text" in vector]


VALUES: dict[str, Iterable[bytes]] = {
    "queue text": texts("smp_queue_ntf"),
    "push messages": texts("pn_messages"),
    "SMP address": [text for text in texts("server_address") if text.startswith(b"smp")],
    "NTF address": [text for text in texts("server_address") if text.startswith(b"ntf")],
    "queue": [bytes.fromhex(vector["hex"]) for vector in vectors("smp_queue_ntf") if "hex" in vector],
    "NMSG meta": [bytes.fromhex(vectors("nmsg_meta")[0]["hex"])],
    "signed key": [sign_key(ed25519("serverCertSk"), x25519().public)],
    "certificate": server_chain(),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.filterwarnings("ignore")  # the certificate parser warns of what it then accepts or refuses
def test_values(name: str) -> None:
    for wire in VALUES[name]:
        assert understood(PARSERS[name], wire)
        for bad in (*prefixes(wire), *flips(wire)):
            understood(PARSERS[name], bad)


@pytest.mark.parametrize("signer", [ed25519("serverCertSk"), ed448()], ids=["Ed25519", "Ed448"])
def test_no_change_of_a_signed_key_verifies(signer: Any) -> None:
    signed = sign_key(signer, x25519().public)
    for bad in (*prefixes(signed), *flips(signed), signed + b"\0"):
        with pytest.raises(DecodeError):
            open_signed_key(server_chain()[0], bad, X25519PublicKey)


def test_no_change_of_an_encrypted_block_opens() -> None:
    ours, _ = session_chains(fixed("sessionId"), bytes(32))
    block = ours.encrypt(b"content", SMP_BLOCK_SIZE)
    for bad in (*flips(block), block[:-1], block[:15], b""):
        theirs, _ = session_chains(fixed("sessionId"), bytes(32))
        with pytest.raises(DecodeError):
            theirs.decrypt(bad)


@pytest.mark.parametrize(
    ("group", "name", "version", "key"),
    [
        ("ntf_transmission", "TCHK auth ed25519", 2, ed25519()),
        ("ntf_transmission", "TCHK auth x25519", 2, x25519()),
        ("smp_transmission", "NSUB auth ed25519", 16, ed25519()),
    ],
)
def test_no_change_of_a_transmission_is_authorised(group: str, name: str, version: int, key: Any) -> None:
    make = ntf_params if group.startswith("ntf") else smp_params
    params = make(version, fixed("sessionId"), own_session_key=x25519("serverX"))
    [vector] = [v for v in vectors(group) if v["name"] == name and v["version"] == version]
    wire = bytes.fromhex(vector["transmission_hex"])
    assert verify(params, key.public, parse_transmission(params, wire))
    for bad in (*prefixes(wire), *flips(wire)):
        try:
            raw = parse_transmission(params, bad)
        except TYPED:
            continue
        assert not verify(params, key.public, raw)


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.filterwarnings("ignore")
@given(data=st.binary(max_size=700))
@settings(max_examples=25)
def test_random_bytes(name: str, data: bytes) -> None:
    understood(PARSERS[name], data)


TAGS = [b"TNEW T", b"TVFY ", b"TRPL ", b"TCRN ", b"SNEW S", b"IDTKN ", b"ERR ", b"SUB ", b"TKN ", b"NEW "]
TAGS += [
    b"SUBS ",
    b"NKEY ",
    b"SEND ",
    b"ACK ",
    b"IDS ",
    b"SOK ",
    b"SOKS ",
    b"MSG ",
    b"NMSG ",
    b"ENDS ",
    b"NID ",
]


@given(st.sampled_from(TAGS), st.binary(max_size=300))
@settings(max_examples=300)
def test_random_parameters(tag: bytes, parameters: bytes) -> None:
    for name in ("NTF command v3", "NTF response v1", "SMP command v19", "SMP message v19", "SMP command v8"):
        understood(PARSERS[name], tag + parameters)


@given(st.text(max_size=80))
def test_random_addresses(text: str) -> None:
    understood(PARSERS["SMP address"], ("smp://" + text).encode("utf-8", "surrogatepass"))
