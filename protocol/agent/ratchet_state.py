"""All that a ratchet remembers, and the form in which it is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.agent.e2e_params import E2eKeys
from protocol.agent.kem import KemPair
from protocol.agent.x3dh import AcceptedKem, RatchetKem
from protocol.agent.x448 import X448_SIZE, X448Pair, X448PublicKey
from protocol.crypto import KEY_SIZE
from protocol.encoding import Reader, Writer
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


_FORMAT = 1


def encode_ratchet(ratchet: Ratchet) -> bytes:
    w = Writer(bytes((_FORMAT,)))
    w.push_word16(ratchet.version)
    w.push_word16(ratchet.max_version)
    w.push_short(ratchet.associated_data)
    push_x448_pair(w, ratchet.dh)
    w.push_optional(ratchet.kem, _push_kem)
    for flag in (ratchet.support, ratchet.enable, ratchet.snd_kem, ratchet.rcv_kem):
        w.push_bool(flag)
    w.push_bytes(ratchet.root_key + ratchet.next_snd_header_key + ratchet.next_rcv_header_key)
    w.push_optional(ratchet.snd, _push_snd)
    w.push_optional(ratchet.rcv, _push_rcv)
    for count in (ratchet.sent, ratchet.received, ratchet.previous_sent):
        w.push_int64(count)
    return w.value()


def decode_ratchet(data: bytes) -> Ratchet:
    r = Reader(data)
    if r.pull_byte() != _FORMAT:
        raise DecodeError
    version, max_version, associated_data = r.pull_word16(), r.pull_word16(), r.pull_short()
    dh, kem = pull_x448_pair(r), r.pull_optional(_pull_kem)
    support, enable, snd_kem, rcv_kem = (r.pull_bool() for _ in range(4))
    root_key, next_snd, next_rcv = (r.pull_bytes(KEY_SIZE) for _ in range(3))
    snd, rcv = r.pull_optional(_pull_snd), r.pull_optional(_pull_rcv)
    sent, received, previous_sent = (r.pull_int64() for _ in range(3))
    r.check_end()
    return Ratchet(
        version=version,
        max_version=max_version,
        associated_data=associated_data,
        dh=dh,
        kem=kem,
        support=support,
        enable=enable,
        snd_kem=snd_kem,
        rcv_kem=rcv_kem,
        root_key=root_key,
        snd=snd,
        rcv=rcv,
        sent=sent,
        received=received,
        previous_sent=previous_sent,
        next_snd_header_key=next_snd,
        next_rcv_header_key=next_rcv,
    )


def encode_e2e_keys(keys: E2eKeys) -> bytes:
    w = Writer()
    push_x448_pair(w, keys.k1)
    push_x448_pair(w, keys.k2)
    w.push_optional(keys.kem, _push_kem_pair)
    return w.value()


def decode_e2e_keys(data: bytes) -> E2eKeys:
    r = Reader(data)
    keys = E2eKeys(pull_x448_pair(r), pull_x448_pair(r), r.pull_optional(_pull_kem_pair))
    r.check_end()
    return keys


def push_x448_pair(w: Writer, pair: X448Pair) -> None:
    w.push_bytes(pair.private + pair.public.raw)


def pull_x448_pair(r: Reader) -> X448Pair:
    return X448Pair(r.pull_bytes(X448_SIZE), X448PublicKey(r.pull_bytes(X448_SIZE)))


def _push_kem_pair(w: Writer, pair: KemPair) -> None:
    w.push_large(pair.public)
    w.push_large(pair.secret)


def _pull_kem_pair(r: Reader) -> KemPair:
    return KemPair(r.pull_large(), r.pull_large())


def _push_kem(w: Writer, kem: RatchetKem) -> None:
    _push_kem_pair(w, kem.pair)
    w.push_optional(kem.accepted, _push_accepted)


def _pull_kem(r: Reader) -> RatchetKem:
    return RatchetKem(_pull_kem_pair(r), r.pull_optional(_pull_accepted))


def _push_accepted(w: Writer, accepted: AcceptedKem) -> None:
    for part in (accepted.peer_public, accepted.shared, accepted.ciphertext):
        w.push_large(part)


def _pull_accepted(r: Reader) -> AcceptedKem:
    return AcceptedKem(r.pull_large(), r.pull_large(), r.pull_large())


def _push_snd(w: Writer, chain: SendingChain) -> None:
    w.push_bytes(chain.peer_dh.raw + chain.chain_key + chain.header_key)


def _pull_snd(r: Reader) -> SendingChain:
    peer = X448PublicKey(r.pull_bytes(X448_SIZE))
    return SendingChain(peer, r.pull_bytes(KEY_SIZE), r.pull_bytes(KEY_SIZE))


def _push_rcv(w: Writer, chain: ReceivingChain) -> None:
    w.push_bytes(chain.chain_key + chain.header_key)


def _pull_rcv(r: Reader) -> ReceivingChain:
    return ReceivingChain(r.pull_bytes(KEY_SIZE), r.pull_bytes(KEY_SIZE))
