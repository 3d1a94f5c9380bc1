"""Transmissions: authorisation, correlation id, entity and command, as bytes."""

from __future__ import annotations

from typing import NamedTuple

from protocol.crypto import ED448_SIGNATURE_SIZE, ED25519_SIGNATURE_SIZE, TAG_SIZE
from protocol.encoding import (
    LENGTHS,
    CorrId,
    EntityId,
    Reader,
    new_tuple,
    short,
    split_short,
    split_three_shorts,
    split_two_shorts,
)
from protocol.errors import BLOCK, SESSION, DecodeError, ErrorType
from protocol.session_params import SessionParams

AUTHENTICATOR_SIZE = 64 + TAG_SIZE
AUTH_SIZES = frozenset({0, AUTHENTICATOR_SIZE, ED25519_SIGNATURE_SIZE, ED448_SIGNATURE_SIZE})


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
    if auth and params.service_signatures:
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
