"""Requests that prove who sent them, and all that do not."""

from __future__ import annotations

import pytest
import sr25519

from ntf_server.statements.signed_requests import TOLERANCE, Unauthenticated, authenticate, signing_text

NOW = 1_800_000_000
PAIR = sr25519.pair_from_seed(b"s" * 32)
OTHER = sr25519.pair_from_seed(b"o" * 32)
BODY = b'{"token":"t"}'
REQUEST = ("POST", "/v1/subscriptions", NOW, BODY)


def header(method: str = "POST", path: str = "/v1/subscriptions", time: int = NOW, body: bytes = BODY) -> str:
    signature = sr25519.sign(PAIR, signing_text(method, path, time, body))
    return f"Sr25519 {PAIR[0].hex()}:{time}:{signature.hex()}"


def test_genuine() -> None:
    caller = authenticate(header(), "POST", "/v1/subscriptions", BODY, NOW)
    assert caller.client_id == PAIR[0]
    assert caller.once is not None
    assert caller.once.valid_until == NOW + TOLERANCE


def test_the_same_request_has_the_same_id_and_another_signature_another() -> None:
    first = header()
    found = [authenticate(text, "POST", "/v1/subscriptions", BODY, NOW) for text in (first, first, header())]
    ids = [caller.once.request_id for caller in found if caller.once is not None]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    "text",
    [
        header(method="PUT"),
        header(path="/v1/subscriptions/rules"),
        header(body=b"{}"),
        header().replace(PAIR[0].hex(), OTHER[0].hex()),
        header().replace(PAIR[0].hex(), "00" * 32),
        header().replace(PAIR[0].hex(), "ff" * 32),
        header().replace(f":{NOW}:", f":{NOW + 1}:"),
        header()[:-2] + "00",
        f"Sr25519 {PAIR[0].hex()}:{NOW}:{'00' * 64}",
    ],
)
def test_forged(text: str) -> None:
    with pytest.raises(Unauthenticated, match="signature"):
        authenticate(text, "POST", "/v1/subscriptions", BODY, NOW)


@pytest.mark.parametrize(
    "text", ["", "Sr25519", "Bearer abc", header() + " ", header()[:-1], header().replace(":", ";"), "\0"]
)
def test_malformed(text: str) -> None:
    with pytest.raises(Unauthenticated, match="must be"):
        authenticate(text, "POST", "/v1/subscriptions", BODY, NOW)


def test_missing() -> None:
    with pytest.raises(Unauthenticated, match="needs"):
        authenticate(None, "POST", "/v1/subscriptions", BODY, NOW)


@pytest.mark.parametrize(("offset", "accepted"), [(-61, False), (-60, True), (60, True), (61, False)])
def test_time(offset: int, accepted: bool) -> None:
    text = header(time=NOW + offset)
    if accepted:
        assert authenticate(text, "POST", "/v1/subscriptions", BODY, NOW).client_id == PAIR[0]
    else:
        with pytest.raises(Unauthenticated, match="time"):
            authenticate(text, "POST", "/v1/subscriptions", BODY, NOW)
