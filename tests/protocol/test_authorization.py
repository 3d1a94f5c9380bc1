"""Who may do what: every kind of key, and checks against nothing that cost the same."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nacl import bindings as sodium

from protocol import crypto, transmission
from protocol.crypto import (
    AuthPublicKey,
    Ed448PublicKey,
    Ed25519PublicKey,
    X25519PublicKey,
    is_weak,
    pull_public_key,
    pull_x25519_public,
    push_key,
)
from protocol.encoding import CorrId, Reader, Writer
from protocol.errors import TE_NO_AUTH, DecodeError, HandshakeError
from protocol.session_params import SessionParams, ntf_params
from protocol.transmission import RawTransmission, authorize, verify
from tests.builders import corr_id, ed448, ed25519, entity_id, fixed, x25519

KEYS: dict[str, Any] = {"Ed25519": ed25519(), "Ed448": ed448(), "X25519": x25519()}
KINDS = pytest.mark.parametrize("kind", KEYS)
TEXT = b"signed text"
ORDER_ED25519 = 2**252 + 27742317777372353535851937790883648493
ORDER_ED448 = 2**446 - 13818066809895115352007386748515426880336692474882178609894547503885


def client() -> SessionParams:
    return ntf_params(3, fixed("sessionId"), peer_session_key=x25519("serverX").public)


def server() -> SessionParams:
    return ntf_params(3, fixed("sessionId"), own_session_key=x25519("serverX"))


def request(auth: bytes, signed: bytes = TEXT, corr: CorrId | None = None) -> RawTransmission:
    return RawTransmission(auth, None, corr or corr_id(), entity_id(), b"TCHK", signed)


@KINDS
def test_right_key(kind: str) -> None:
    key = KEYS[kind]
    assert verify(server(), key.public, request(authorize(client(), key, corr_id(), TEXT)))
    prefixed = authorize(client(), key, corr_id(), b"fingerprint" + TEXT)
    assert verify(server(), key.public, request(prefixed), b"fingerprint")
    assert not verify(server(), key.public, request(prefixed))


@KINDS
def test_other_text_and_key(kind: str) -> None:
    key = KEYS[kind]
    auth = authorize(client(), key, corr_id(), TEXT)
    assert not verify(server(), key.public, request(auth, b"other text"))
    others = {"Ed25519": ed25519("caSk"), "Ed448": ed448(9), "X25519": x25519("clientX")}
    assert not verify(server(), others[kind].public, request(auth))  # type: ignore[attr-defined]


def test_an_authenticator_belongs_to_its_correlation_id() -> None:
    auth = authorize(client(), x25519(), corr_id(1), TEXT)
    assert not verify(server(), x25519().public, request(auth, corr=corr_id(2)))


@KINDS
@pytest.mark.parametrize("other", KEYS)
def test_wrong_kind_of_key(kind: str, other: str) -> None:
    auth = authorize(client(), KEYS[kind], corr_id(), TEXT)
    assert verify(server(), KEYS[other].public, request(auth)) is (kind == other)


@pytest.mark.parametrize("size", [0, 1, 63, 65, 79, 81, 113, 115, 255])
@KINDS
def test_other_lengths(kind: str, size: int) -> None:
    assert not verify(server(), KEYS[kind].public, request(b"x" * size))


@KINDS
def test_unknown_entity(kind: str) -> None:
    assert not verify(server(), None, request(authorize(client(), KEYS[kind], corr_id(), TEXT)))


def count_checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The expensive operations, in order."""
    calls: list[str] = []

    def counted(name: str, original: Any) -> Any:
        def call(*args: Any) -> Any:
            calls.append(name)
            return original(*args)

        return call

    monkeypatch.setattr(Ed25519PublicKey, "verify", counted("Ed25519", Ed25519PublicKey.verify))
    monkeypatch.setattr(Ed448PublicKey, "verify", counted("Ed448", Ed448PublicKey.verify))
    exchange = crypto.X25519PrivateKey.exchange
    monkeypatch.setattr(crypto.X25519PrivateKey, "exchange", counted("X25519", exchange))
    monkeypatch.setattr(transmission, "open_box", counted("box", crypto.open_box))
    return calls


@KINDS
def test_unknown_entities_cost_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    auth = authorize(client(), KEYS[kind], corr_id(), TEXT)
    calls = count_checks(monkeypatch)
    costs = []
    for key in (KEYS[kind].public, None, *(KEYS[other].public for other in KEYS if other != kind)):
        calls.clear()
        verify(server(), key, request(auth))
        costs.append(tuple(calls))
    assert set(costs) == {{"X25519": ("X25519", "box")}.get(kind, (kind,))}


def test_nobody_can_sign_for_the_dummies() -> None:
    """Keys that stand in for unknown ones are public knowledge: what they sign is refused."""
    dummy = transmission._DUMMY_SESSION_KEY
    forged = authorize(replace(client(), peer_session_key=dummy.public), x25519(), corr_id(), TEXT)
    assert not verify(replace(server(), own_session_key=None), x25519().public, request(forged))
    dummy_public = transmission._DUMMY_X25519
    secret = x25519("serverX").exchange(dummy_public)
    auth = crypto.box(secret, corr_id(), crypto.sha512(TEXT))
    assert not verify(server(), None, request(auth))


@pytest.mark.parametrize("key", [None, x25519().public], ids=["no key", "another kind"])
def test_signatures_of_the_dummies_are_refused(key: AuthPublicKey | None) -> None:
    """The secret scalar of a base point is 1: with 1 as the secret of the signature, too, S is 1 + hash."""
    base25519 = transmission._DUMMY_ED25519.raw
    hashed = int.from_bytes(hashlib.sha512(base25519 * 2 + TEXT).digest(), "little")
    forged = base25519 + ((1 + hashed) % ORDER_ED25519).to_bytes(32, "little")
    assert Ed25519PublicKey(base25519).verify(forged, TEXT)
    assert not verify(server(), key, request(forged))
    base448 = transmission._DUMMY_ED448
    domain = b"SigEd448\0\0"
    hashed = int.from_bytes(hashlib.shake_256(domain + base448 * 2 + TEXT).digest(114), "little")
    forged = base448 + ((1 + hashed) % ORDER_ED448).to_bytes(57, "little")
    assert Ed448PublicKey(base448).verify(forged, TEXT)
    assert not verify(server(), key, request(forged))


def test_dummies_are_valid_points() -> None:
    """An invalid one would be refused early, and so be cheaper."""
    assert sodium.crypto_core_ed25519_is_valid_point(transmission._DUMMY_ED25519.raw)
    assert x25519().exchange(transmission._DUMMY_X25519) == x25519().public.raw
    assert len(transmission._DUMMY_ED448) == 57
    assert not is_weak(Ed448PublicKey(transmission._DUMMY_ED448))


def test_authenticators_need_a_session_key() -> None:
    with pytest.raises(HandshakeError) as refused:
        authorize(ntf_params(1, fixed("sessionId")), x25519(), corr_id(), TEXT)
    assert refused.value.error == TE_NO_AUTH


def test_key_of_small_order() -> None:
    auth = authorize(client(), x25519(), corr_id(), TEXT)
    assert not verify(server(), X25519PublicKey(bytes(32)), request(auth))


P25519, P448 = 2**255 - 19, 2**448 - 2**224 - 1
EIGHTH_25519 = int.from_bytes(
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little"
)
EIGHTHS_X25519 = [
    int.from_bytes(bytes.fromhex(text), "little")
    for text in (
        "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800",
        "5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157",
    )
]
WEAK_KEYS: list[AuthPublicKey] = [
    *(
        Ed25519PublicKey((y | sign << 255).to_bytes(32, "little"))
        for y in (0, 1, P25519 - 1, P25519, P25519 + 1, EIGHTH_25519, P25519 - EIGHTH_25519)
        for sign in (0, 1)
    ),
    *(
        X25519PublicKey((u | ignored << 255).to_bytes(32, "little"))
        for u in (0, 1, P25519 - 1, P25519, P25519 + 1, *EIGHTHS_X25519)
        for ignored in (0, 1)
    ),
    *(
        Ed448PublicKey(y.to_bytes(56, "little") + bytes([sign << 7]))
        for y in (0, 1, P448 - 1, P448, P448 + 1)
        for sign in (0, 1)
    ),
]


@pytest.mark.parametrize("key", WEAK_KEYS, ids=lambda key: f"{type(key).__name__} {key.raw.hex()[:8]}")
def test_keys_of_small_order_are_refused_when_they_arrive(key: AuthPublicKey) -> None:
    w = Writer()
    push_key(w, key)
    with pytest.raises(DecodeError):
        pull_public_key(Reader(w.value()))
    if isinstance(key, X25519PublicKey):
        with pytest.raises(DecodeError):
            pull_x25519_public(Reader(w.value()))
        with pytest.raises(DecodeError):
            x25519().exchange(key)


@KINDS
def test_honest_keys_are_not_weak(kind: str) -> None:
    assert not is_weak(KEYS[kind].public)


def test_nobody_can_sign_for_a_key_of_small_order() -> None:
    """With an all-zero Ed448 key, one made-up signature fits every fourth text."""
    points = [y.to_bytes(56, "little") + bytes([sign << 7]) for y in (0, 1, P448 - 1) for sign in (0, 1)]
    for key in (key for key in WEAK_KEYS if isinstance(key, Ed448PublicKey)):
        for point in points:
            for number in range(8):
                assert not verify(server(), key, request(point + bytes(57), b"text %d" % number))


@given(st.binary(min_size=57, max_size=57), st.binary(min_size=32, max_size=32), st.binary(max_size=120))
@settings(max_examples=50)
def test_any_stored_key_can_be_checked(raw57: bytes, raw32: bytes, noise: bytes) -> None:
    keys = (Ed448PublicKey(raw57), Ed25519PublicKey(raw32), X25519PublicKey(raw32))
    for key in keys:
        for size in (64, 80, 114):
            assert not verify(server(), key, request(noise.ljust(size, b"\1")[:size]))
