"""Every format of the agents: prefixes, changed bytes and rubbish end in DecodeError and in nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.agent.connection_requests import REQUEST, parse_request, request_text
from protocol.agent.e2e_params import E2E_PARAMS, E2eKeys
from protocol.agent.envelopes import (
    ClientMessage,
    decode_agent_envelope,
    decode_body,
    decode_client_message,
    encode_agent_envelope,
    encode_client_message,
)
from protocol.agent.kem import Accepted
from protocol.agent.link_data import decode_fixed, decode_user, encode_fixed, encode_user
from protocol.agent.messages import AGENT_MESSAGE
from protocol.agent.short_links import SHORT_LINK, ShortLink, parse_short_link
from protocol.agent.versions import E2E_PQ
from protocol.agent.x3dh import joiner_kem
from protocol.encoding import Reader, Writer
from protocol.errors import DecodeError
from tests.builders import ed25519
from tests.protocol.agent.captured import raw, vectors
from tests.protocol.agent.random_secrets import RandomSecrets

Codec = tuple[Callable[[bytes], Any], Callable[[Any], bytes]]


def _whole(pull: Callable[[Reader], Any], push: Callable[[Writer, Any], None]) -> Codec:
    def decode(data: bytes) -> Any:
        r = Reader(data)
        value = pull(r)
        r.check_end()
        return value

    def encode(value: Any) -> bytes:
        w = Writer()
        push(w, value)
        return w.value()

    return decode, encode


def _text(parse: Callable[[str], Any], write: Callable[[Any], str]) -> Codec:
    return lambda data: parse(data.decode("utf-8", "surrogateescape")), lambda value: write(value).encode()


@dataclass(frozen=True)
class Format:
    codec: Codec
    samples: list[bytes]
    open_ended: bool
    "It ends in text of any length, or in what later versions add: a prefix may mean something."


def _binary(kind: str) -> list[bytes]:
    return [raw(vector["binary"]) for vector in vectors(kind)]


def _signed(name: str) -> list[bytes]:
    found = vectors("link_data_contact") + vectors("link_data_invitation")
    return [raw(vector[name])[65:] for vector in found if len(vector["user_data"]) < 6000]


FORMATS = {
    "envelope": Format((decode_agent_envelope, encode_agent_envelope), _binary("agent_envelope"), True),
    "message": Format((AGENT_MESSAGE.decode, AGENT_MESSAGE.encode), _binary("agent_message"), True),
    "client message": Format(
        (decode_client_message, encode_client_message),
        [encode_client_message(ClientMessage(b"tail", key)) for key in (None, ed25519().public)],
        True,
    ),
    "keys": Format(_whole(E2E_PARAMS.pull, E2E_PARAMS.push), _binary("e2e_params"), False),
    "request": Format(_whole(REQUEST.pull, REQUEST.push), _binary("conn_req_binary"), False),
    "short link": Format(_whole(SHORT_LINK.pull, SHORT_LINK.push), _binary("short_link"), False),
    "fixed data": Format((decode_fixed, encode_fixed), _signed("signed_fixed"), True),
    "user data": Format((decode_user, encode_user), _signed("signed_user"), False),
    "request text": Format(
        _text(parse_request, request_text), [v["text"].encode() for v in vectors("conn_req_text")], True
    ),
    "short link text": Format(
        _text(parse_short_link, ShortLink.text), [v["text"].encode() for v in vectors("short_link")], True
    ),
}


def understood(form: Format, data: bytes) -> bool:
    """What is read can be written and read again; anything but DecodeError gets out and fails the test.

    Once written it stays what it is. Before, it may say more than we write: old versions have no queue modes.
    """
    decode, encode = form.codec
    try:
        value = decode(encode(decode(data)))
    except DecodeError:
        return False
    assert decode(encode(value)) == value
    return True


@pytest.mark.parametrize("name", FORMATS)
def test_prefixes(name: str) -> None:
    form = FORMATS[name]
    for sample in form.samples[:6]:
        assert understood(form, sample)
        for end in range(0, len(sample), 1 if len(sample) < 1000 else 37):
            assert not understood(form, sample[:end]) or form.open_ended


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_changed_bytes(name: str, data: st.DataObject) -> None:
    form = FORMATS[name]
    changed = bytearray(data.draw(st.sampled_from(form.samples)))
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(changed)))
    understood(form, bytes(changed))
    understood(form, bytes(changed[:cut]) + data.draw(st.binary(max_size=8)))


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.binary(max_size=120))
def test_rubbish(name: str, data: bytes) -> None:
    understood(FORMATS[name], data)


@given(st.binary(max_size=120))
def test_rubbish_as_a_body(data: bytes) -> None:
    try:
        decode_body(data)
    except DecodeError:
        return
    assert len(data) >= 27


def test_keys_that_accept_are_no_answer_to_nothing() -> None:
    fresh = RandomSecrets()
    theirs = E2eKeys(fresh.dh(), fresh.dh(), fresh.kem_pair()).params(E2E_PQ)
    kem = joiner_kem(theirs, True, E2E_PQ, fresh)
    assert kem is not None
    assert isinstance(kem.params, Accepted)
    w = Writer(b"\0\7R")
    E2E_PARAMS.push(w, type(theirs)(E2E_PQ, theirs.k1, theirs.k2, kem.params))
    with pytest.raises(DecodeError):
        decode_agent_envelope(w.value() + b"R")


def test_a_joiner_proposes_when_the_creator_did_not() -> None:
    fresh = RandomSecrets()
    theirs = E2eKeys(fresh.dh(), fresh.dh()).params(E2E_PQ)
    kem = joiner_kem(theirs, True, E2E_PQ, fresh)
    assert kem is not None
    assert kem.accepted is None
    assert joiner_kem(theirs, False, E2E_PQ, fresh) is None
    assert joiner_kem(theirs, True, E2E_PQ - 1, fresh) is None


LINK = "simplex:/a#" + "A" * 43 + "?h=smp.example.org"
INVITATION = "simplex:/i#" + "A" * 32 + "/" + "A" * 43 + "?h=smp.example.org"


def test_short_links_as_people_write_them() -> None:
    assert parse_short_link(LINK.replace("/a#", "/A#")) == parse_short_link(LINK)
    assert parse_short_link(INVITATION).link_id == bytes(24)


@pytest.mark.parametrize(
    "text",
    [
        LINK.replace("/a#", "/x#"),
        LINK.replace("/a#", "/i#"),
        INVITATION.replace("/i#", "/I#"),
        INVITATION.replace("/i#", "/a#"),
        INVITATION.replace("A" * 32 + "/", "A" * 31 + "/"),
        LINK.replace("A" * 43, "A" * 42),
        LINK.replace("?h=smp.example.org", ""),
        LINK + "&p=0",
        LINK + "&c=AAAA",
        LINK + "&h2=%ff",
        LINK + " and more",
    ],
)
def test_refused_short_links(text: str) -> None:
    with pytest.raises(DecodeError):
        parse_short_link(text)


@pytest.mark.parametrize("data", [b"X", b"CX", b"I\1\1\xff\0\0", b"C\1", b"CA\1\1\xff\0\0"], ids=repr)
def test_refused_binary_short_links(data: bytes) -> None:
    with pytest.raises(DecodeError):
        SHORT_LINK.pull(Reader(data))


def test_refused_requests() -> None:
    sample = _binary("conn_req_binary")[0]
    for changed in (b"X" + sample[1:], sample.replace(sample[1:5], b"\0\7\0\2", 1)):
        with pytest.raises(DecodeError):
            REQUEST.pull(Reader(changed))
    with_data = next(raw(v["binary"]) for v in vectors("conn_req_binary") if v["value"]["data"])
    with pytest.raises(DecodeError):
        REQUEST.pull(Reader(with_data.replace("é".encode(), b"\xff\xff")))


@pytest.mark.parametrize("data", [b"", b"X", b"Kxyz"], ids=repr)
def test_refused_client_messages(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_client_message(data)


def test_an_invitation_that_is_no_text() -> None:
    with pytest.raises(DecodeError):
        decode_agent_envelope(b"\0\7I\0\2\xff\xff")


def test_trailing_bytes_of_a_message() -> None:
    with pytest.raises(DecodeError):
        AGENT_MESSAGE.decode(b"M" + bytes(8) + b"\0Hx")
    with pytest.raises(DecodeError):
        AGENT_MESSAGE.decode(b"M" + bytes(8) + b"\0QX")


def test_user_data_with_another_kind_of_key() -> None:
    sample = next(s for s in _signed("signed_fixed") if s)
    with pytest.raises(DecodeError):
        decode_fixed(sample.replace(bytes.fromhex("2b6570"), bytes.fromhex("2b656e"), 1))
