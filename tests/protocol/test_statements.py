"""Signed statements: vectors of another library, both ways, and everything that is not a statement."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sr25519
import wallycore
from hypothesis import given
from hypothesis import strategies as st
from nacl.signing import SigningKey

from protocol.errors import DecodeError
from protocol.statement_signatures import RECOVERY_HEADER, is_genuine
from protocol.statements import (
    FIELD_SIZE,
    MAX_TOPICS,
    TOPIC_TAGS,
    OnChain,
    Proof,
    Scheme,
    Signed,
    Statement,
    Tag,
    decode_statement,
    encode_statement,
    signed_bytes,
    signed_part,
    statement_hash,
)

VECTORS: list[dict[str, Any]] = json.loads(
    lzma.decompress((Path(__file__).parent.parent / "vectors" / "statements.json.xz").read_bytes())
)
SCHEMES = {"sr25519": Scheme.SR25519, "ed25519": Scheme.ED25519, "secp256k1": Scheme.SECP256K1}

TOPIC = bytes(range(32))
EXPIRY = bytes((Tag.EXPIRY,)) + bytes(8)
FIELD = bytes(FIELD_SIZE)


def unhex(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text.removeprefix("0x"))


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: f"{v['kind']}-{v['data_size']}")
def test_vector(vector: dict[str, Any]) -> None:
    encoded = bytes.fromhex(vector["encoded"].removeprefix("0x"))
    statement = decode_statement(encoded)
    assert encode_statement(statement) == encoded
    assert isinstance(statement.proof, Signed)
    assert statement.proof.scheme is SCHEMES[vector["kind"]]
    assert statement.proof.signer == unhex(vector["signer"])
    assert statement.expiry == int(vector["expiry"])
    assert statement.expires_at == int(vector["expiry"]) >> 32
    assert statement.topics == tuple(unhex(topic) for topic in vector["topics"])
    assert statement.named_topics == [unhex(topic) for topic in vector["topics"] if topic]
    assert (None if statement.data is None else len(statement.data)) == vector["data_size"]
    assert statement_hash(encoded) == unhex(vector["hash"])
    assert is_genuine(encoded, statement.proof)


def genuine(statement: Statement) -> bool:
    return is_genuine(encode_statement(statement), statement.proof)


def test_vectors_are_of_all_kinds() -> None:
    assert {vector["kind"] for vector in VECTORS} == set(SCHEMES)


@pytest.mark.parametrize("kind", SCHEMES)
def test_a_changed_statement_is_a_forgery(kind: str) -> None:
    vector = next(v for v in VECTORS if v["kind"] == kind and v["data_size"] == 5)
    statement = decode_statement(bytes.fromhex(vector["encoded"].removeprefix("0x")))
    proof = statement.proof
    assert isinstance(proof, Signed)
    changes: list[dict[str, Any]] = [
        {"expiry": statement.expiry + 1},
        {"data": b"other"},
        {"data": None},
        {"channel": FIELD},
        {"decryption_key": None},
        {"topics": statement.topics[::-1]},
    ]
    changes += [{"proof": forged} for forged in forged_proofs(proof)]
    forgeries = [statement._replace(**change) for change in changes]
    assert not [forgery for forgery in forgeries if genuine(forgery)]


def forged_proofs(proof: Signed) -> Iterator[Signed]:
    for at in range(0, len(proof.signature), 7):
        changed = proof.signature[:at] + bytes((proof.signature[at] ^ 1,)) + proof.signature[at + 1 :]
        yield proof._replace(signature=changed)
    for byte in (b"\0", b"\xff"):
        yield proof._replace(signature=byte * len(proof.signature))
        yield proof._replace(signer=byte * len(proof.signer))
    yield proof._replace(signer=proof.signer[::-1])


def test_a_wrong_recovery_number_is_a_forgery() -> None:
    unsigned = Statement(expiry=1)
    key = b"k" * 32
    flags = wallycore.EC_FLAG_ECDSA | wallycore.EC_FLAG_RECOVERABLE
    made = bytes(wallycore.ec_sig_from_bytes(key, _digest(unsigned), flags))
    signature = made[1:] + bytes((made[0] - RECOVERY_HEADER,))
    signer = bytes(wallycore.ec_public_key_from_private_key(key))
    good = Signed(Scheme.SECP256K1, signature, signer)
    assert genuine(unsigned._replace(proof=good))
    for number in set(range(256)) - {signature[64]}:
        wrong = Signed(Scheme.SECP256K1, signature[:64] + bytes((number,)), signer)
        assert not genuine(unsigned._replace(proof=wrong))


def _digest(statement: Statement) -> bytes:
    return statement_hash(signed_bytes(statement))


def test_the_neutral_key_of_sr25519_signs_nothing() -> None:
    """Without the check, this signature by the all-zero key is right for every statement."""
    signature = bytes(63) + b"\x80"
    assert not genuine(Statement(expiry=1, proof=Signed(Scheme.SR25519, signature, bytes(32))))
    assert sr25519.verify(signature, b"anything", bytes(32))


SMALL_ORDER = (
    "0100000000000000000000000000000000000000000000000000000000000000",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "0000000000000000000000000000000000000000000000000000000000000080",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
)
"Encodings of the points of small order of edwards25519, and of the field's elements that belong to them."


@pytest.mark.parametrize("key", SMALL_ORDER)
@pytest.mark.parametrize("scheme", [Scheme.SR25519, Scheme.ED25519])
def test_keys_of_small_order_sign_nothing(key: str, scheme: Scheme) -> None:
    signer = bytes.fromhex(key)
    end = b"\x80" if scheme is Scheme.SR25519 else b"\0"
    for signature in (bytes(63) + end, signer + bytes(31) + end):
        for number in range(8):
            assert not genuine(Statement(expiry=number, proof=Signed(scheme, signature, signer)))


def test_without_a_signature_nothing_is_genuine() -> None:
    assert not genuine(Statement(expiry=1))
    assert not genuine(Statement(expiry=1, proof=OnChain(FIELD, FIELD, 1)))


fixed = st.binary(min_size=FIELD_SIZE, max_size=FIELD_SIZE)


def sized(size: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=size, max_size=size)


proofs: st.SearchStrategy[Proof] = st.one_of(
    *(
        st.builds(Signed, st.just(scheme), sized(scheme.value.signature), sized(scheme.value.signer))
        for scheme in Scheme
    ),
    st.builds(OnChain, fixed, fixed, st.integers(0, 2**64 - 1)),
)
statements = st.builds(
    Statement,
    proof=st.none() | proofs,
    decryption_key=st.none() | fixed,
    expiry=st.integers(0, 2**64 - 1),
    channel=st.none() | fixed,
    topics=st.tuples(*[st.none() | fixed] * MAX_TOPICS),
    data=st.none() | st.binary(max_size=20_000),
)


@given(statements)
def test_round_trip(statement: Statement) -> None:
    encoded = encode_statement(statement)
    assert decode_statement(encoded) == statement
    assert encoded.endswith(signed_bytes(statement))
    if isinstance(statement.proof, Signed):
        assert signed_part(encoded, statement.proof) == signed_bytes(statement)


@given(statements, st.data())
def test_a_part_is_no_statement(statement: Statement, data: st.DataObject) -> None:
    encoded = encode_statement(statement)
    with pytest.raises(DecodeError):
        decode_statement(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
    with pytest.raises(DecodeError):
        decode_statement(encoded + b"\0")


@given(st.binary(max_size=300))
def test_random_bytes(data: bytes) -> None:
    try:
        statement = decode_statement(data)
    except DecodeError:
        return
    assert encode_statement(statement) == data
    assert not is_genuine(data, statement.proof)


@given(statements, st.data())
def test_flipped_bits(statement: Statement, data: st.DataObject) -> None:
    encoded = bytearray(encode_statement(statement))
    bit = data.draw(st.integers(0, len(encoded) * 8 - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    try:
        other = decode_statement(bytes(encoded))
    except DecodeError:
        return
    assert encode_statement(other) == bytes(encoded)


def fields(*parts: bytes) -> bytes:
    return bytes((len(parts) << 2,)) + b"".join(parts)


def topic(number: int) -> bytes:
    return bytes((TOPIC_TAGS[number],)) + TOPIC


@pytest.mark.parametrize(
    ("encoded", "why"),
    [
        (b"", "nothing"),
        (fields(), "no expiry"),
        (fields(topic(0)), "no expiry"),
        (fields(topic(0), EXPIRY), "order"),
        (fields(EXPIRY, EXPIRY), "twice"),
        (fields(EXPIRY, topic(1), topic(0)), "order of topics"),
        (fields(EXPIRY, topic(0), topic(0)), "a topic twice"),
        (fields(EXPIRY, b"\x09" + FIELD), "unknown tag"),
        (fields(EXPIRY, b"\xff" + FIELD), "unknown tag"),
        (fields(EXPIRY, topic(0)[:-1]), "short topic"),
        (fields(EXPIRY[:-1]), "short expiry"),
        (fields(b"\x00\x04" + bytes(96), EXPIRY), "unknown proof"),
        (fields(b"\x00\x00" + bytes(95), EXPIRY), "short proof"),
        (fields(EXPIRY, b"\x08\x08\x01"), "short data"),
        (fields(EXPIRY, b"\x08\x03" + bytes(9)), "a length of the long form"),
        (fields(EXPIRY, b"\x08\x01\x00"), "a length that is not the shortest: two bytes for 0"),
        (fields(EXPIRY, b"\x08\x02\x00\x00\x00"), "a length that is not the shortest: four bytes for 0"),
        (b"\x05\x00" + EXPIRY, "a count that is not the shortest"),
        (fields(EXPIRY) + EXPIRY, "more fields than counted"),
        (b"\x08" + EXPIRY, "fewer fields than counted"),
        (b"\xfe\xff\xff\xff" + EXPIRY, "a huge count"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rejected(encoded: bytes, why: str) -> None:
    with pytest.raises(DecodeError):
        decode_statement(encoded)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 16383, 16384])
def test_lengths_of_data(size: int) -> None:
    statement = Statement(expiry=1, data=bytes(size))
    assert decode_statement(encode_statement(statement)) == statement


def test_signed_with_our_own_libraries() -> None:
    unsigned = Statement(expiry=5 << 32, topics=(TOPIC, None, TOPIC, None), data=b"sealed")
    message = signed_bytes(unsigned)
    public, secret = sr25519.pair_from_seed(b"s" * 32)
    edwards = SigningKey(b"e" * 32)
    for proof in (
        Signed(Scheme.SR25519, sr25519.sign((public, secret), message), public),
        Signed(Scheme.ED25519, edwards.sign(message).signature, bytes(edwards.verify_key)),
    ):
        assert genuine(unsigned._replace(proof=proof))


def test_python_ends_in_order_after_the_import_of_wallycore() -> None:
    """Its types warn when they are made: where that is an error they stay half made, and Python crashes."""
    collect = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", __file__)
    done = subprocess.run(collect, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
