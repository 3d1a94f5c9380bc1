"""Who asks: `Authorization: Sr25519 <public key>:<unix time>:<signature>`, all but the time in hex.

The signature covers the gateway's host, method, path with query, time and the body's hash. So a request
cannot be changed, is good for a minute, and at no other gateway. That it is used once only is the store's to
check: it remembers `Caller.once`.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

from protocol.hiding import hides_bytes
from protocol.statement_signatures import verify_sr25519
from store.statement_records import SignedRequest

SCHEME = "Sr25519"
VERSION = "statement-gateway-1"
"Of the signed text: a signature for anything else that a client signs is none of a request."
TOLERANCE = 60
"Seconds that a request's time may differ from ours."
DIGEST_SIZE = 32

_FORM = re.compile(r"Sr25519 ([0-9a-f]{64}):(\d{1,12}):([0-9a-f]{128})", re.ASCII | re.IGNORECASE)


class Unauthenticated(Exception):
    """The request does not prove who sent it; the message may be told to the client."""


@hides_bytes
class Caller(NamedTuple):
    client_id: bytes
    "The sr25519 public key."
    once: SignedRequest | None
    "What the store remembers of a signed request; None: a proxy answers for its own."


@hides_bytes
class Request(NamedTuple):
    """What a signature covers besides the time."""

    host: str
    "Of the gateway, as in the URL, in lower case and without a port."
    method: str
    path: str
    "With the query."
    digest: bytes
    "Of the body: `body_hash`."


def body_hash(body: bytes = b"") -> hashlib.blake2b:
    """BLAKE2b-256."""
    return hashlib.blake2b(body, digest_size=DIGEST_SIZE)


def signing_text(request: Request, time: int) -> bytes:
    """What the client signs."""
    lines = (VERSION, request.host, request.method, request.path, str(time), request.digest.hex())
    return "\n".join(lines).encode()


def authenticate(header: str | None, request: Request, now: float) -> Caller:
    if header is None:
        raise Unauthenticated("this needs an Authorization header")
    match = _FORM.fullmatch(header)
    if match is None:
        raise Unauthenticated("Authorization must be: Sr25519 <public key>:<unix time>:<signature>")
    client_id, time, signature = bytes.fromhex(match[1]), int(match[2]), bytes.fromhex(match[3])
    if abs(now - time) > TOLERANCE:
        raise Unauthenticated(f"the request's time differs from ours by more than {TOLERANCE} seconds")
    text = signing_text(request, time)
    if not verify_sr25519(signature, text, client_id):
        raise Unauthenticated("the signature is not of this request by this key")
    # Only the first half, which fixes the rest: whatever could be changed of the rest makes no new id.
    request_id = body_hash(client_id + signature[:32] + text).digest()
    return Caller(client_id, SignedRequest(request_id, valid_until=time + TOLERANCE))
