"""Messages as they lie in a queue: sealed end to end with a key pair per queue, always of one size.

The first message of a sender, the confirmation, brings its public key. Inside is `C` with the link of a queue
for answers, or `M` with a number that grows by one, so that a repeated message is recognised.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from agent.links import CLIENT_VERSION, QueueLink, parse_link
from protocol.blocks import pad, unpad
from protocol.crypto import (
    BoxError,
    X25519PrivateKey,
    X25519PublicKey,
    box,
    open_box,
    pull_x25519_public,
    push_key,
)
from protocol.encoding import NONCE_SIZE, Reader, Writer
from protocol.errors import DecodeError

MESSAGE_PADDING = 16000
CONFIRMATION_PADDING = 15904  # shorter by more than the key that goes before it
EMPTY_HEADER = b"_"  # the queue is secured by its sender, so no key for the router needs to be passed on
MAX_CONTENT = MESSAGE_PADDING - 2 - len(EMPTY_HEADER) - 1 - 8


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The sender is here; where to answer, if anywhere."""

    reply_to: QueueLink | None


@dataclass(frozen=True, slots=True)
class Content:
    """What one person wrote to another."""

    number: int
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Envelope:
    """The outside of a message."""

    key: X25519PublicKey | None
    nonce: bytes = field(repr=False)
    boxed: bytes = field(repr=False)


def seal_confirmation(
    own: X25519PrivateKey, recipient: X25519PublicKey, nonce: bytes, confirmation: Confirmation
) -> bytes:
    w = Writer(EMPTY_HEADER + b"C")
    w.push_optional(confirmation.reply_to, lambda w, link: w.push_large(link.text.encode("ascii")))
    boxed = box(own.exchange(recipient), nonce, pad(w.value(), CONFIRMATION_PADDING))
    return _envelope(own.public, nonce, boxed)


def seal_content(secret: bytes, nonce: bytes, content: Content) -> bytes:
    """Raises TooLarge for more than `MAX_CONTENT` bytes."""
    w = Writer(EMPTY_HEADER + b"M")
    w.push_int64(content.number)
    w.push_bytes(content.body)
    return _envelope(None, nonce, box(secret, nonce, pad(w.value(), MESSAGE_PADDING)))


def _envelope(key: X25519PublicKey | None, nonce: bytes, boxed: bytes) -> bytes:
    w = Writer()
    w.push_word16(CLIENT_VERSION)
    w.push_optional(key, push_key)
    w.push_bytes(nonce)
    w.push_bytes(boxed)
    return w.value()


def parse_envelope(data: bytes) -> Envelope:
    r = Reader(data)
    if r.pull_word16() != CLIENT_VERSION:
        raise DecodeError
    return Envelope(r.pull_optional(pull_x25519_public), r.pull_bytes(NONCE_SIZE), r.pull_tail())


def open_envelope(secret: bytes, envelope: Envelope) -> Confirmation | Content:
    try:
        r = Reader(unpad(open_box(secret, envelope.nonce, envelope.boxed)))
    except BoxError:
        raise DecodeError from None
    if r.pull_bytes(1) != EMPTY_HEADER:
        raise DecodeError
    kind = r.pull_bytes(1)
    if kind == b"C":
        link = r.pull_optional(Reader.pull_large)
        r.check_end()
        return Confirmation(None if link is None else parse_link(link.decode("ascii", "replace")))
    if kind == b"M":
        return Content(r.pull_int64(), r.pull_tail())
    raise DecodeError
