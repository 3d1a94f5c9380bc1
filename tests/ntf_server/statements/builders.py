"""Statements that are right, in one call."""

from __future__ import annotations

import sr25519

from protocol.statements import MAX_TOPICS, Scheme, Signed, Statement, encode_statement, signed_bytes

NEVER = 2**32 - 1

SenderPair = tuple[bytes, bytes]
"An sr25519 public key and its secret."


def sender(name: str = "sender") -> SenderPair:
    pair: SenderPair = sr25519.pair_from_seed(name.encode().ljust(32, b"."))
    return pair


def topic(number: int) -> bytes:
    return number.to_bytes(32, "big")


def signed(
    pair: SenderPair, *topics: bytes, data: bytes = b"sealed", expires_at: int = NEVER, sequence: int = 0
) -> bytes:
    """An encoded statement of this sender."""
    unsigned = Statement(
        expiry=expires_at << 32 | sequence,
        topics=(*topics, *[None] * (MAX_TOPICS - len(topics))),
        data=data,
    )
    signature = sr25519.sign(pair, signed_bytes(unsigned))
    return encode_statement(unsigned._replace(proof=Signed(Scheme.SR25519, signature, pair[0])))
