"""Links and sealed messages, as bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.envelopes import (
    MAX_CONTENT,
    Confirmation,
    Content,
    open_envelope,
    parse_envelope,
    seal_confirmation,
    seal_content,
)
from agent.links import QueueLink, parse_link
from protocol.addresses import SmpServer
from protocol.crypto import X25519PrivateKey, X25519PublicKey
from protocol.encoding import EntityId
from protocol.errors import DecodeError, TooLarge
from protocol.messages_crypto import MAX_MESSAGE_ENCRYPTED_BLOCKS

ALICE, BOB = X25519PrivateKey(b"a" * 32), X25519PrivateKey(b"b" * 32)
SECRET = ALICE.exchange(BOB.public)
NONCE = b"n" * 24
LINK = QueueLink(
    SmpServer(("one.example", "two.example"), "5224", b"h" * 32), EntityId(b"s" * 24), ALICE.public
)


def test_link_text() -> None:
    assert parse_link(LINK.text) == LINK
    assert "#/?v=1&dh=" in LINK.text
    assert parse_link(LINK.text.replace("v=1", "v=1-4")) == LINK


@pytest.mark.parametrize(
    "text",
    [
        "",
        LINK.text[:-1],
        LINK.text.replace("&k=s", ""),
        LINK.text.replace("v=1", "v=2"),
        LINK.text.replace("smp://", "ntf://"),
        LINK.text.replace("dh=", "dh=AAAA"),
        QueueLink(LINK.server, LINK.sender_id, X25519PublicKey(bytes(32))).text,
    ],
)
def test_what_is_no_link(text: str) -> None:
    with pytest.raises(DecodeError):
        parse_link(text)


@given(st.text())
def test_random_text_is_refused(text: str) -> None:
    with pytest.raises(DecodeError):
        parse_link(text)


@pytest.mark.parametrize("reply_to", [None, LINK])
def test_confirmation(reply_to: QueueLink | None) -> None:
    sealed = seal_confirmation(BOB, ALICE.public, NONCE, Confirmation(reply_to))
    envelope = parse_envelope(sealed)
    assert envelope.key == BOB.public
    assert open_envelope(ALICE.exchange(BOB.public), envelope) == Confirmation(reply_to)


@given(st.binary(max_size=MAX_CONTENT), st.integers(0, 2**63 - 1))
def test_content(body: bytes, number: int) -> None:
    sealed = seal_content(SECRET, NONCE, Content(number, body))
    envelope = parse_envelope(sealed)
    assert envelope.key is None
    assert open_envelope(SECRET, envelope) == Content(number, body)


def test_all_sizes_look_alike_and_fit() -> None:
    sizes = {len(seal_content(SECRET, NONCE, Content(1, bytes(size)))) for size in (0, 1, MAX_CONTENT)}
    assert len(sizes) == 1
    assert max(sizes) <= MAX_MESSAGE_ENCRYPTED_BLOCKS
    assert (
        len(seal_confirmation(BOB, ALICE.public, NONCE, Confirmation(LINK))) <= MAX_MESSAGE_ENCRYPTED_BLOCKS
    )
    with pytest.raises(TooLarge):
        seal_content(SECRET, NONCE, Content(1, bytes(MAX_CONTENT + 1)))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        open_envelope(SECRET, parse_envelope(data))


def test_changed_bytes_do_not_open() -> None:
    sealed = bytearray(seal_content(SECRET, NONCE, Content(1, b"text")))
    sealed[-1] ^= 1
    with pytest.raises(DecodeError):
        open_envelope(SECRET, parse_envelope(bytes(sealed)))
