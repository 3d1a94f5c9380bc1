"""Signed statements of a Polkadot-SDK statement store: SCALE encoding, what is signed, the hash.

An encoding is a count and so many fields, each a tag and a value, in rising order of their tags, each once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple

from protocol.encoding import Reader, Writer
from protocol.errors import DecodeError

FIELD_SIZE = 32
"Keys, channels and topics."
HASH_SIZE = 32
EXPIRY_SIZE = EVENT_INDEX_SIZE = 8
EXPIRY_SECONDS_SHIFT = 32
"The upper half of an expiry is a time in seconds, the lower half a sequence number."
MAX_TOPICS = 4

_COMPACT_MODES = {1: 0b00, 2: 0b01, 4: 0b10}
"Bytes of a compact number to its lowest two bits; the fourth form is for numbers that no statement has."
_COMPACT_SIZES = {mode: size for size, mode in _COMPACT_MODES.items()}


class Tag(IntEnum):
    """What a field is."""

    PROOF = 0
    DECRYPTION_KEY = 1
    EXPIRY = 2
    CHANNEL = 3
    TOPIC1 = 4
    TOPIC2 = 5
    TOPIC3 = 6
    TOPIC4 = 7
    DATA = 8


TOPIC_TAGS = (Tag.TOPIC1, Tag.TOPIC2, Tag.TOPIC3, Tag.TOPIC4)


class _Form(NamedTuple):
    variant: int
    signature: int
    signer: int


class Scheme(Enum):
    """How a proof is signed: its variant on the wire, and the sizes of signature and public key."""

    SR25519 = _Form(0, 64, 32)
    ED25519 = _Form(1, 64, 32)
    SECP256K1 = _Form(2, 65, 33)


_SCHEMES = {scheme.value.variant: scheme for scheme in Scheme}
ON_CHAIN_VARIANT = 3


@dataclass(frozen=True, slots=True)
class Signed:
    """A proof that the holder of a key made the statement."""

    scheme: Scheme
    signature: bytes
    signer: bytes


@dataclass(frozen=True, slots=True)
class OnChain:
    """A proof that only the chain can check: an event of a block."""

    who: bytes
    block_hash: bytes
    event_index: int


Proof = Signed | OnChain


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    expiry: int
    topics: tuple[bytes | None, ...] = (None,) * MAX_TOPICS
    "By place, one for each of `TOPIC_TAGS`."
    proof: Proof | None = None
    decryption_key: bytes | None = field(default=None, repr=False)
    channel: bytes | None = None
    data: bytes | None = field(default=None, repr=False)

    @property
    def expires_at(self) -> int:
        """Seconds since 1970."""
        return self.expiry >> EXPIRY_SECONDS_SHIFT

    @property
    def named_topics(self) -> list[bytes]:
        """The topics that are there, in order."""
        return [topic for topic in self.topics if topic is not None]


def decode_statement(encoded: bytes) -> Statement:
    """DecodeError for anything that is not exactly one statement, in the one form it has."""
    r = Reader(encoded)
    proof: Proof | None = None
    values: dict[Tag, bytes] = {}
    before = -1
    for _ in range(_pull_compact(r)):
        tag = _pull_tag(r, before)
        if tag is Tag.PROOF:
            proof = _pull_proof(r)
        else:
            values[tag] = _pull_value(r, tag)
        before = tag
    r.check_end()
    if Tag.EXPIRY not in values:
        raise DecodeError
    return Statement(
        proof=proof,
        decryption_key=values.get(Tag.DECRYPTION_KEY),
        expiry=int.from_bytes(values[Tag.EXPIRY], "little"),
        channel=values.get(Tag.CHANNEL),
        topics=tuple(values.get(tag) for tag in TOPIC_TAGS),
        data=values.get(Tag.DATA),
    )


def encode_statement(statement: Statement) -> bytes:
    w = Writer()
    values = _values(statement)
    proof = statement.proof
    _push_compact(w, len(values) + (proof is not None))
    if proof is not None:
        w.push_bytes(bytes((Tag.PROOF,)))
        _push_proof(w, proof)
    _push_values(w, values)
    return w.value()


def signed_bytes(statement: Statement) -> bytes:
    """What a proof covers: all fields but the proof itself, without their count."""
    w = Writer()
    _push_values(w, _values(statement))
    return w.value()


def statement_hash(encoded: bytes) -> bytes:
    """The name of a statement, of its whole encoding."""
    return hashlib.blake2b(encoded, digest_size=HASH_SIZE).digest()


def _pull_tag(r: Reader, before: int) -> Tag:
    number = r.pull_byte()
    if not before < number <= Tag.DATA:
        raise DecodeError
    return Tag(number)


def _pull_value(r: Reader, tag: Tag) -> bytes:
    if tag is Tag.DATA:
        return r.pull_bytes(_pull_compact(r))
    return r.pull_bytes(EXPIRY_SIZE if tag is Tag.EXPIRY else FIELD_SIZE)


def _values(statement: Statement) -> list[tuple[Tag, bytes]]:
    """The fields that are there, but for the proof, in the order of their tags."""
    fields = (
        (Tag.DECRYPTION_KEY, statement.decryption_key),
        (Tag.EXPIRY, statement.expiry.to_bytes(EXPIRY_SIZE, "little")),
        (Tag.CHANNEL, statement.channel),
        *zip(TOPIC_TAGS, statement.topics, strict=True),
        (Tag.DATA, statement.data),
    )
    return [(tag, value) for tag, value in fields if value is not None]


def _push_values(w: Writer, values: Sequence[tuple[Tag, bytes]]) -> None:
    for tag, value in values:
        w.push_bytes(bytes((tag,)))
        if tag is Tag.DATA:
            _push_compact(w, len(value))
        w.push_bytes(value)


def _pull_proof(r: Reader) -> Proof:
    variant = r.pull_byte()
    if variant == ON_CHAIN_VARIANT:
        who, block_hash = r.pull_bytes(FIELD_SIZE), r.pull_bytes(FIELD_SIZE)
        return OnChain(who, block_hash, int.from_bytes(r.pull_bytes(EVENT_INDEX_SIZE), "little"))
    scheme = _SCHEMES.get(variant)
    if scheme is None:
        raise DecodeError
    return Signed(scheme, r.pull_bytes(scheme.value.signature), r.pull_bytes(scheme.value.signer))


def _push_proof(w: Writer, proof: Proof) -> None:
    if isinstance(proof, OnChain):
        w.push_bytes(bytes((ON_CHAIN_VARIANT,)) + proof.who + proof.block_hash)
        w.push_bytes(proof.event_index.to_bytes(EVENT_INDEX_SIZE, "little"))
    else:
        w.push_bytes(bytes((proof.scheme.value.variant,)) + proof.signature + proof.signer)


def _pull_compact(r: Reader) -> int:
    """A SCALE compact number of up to four bytes, in its shortest form."""
    first = r.pull_byte()
    size = _COMPACT_SIZES.get(first & 0b11)
    if size is None:
        raise DecodeError
    number = int.from_bytes(bytes((first,)) + r.pull_bytes(size - 1), "little") >> 2
    if _compact_size(number) != size:
        raise DecodeError
    return number


def _push_compact(w: Writer, number: int) -> None:
    size = _compact_size(number)
    w.push_bytes((number << 2 | _COMPACT_MODES[size]).to_bytes(size, "little"))


def _compact_size(number: int) -> int:
    return next(size for size in _COMPACT_MODES if number < 1 << 8 * size - 2)
