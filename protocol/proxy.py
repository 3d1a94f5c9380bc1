"""The layers around a command that goes through a proxy, as client, proxy and destination see them.

A client seals a whole transmission to the destination's session key with a fresh key of its own
(`ClientLayer`), padded, so that sizes tell nothing. The proxy puts the client's correlation id, version and
key in front and seals that, unpadded, with the secret it shares with the destination. Answers come back the
same way, with the bytes of the nonces in reverse order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.blocks import pad, unpad
from protocol.crypto import (
    X25519PrivateKey,
    X25519PublicKey,
    box,
    open_box,
    pull_x25519_public,
    push_key,
)
from protocol.encoding import CorrId, Reader, Writer, nonce

PROXIED_PADDED = 16226
"Of transmissions and answers between client and destination."


@dataclass(frozen=True, slots=True)
class ClientLayer:
    """Between a client and the destination: one secret per command."""

    secret: bytes = field(repr=False)
    corr_id: CorrId = field(repr=False)
    "Of PFWD."

    @classmethod
    def agree(cls, own: X25519PrivateKey, peer: X25519PublicKey, corr_id: CorrId) -> ClientLayer:
        """Raises DecodeError for keys that agree on nothing."""
        return cls(own.exchange(peer), corr_id)

    def seal_command(self, transmission: bytes) -> bytes:
        return box(self.secret, nonce(self.corr_id), pad(transmission, PROXIED_PADDED))

    def open_command(self, boxed: bytes) -> bytes:
        """Any padded size is taken."""
        return unpad(open_box(self.secret, nonce(self.corr_id), boxed))

    def seal_answer(self, transmission: bytes) -> bytes:
        return box(self.secret, _reverse(self.corr_id), pad(transmission, PROXIED_PADDED))

    def open_answer(self, boxed: bytes) -> bytes:
        return unpad(open_box(self.secret, _reverse(self.corr_id), boxed))


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What a proxy forwards: PFWD with the correlation id that its nonce was made of."""

    corr_id: CorrId = field(repr=False)
    version: int
    key: X25519PublicKey = field(repr=False)
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ForwardedAnswer:
    corr_id: CorrId = field(repr=False)
    body: bytes = field(repr=False)


def seal_forwarded(secret: bytes, corr_id: CorrId, forwarded: Forwarded) -> bytes:
    """The body of RFWD; `secret` is the proxy's with the destination, `corr_id` that of RFWD."""
    w = Writer()
    w.push_short(forwarded.corr_id)
    w.push_word16(forwarded.version)
    push_key(w, forwarded.key)
    w.push_bytes(forwarded.body)
    return box(secret, nonce(corr_id), w.value())


def open_forwarded(secret: bytes, corr_id: CorrId, boxed: bytes) -> Forwarded:
    r = Reader(open_box(secret, nonce(corr_id), boxed))
    return Forwarded(CorrId(r.pull_short()), r.pull_word16(), pull_x25519_public(r), r.pull_tail())


def seal_forwarded_answer(secret: bytes, corr_id: CorrId, answer: ForwardedAnswer) -> bytes:
    """The body of RRES."""
    w = Writer()
    w.push_short(answer.corr_id)
    w.push_bytes(answer.body)
    return box(secret, _reverse(corr_id), w.value())


def open_forwarded_answer(secret: bytes, corr_id: CorrId, boxed: bytes) -> ForwardedAnswer:
    r = Reader(open_box(secret, _reverse(corr_id), boxed))
    return ForwardedAnswer(CorrId(r.pull_short()), r.pull_tail())


def _reverse(corr_id: CorrId) -> bytes:
    return nonce(corr_id)[::-1]
