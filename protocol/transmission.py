"""Transmissions as bytes: authorisation, correlation id, entity and command. How they are authorised."""

from __future__ import annotations

from typing import NamedTuple

from protocol.crypto import (
    ED448_SIGNATURE_SIZE,
    ED25519_SIGNATURE_SIZE,
    TAG_SIZE,
    AuthPrivateKey,
    AuthPublicKey,
    Ed448PublicKey,
    Ed25519PublicKey,
    X25519PrivateKey,
    X25519PublicKey,
    box,
    open_box,
    sha512,
)
from protocol.encoding import (
    LENGTHS,
    CorrId,
    EntityId,
    Reader,
    new_tuple,
    nonce,
    short,
    split_short,
    split_three_shorts,
    split_two_shorts,
)
from protocol.errors import BLOCK, SESSION, TE_NO_AUTH, DecodeError, ErrorType, HandshakeError
from protocol.session_params import SessionParams

AUTHENTICATOR_SIZE = 64 + TAG_SIZE
AUTH_SIZES = frozenset({0, AUTHENTICATOR_SIZE, ED25519_SIGNATURE_SIZE, ED448_SIGNATURE_SIZE})

# Valid points that belong to nobody: base points of the curves.
_DUMMY_ED25519 = Ed25519PublicKey(bytes.fromhex("58" + "66" * 31))
_DUMMY_X25519 = X25519PublicKey(b"\x09" + bytes(31))
_DUMMY_ED448 = bytes.fromhex(
    "14fa30f25b790898adc8d74e2c13bdfdc4397ce61cffd33ad7c2a0051e9c78874098a36c7373ea4b62c7c9563720768824bcb6"
    "6e71463f6900"
)
_DUMMY_SESSION_KEY = X25519PrivateKey(b"\x01" * 32)


class RawTransmission(NamedTuple):
    """A parsed transmission whose command is still bytes. `signed` is what an authorisation covers."""

    auth: bytes
    service_signature: bytes | None
    corr_id: CorrId
    entity_id: EntityId
    command: bytes
    signed: bytes
    fault: ErrorType | None = None
    "SESSION or a bad authorisation length: known only now, answered with this transmission's ids."

    def __repr__(self) -> str:
        """Sizes only: a command may hold keys and device tokens."""
        return f"RawTransmission(auth={len(self.auth)} B, command={len(self.command)} B, fault={self.fault})"


def body(corr_id: CorrId, entity_id: EntityId, command: bytes) -> bytes:
    return b"".join((LENGTHS[len(corr_id)], corr_id, LENGTHS[len(entity_id)], entity_id, command))


def encode_transmission(
    params: SessionParams, auth: bytes, service_signature: bytes | None, content: bytes
) -> bytes:
    """`content` is body(…). A service signature is sent only behind an authorisation."""
    sent = content if params.implied_session_id else short(params.session_id) + content
    if not auth:
        return b"\0" + sent
    if not params.service_signatures:
        return short(auth) + sent
    mark = b"0" if service_signature is None else b"1" + short(service_signature)
    return short(auth) + mark + sent


def parse_transmission(params: SessionParams, data: bytes) -> RawTransmission:
    if params.implied_session_id and data.startswith(b"\0"):
        # Answers and events are not authorised: nobody needs their signed text.
        _, corr, entity, command = split_three_shorts(data)
        return new_tuple(RawTransmission, (b"", None, corr, entity, command, b"", None))
    auth, content = split_short(data)
    service_signature = None
    fault = None if len(auth) in AUTH_SIZES else BLOCK
    if params.service_signatures:  # then the session id is implied: there is an authorisation
        service_signature, content = _split_service_signature(content)
    if not params.implied_session_id:
        session, content = split_short(content)
        fault = fault if session == params.session_id else SESSION
    corr, entity, command = split_two_shorts(content)
    signed = short(params.session_id) + content
    return new_tuple(RawTransmission, (auth, service_signature, corr, entity, command, signed, fault))


def _split_service_signature(data: bytes) -> tuple[bytes | None, bytes]:
    r = Reader(data)
    signature = r.pull_optional(Reader.pull_short)
    if signature is not None and len(signature) != ED25519_SIGNATURE_SIZE:
        raise DecodeError
    return signature, r.pull_tail()


# Authorisations. A check against nothing costs what a real one costs.


def authorize(params: SessionParams, key: AuthPrivateKey, corr_id: CorrId, text: bytes) -> bytes:
    """A signature, or with an X25519 key an authenticator that only this server can check."""
    if not isinstance(key, X25519PrivateKey):
        return key.sign(text)
    if params.peer_session_key is None:
        raise HandshakeError(TE_NO_AUTH)
    return box(key.exchange(params.peer_session_key), nonce(corr_id), sha512(text))


def verify(
    params: SessionParams, key: AuthPublicKey | None, request: RawTransmission, prefix: bytes = b""
) -> bool:
    """True if `request` was authorised with the private half of `key`.

    Without a key, or with a key of another kind than the authorisation's, a dummy key of the
    authorisation's kind is checked instead, so that the answer takes as long. `prefix` is the service
    fingerprint that an entity key signs in front of the text in a service session.
    """
    text = prefix + request.signed if prefix else request.signed
    size = len(request.auth)
    if size == ED25519_SIGNATURE_SIZE:
        ed25519 = key if isinstance(key, Ed25519PublicKey) else _DUMMY_ED25519
        return ed25519.verify(request.auth, text) and ed25519 is key
    if size == ED448_SIGNATURE_SIZE:
        # A dummy made anew: loading the point is a part of what a stored key costs.
        ed448 = key if isinstance(key, Ed448PublicKey) else Ed448PublicKey(_DUMMY_ED448)
        return ed448.verify(request.auth, text) and ed448 is key
    if size == AUTHENTICATOR_SIZE:
        own = params.own_session_key or _DUMMY_SESSION_KEY
        x25519 = key if isinstance(key, X25519PublicKey) else _DUMMY_X25519
        opens = _opens(own, x25519, request, text)
        return opens and x25519 is key and own is params.own_session_key
    return False


def _opens(own: X25519PrivateKey, key: X25519PublicKey, request: RawTransmission, text: bytes) -> bool:
    try:
        boxed = open_box(own.exchange(key), nonce(request.corr_id), request.auth)
    except DecodeError:
        return False
    return boxed == sha512(text)
