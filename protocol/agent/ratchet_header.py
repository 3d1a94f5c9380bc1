"""The ratchet's message on the wire: encrypted header, tag, body; and the header inside."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.agent.aead import IV_SIZE
from protocol.agent.kem import OPTIONAL_KEM, KemParams
from protocol.agent.versions import E2E_PQ
from protocol.agent.x448 import X448, X448PublicKey
from protocol.crypto import TAG_SIZE
from protocol.encoding import Reader, Writer, large, short
from protocol.hiding import hides_bytes

HEADER_SIZE = 88
PQ_HEADER_SIZE = 2310

_ONE_BYTE_LENGTHS_FROM = 32
"A smaller first byte begins a length of two bytes: headers are longer than 31 bytes and shorter than 8 kB."


@dataclass(frozen=True, slots=True)
class Header:
    max_version: int
    dh: X448PublicKey
    kem: KemParams | None
    previous_count: int
    number: int


@hides_bytes
@dataclass(frozen=True, slots=True)
class EncryptedHeader:
    version: int
    iv: bytes
    tag: bytes
    body: bytes = field(repr=False)


@hides_bytes
@dataclass(frozen=True, slots=True)
class RatchetMessage:
    header: bytes = field(repr=False)
    tag: bytes
    body: bytes = field(repr=False)


def header_size(version: int, pq_support: bool) -> int:
    return PQ_HEADER_SIZE if pq_support and version >= E2E_PQ else HEADER_SIZE


def encode_header(header: Header, version: int) -> bytes:
    w = Writer()
    w.push_word16(header.max_version)
    X448.push(w, header.dh)
    if version >= E2E_PQ:
        OPTIONAL_KEM.push(w, header.kem)
    w.push_bytes(header.previous_count.to_bytes(4, "big") + header.number.to_bytes(4, "big"))
    return w.value()


def decode_header(data: bytes, version: int) -> Header:
    """What a later version may add behind is not looked at."""
    r = Reader(data)
    max_version, dh = r.pull_word16(), X448.pull(r)
    kem = OPTIONAL_KEM.pull(r) if version >= E2E_PQ else None
    return Header(max_version, dh, kem, _pull_word32(r), _pull_word32(r))


def sized_bytes(version: int, data: bytes) -> bytes:
    return large(data) if version >= E2E_PQ else short(data)


def encode_encrypted_header(header: EncryptedHeader) -> bytes:
    sized = sized_bytes(header.version, header.body)
    return header.version.to_bytes(2, "big") + header.iv + header.tag + sized


def decode_encrypted_header(data: bytes) -> EncryptedHeader:
    r = Reader(data)
    version, iv, tag = r.pull_word16(), r.pull_bytes(IV_SIZE), r.pull_bytes(TAG_SIZE)
    body = _pull_sized(r)
    r.check_end()
    return EncryptedHeader(version, iv, tag, body)


def decode_ratchet_message(data: bytes) -> RatchetMessage:
    r = Reader(data)
    return RatchetMessage(_pull_sized(r), r.pull_bytes(TAG_SIZE), r.pull_tail())


def _pull_sized(r: Reader) -> bytes:
    first = r.peek()
    return r.pull_large() if first and first[0] < _ONE_BYTE_LENGTHS_FROM else r.pull_short()


def _pull_word32(r: Reader) -> int:
    return int.from_bytes(r.pull_bytes(4), "big")
