"""Signed statements of a Polkadot-SDK statement store: SCALE encoding, what is signed, the hash.

An encoding is a count and so many fields, each a tag and a value, in rising order of their tags, each once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

from protocol.encoding import Reader, Writer, new_tuple
from protocol.errors import DecodeError
from protocol.hiding import hides_bytes

FIELD_SIZE = 32
"Keys, channels and topics."
HASH_SIZE = 32
EXPIRY_SIZE = EVENT_INDEX_SIZE = 8
EXPIRY_SECONDS_SHIFT = 32
"The upper half of an expiry is a time in seconds, the lower half a sequence number."
MAX_TOPICS = 4

_COMPACT_MODES = {1: 0b00, 2: 0b01, 4: 0b10}
"Bytes of a compact number to its lowest two bits; the fourth form is for numbers that no statement has."
_COMPACT_FORMS = {0b01: (2, 1 << 6), 0b10: (4, 1 << 14)}
"The longer ones the other way round, with the lowest number that has this form."


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
# Plain numbers: statements come by the thousand, and members of an enumeration are slow.
_PROOF, _EXPIRY, _DATA = int(Tag.PROOF), int(Tag.EXPIRY), int(Tag.DATA)


class _Form(NamedTuple):
    variant: int
    signature: int
    signer: int


class Scheme(Enum):
    """How a proof is signed: its variant on the wire, and the sizes of signature and public key."""

    SR25519 = _Form(0, 64, 32)
    ED25519 = _Form(1, 64, 32)
    SECP256K1 = _Form(2, 65, 33)


_SCHEMES = {scheme.value.variant: (scheme, scheme.value.signature, scheme.value.signer) for scheme in Scheme}
ON_CHAIN_VARIANT = 3
_BEFORE_SIGNATURE = 3
"Bytes of a signed statement: the count of its fields, the proof's tag, its variant."


@hides_bytes
class Signed(NamedTuple):
    """A proof that the holder of a key made the statement."""

    scheme: Scheme
    signature: bytes
    signer: bytes


@hides_bytes
@dataclass(frozen=True, slots=True)
class OnChain:
    """A proof that only the chain can check: an event of a block."""

    who: bytes
    block_hash: bytes
    event_index: int


Proof = Signed | OnChain


@hides_bytes
class Statement(NamedTuple):
    """Do not print."""

    expiry: int
    topics: tuple[bytes | None, ...] = (None,) * MAX_TOPICS
    "By place, one for each of `TOPIC_TAGS`."
    proof: Proof | None = None
    decryption_key: bytes | None = None
    channel: bytes | None = None
    data: bytes | None = None

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
    values: list[bytes | None] = [None] * len(Tag)
    before = -1
    for _ in range(_pull_compact(r)):
        tag = r.pull_byte()
        if not before < tag <= _DATA:
            raise DecodeError
        if tag == _PROOF:
            proof = _pull_proof(r)
        elif tag == _DATA:
            values[tag] = r.pull_bytes(_pull_compact(r))
        else:
            values[tag] = r.pull_bytes(EXPIRY_SIZE if tag == _EXPIRY else FIELD_SIZE)
        before = tag
    r.check_end()
    _, decryption_key, expiry, channel, *topics, data = values
    if expiry is None:
        raise DecodeError
    number = int.from_bytes(expiry, "little")
    return new_tuple(Statement, (number, tuple(topics), proof, decryption_key, channel, data))


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


def signed_part(encoded: bytes, proof: Signed) -> bytes:
    """The same of a statement that was decoded, cut out of its encoding: the proof stands first."""
    return encoded[_BEFORE_SIGNATURE + len(proof.signature) + len(proof.signer) :]


def statement_hash(encoded: bytes) -> bytes:
    """The name of a statement, of its whole encoding."""
    return hashlib.blake2b(encoded, digest_size=HASH_SIZE).digest()


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
    form = _SCHEMES.get(variant)
    if form is None:
        raise DecodeError
    scheme, signature, signer = form
    return new_tuple(Signed, (scheme, r.pull_bytes(signature), r.pull_bytes(signer)))


def _push_proof(w: Writer, proof: Proof) -> None:
    if isinstance(proof, OnChain):
        w.push_bytes(bytes((ON_CHAIN_VARIANT,)) + proof.who + proof.block_hash)
        w.push_bytes(proof.event_index.to_bytes(EVENT_INDEX_SIZE, "little"))
    else:
        w.push_bytes(bytes((proof.scheme.value.variant,)) + proof.signature + proof.signer)


def _pull_compact(r: Reader) -> int:
    """A SCALE compact number of up to four bytes, in its shortest form."""
    first = r.pull_byte()
    if first & 0b11 == 0b00:
        return first >> 2
    form = _COMPACT_FORMS.get(first & 0b11)
    if form is None:
        raise DecodeError
    size, lowest = form
    number = first >> 2 | int.from_bytes(r.pull_bytes(size - 1), "little") << 6
    if number < lowest:
        raise DecodeError
    return number


def _push_compact(w: Writer, number: int) -> None:
    size = _compact_size(number)
    w.push_bytes((number << 2 | _COMPACT_MODES[size]).to_bytes(size, "little"))


def _compact_size(number: int) -> int:
    return next(size for size in _COMPACT_MODES if number < 1 << 8 * size - 2)
