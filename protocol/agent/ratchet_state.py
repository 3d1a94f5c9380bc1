"""All that a ratchet remembers, and the form in which it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.agent.aead import IV_SIZE
from protocol.agent.e2e_params import E2eKeys
from protocol.agent.forms import BOOL, INT64, LARGE, SHORT, WORD16, Form, exactly, optional, record
from protocol.agent.kem import KemPair
from protocol.agent.x3dh import AcceptedKem, RatchetKem
from protocol.agent.x448 import X448_SIZE, X448Pair, X448PublicKey
from protocol.crypto import KEY_SIZE
from protocol.errors import DecodeError


@dataclass(frozen=True, slots=True)
class SendingChain:
    peer_dh: X448PublicKey
    chain_key: bytes = field(repr=False)
    header_key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ReceivingChain:
    chain_key: bytes = field(repr=False)
    header_key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class MessageKey:
    key: bytes = field(repr=False)
    iv: bytes = field(repr=False)


SkippedKeys = Mapping[bytes, Mapping[int, MessageKey]]
"By header key, then by number: the keys of messages that have not come yet."


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratchet:
    version: int
    max_version: int
    associated_data: bytes = field(repr=False)
    dh: X448Pair = field(repr=False)
    kem: RatchetKem | None = field(repr=False)
    support: bool
    "Headers have room for KEM keys; never goes back."
    enable: bool
    "We want KEM steps."
    snd_kem: bool
    rcv_kem: bool
    root_key: bytes = field(repr=False)
    snd: SendingChain | None = field(default=None, repr=False)
    rcv: ReceivingChain | None = field(default=None, repr=False)
    sent: int = 0
    received: int = 0
    previous_sent: int = 0
    next_snd_header_key: bytes = field(repr=False)
    next_rcv_header_key: bytes = field(repr=False)


_KEY = exactly(KEY_SIZE)
_X448 = Form(lambda r: X448PublicKey(r.pull_bytes(X448_SIZE)), lambda w, key: w.push_bytes(key.raw))
_X448_PAIR = Form(
    lambda r: X448Pair(r.pull_bytes(X448_SIZE), X448PublicKey(r.pull_bytes(X448_SIZE))),
    lambda w, pair: w.push_bytes(pair.private + pair.public.raw),
)
_KEM_PAIR = record(KemPair, public=LARGE, secret=LARGE)
_ACCEPTED = record(AcceptedKem, peer_public=LARGE, shared=LARGE, ciphertext=LARGE)
E2E_KEYS = record(E2eKeys, k1=_X448_PAIR, k2=_X448_PAIR, kem=optional(_KEM_PAIR))
MESSAGE_KEY = record(MessageKey, key=_KEY, iv=exactly(IV_SIZE))
_RATCHET = record(
    Ratchet,
    version=WORD16,
    max_version=WORD16,
    associated_data=SHORT,
    dh=_X448_PAIR,
    kem=optional(record(RatchetKem, pair=_KEM_PAIR, accepted=optional(_ACCEPTED))),
    support=BOOL,
    enable=BOOL,
    snd_kem=BOOL,
    rcv_kem=BOOL,
    root_key=_KEY,
    next_snd_header_key=_KEY,
    next_rcv_header_key=_KEY,
    snd=optional(record(SendingChain, peer_dh=_X448, chain_key=_KEY, header_key=_KEY)),
    rcv=optional(record(ReceivingChain, chain_key=_KEY, header_key=_KEY)),
    sent=INT64,
    received=INT64,
    previous_sent=INT64,
)
_FORMAT = b"\1"


def encode_ratchet(ratchet: Ratchet) -> bytes:
    return _FORMAT + _RATCHET.encode(ratchet)


def decode_ratchet(data: bytes) -> Ratchet:
    if not data.startswith(_FORMAT):
        raise DecodeError
    return _RATCHET.decode(data[len(_FORMAT) :])
