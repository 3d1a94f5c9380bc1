"""Requests that prove who sent them, and all that do not."""

from __future__ import annotations

import hashlib

import pytest
import sr25519

from ntf_server.statements.signed_requests import (
    TOLERANCE,
    Request,
    Unauthenticated,
    authenticate,
    body_hash,
    signing_text,
)

NOW = 1_800_000_000
PAIR = sr25519.pair_from_seed(b"s" * 32)
OTHER = sr25519.pair_from_seed(b"o" * 32)
BODY = b'{"token":"t"}'
REQUEST = Request("gateway.example", "POST", "/v1/subscriptions", body_hash(BODY).digest())


def header(request: Request = REQUEST, time: int = NOW) -> str:
    signature = sr25519.sign(PAIR, signing_text(request, time))
    return f"Sr25519 {PAIR[0].hex()}:{time}:{signature.hex()}"


def test_the_signed_text() -> None:
    """As docs/statements.md says: clients in other languages sign the same."""
    digest = hashlib.blake2b(BODY, digest_size=32).hexdigest()
    lines = ["statement-gateway-1", "gateway.example", "POST", "/v1/subscriptions", str(NOW), digest]
    assert signing_text(REQUEST, NOW).decode().split("\n") == lines


def test_genuine() -> None:
    caller = authenticate(header(), REQUEST, NOW)
    assert caller.client_id == PAIR[0]
    assert caller.once is not None
    assert caller.once.valid_until == NOW + TOLERANCE


def test_the_same_request_has_the_same_id_and_another_signature_another() -> None:
    first = header()
    found = [authenticate(text, REQUEST, NOW) for text in (first, first, header())]
    ids = [caller.once.request_id for caller in found if caller.once is not None]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    "text",
    [
        header(REQUEST._replace(host="other.example")),
        header(REQUEST._replace(method="PUT")),
        header(REQUEST._replace(path="/v1/subscriptions/rules")),
        header(REQUEST._replace(digest=body_hash(b"{}").digest())),
        header().replace(PAIR[0].hex(), OTHER[0].hex()),
        header().replace(PAIR[0].hex(), "00" * 32),
        header().replace(PAIR[0].hex(), "ff" * 32),
        header().replace(f":{NOW}:", f":{NOW + 1}:"),
        header()[:-2] + "00",
        f"Sr25519 {PAIR[0].hex()}:{NOW}:{'00' * 64}",
        f"Sr25519 {'00' * 32}:{NOW}:{'00' * 63}80",
    ],
)
def test_forged(text: str) -> None:
    with pytest.raises(Unauthenticated, match="signature"):
        authenticate(text, REQUEST, NOW)


def test_a_signature_of_the_same_lines_without_the_version_is_none() -> None:
    text = signing_text(REQUEST, NOW).partition(b"\n")[2]
    signed = f"Sr25519 {PAIR[0].hex()}:{NOW}:{sr25519.sign(PAIR, text).hex()}"
    with pytest.raises(Unauthenticated, match="signature"):
        authenticate(signed, REQUEST, NOW)


@pytest.mark.parametrize(
    "text", ["", "Sr25519", "Bearer abc", header() + " ", header()[:-1], header().replace(":", ";"), "\0"]
)
def test_malformed(text: str) -> None:
    with pytest.raises(Unauthenticated, match="must be"):
        authenticate(text, REQUEST, NOW)


def test_missing() -> None:
    with pytest.raises(Unauthenticated, match="needs"):
        authenticate(None, REQUEST, NOW)


@pytest.mark.parametrize(("offset", "accepted"), [(-61, False), (-60, True), (60, True), (61, False)])
def test_time(offset: int, accepted: bool) -> None:
    text = header(time=NOW + offset)
    if accepted:
        assert authenticate(text, REQUEST, NOW).client_id == PAIR[0]
    else:
        with pytest.raises(Unauthenticated, match="time"):
            authenticate(text, REQUEST, NOW)
