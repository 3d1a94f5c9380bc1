"""Making and checking authorisations. A check against nothing costs what a real one costs."""

from __future__ import annotations

from protocol.crypto import (
    ED448_SIGNATURE_SIZE,
    ED25519_SIGNATURE_SIZE,
    AuthPrivateKey,
    AuthPublicKey,
    BoxError,
    Ed448PublicKey,
    Ed25519PublicKey,
    X25519PrivateKey,
    X25519PublicKey,
    box,
    open_box,
    sha512,
)
from protocol.encoding import CorrId, nonce
from protocol.errors import TE_NO_AUTH, DecodeError, HandshakeError
from protocol.session_params import SessionParams
from protocol.transmission import AUTHENTICATOR_SIZE, RawTransmission

# Valid points that belong to nobody: base points of the curves.
_DUMMY_ED25519 = Ed25519PublicKey(bytes.fromhex("58" + "66" * 31))
_DUMMY_X25519 = X25519PublicKey(b"\x09" + bytes(31))
_DUMMY_ED448 = bytes.fromhex(
    "14fa30f25b790898adc8d74e2c13bdfdc4397ce61cffd33ad7c2a0051e9c78874098a36c7373ea4b62c7c9563720768824bcb6"
    "6e71463f6900"
)
_DUMMY_SESSION_KEY = X25519PrivateKey(b"\x01" * 32)


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
    except (BoxError, DecodeError):
        return False
    return boxed == sha512(text)
