"""Who asks: `Authorization: Sr25519 <public key>:<unix time>:<signature>`, all but the time in hex.

The signature covers method, path with query, time and the body's hash, so a request cannot be changed, and is
good for a minute. That it is used once only is the store's to check: it remembers `Caller.once`.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from protocol.statement_signatures import verify_sr25519
from store.statement_records import SignedRequest

SCHEME = "Sr25519"
TOLERANCE = 60
"Seconds that a request's time may differ from ours."

_FORM = re.compile(r"Sr25519 ([0-9a-f]{64}):(\d{1,12}):([0-9a-f]{128})", re.ASCII | re.IGNORECASE)


class Unauthenticated(Exception):
    """The request does not prove who sent it; the message may be told to the client."""


class Caller(NamedTuple):
    client_id: bytes
    "The sr25519 public key."
    once: SignedRequest | None
    "What the store remembers of a signed request; None: a proxy answers for its own."


def signing_text(method: str, path: str, time: int, body: bytes) -> bytes:
    """What the client signs."""
    return f"{method}\n{path}\n{time}\n{hashlib.blake2b(body, digest_size=32).hexdigest()}".encode()


def authenticate(header: str | None, method: str, path: str, body: bytes, now: float) -> Caller:
    if header is None:
        raise Unauthenticated("this needs an Authorization header")
    match = _FORM.fullmatch(header)
    if match is None:
        raise Unauthenticated("Authorization must be: Sr25519 <public key>:<unix time>:<signature>")
    client_id, time, signature = bytes.fromhex(match[1]), int(match[2]), bytes.fromhex(match[3])
    if abs(now - time) > TOLERANCE:
        raise Unauthenticated(f"the request's time differs from ours by more than {TOLERANCE} seconds")
    text = signing_text(method, path, time, body)
    if not verify_sr25519(signature, text, client_id):
        raise Unauthenticated("the signature is not of this request by this key")
    # Only the first half, which fixes the rest: whatever could be changed of the rest makes no new id.
    request_id = hashlib.blake2b(client_id + signature[:32] + text, digest_size=32).digest()
    return Caller(client_id, SignedRequest(request_id, valid_until=time + TOLERANCE))
