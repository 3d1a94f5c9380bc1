"""Which servers a client accepts, over real TLS."""

from __future__ import annotations

from datetime import timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from tests.transport.chains import NOW, make_chain, reach, receive_exactly, running
from transport.certificates import Credentials, KeyAlgorithm, fingerprint
from transport.errors import ChainInvalid, IdentityMismatch, TlsFailed
from transport.identity import check_chain


@pytest.mark.parametrize("algorithm", list(KeyAlgorithm))
@pytest.mark.parametrize(("length", "place"), [(2, 1), (3, 1), (4, 1), (3, 2), (4, 2)])
async def test_sound_chain(algorithm: KeyAlgorithm, length: int, place: int) -> None:
    """The identity is at place 1, as deployed servers have it, or behind a session's certificate at 2."""
    credentials = make_chain(length, algorithm)
    async with running(credentials) as server:
        stream = await reach(server, fingerprint(credentials.chain[place]))
        assert stream.peer_chain == credentials.chain
        stream.write(b"hello")
        assert await receive_exactly(stream, 5) == b"hello"
        stream.close()
        await stream.wait_closed()


async def refused(credentials: Credentials, identity: bytes | None = None) -> TlsFailed:
    """Why a client does not accept the server; the server must not get to run its handler."""
    failures: list[Exception] = []
    async with running(credentials, on_handshake_error=failures.append) as server:
        with pytest.raises(TlsFailed) as caught:
            await reach(server, identity)
        assert server.connections == 0
    return caught.value


async def test_any_identity() -> None:
    async with running(make_chain(2)) as server:
        stream = await reach(server, None)
        stream.abort()


@pytest.mark.parametrize(("length", "index"), [(2, 0), (3, 0), (4, 0), (4, 3)])
async def test_wrong_identity(length: int, index: int) -> None:
    """Neither the leaf nor the operator of a chain of four is who the server is."""
    credentials = make_chain(length)
    assert type(await refused(credentials, fingerprint(credentials.chain[index]))) is IdentityMismatch


@pytest.mark.parametrize("length", [1, 5])
async def test_wrong_length(length: int) -> None:
    error = await refused(make_chain(length))
    assert type(error) is ChainInvalid
    assert f"a chain of {length} certificates" in str(error)


@pytest.mark.parametrize("algorithm", list(KeyAlgorithm))
@pytest.mark.parametrize(("length", "forged"), [(2, 0), (3, 0), (3, 1), (4, 2)])
async def test_forged(algorithm: KeyAlgorithm, length: int, forged: int) -> None:
    error = await refused(make_chain(length, algorithm, forged=forged))
    assert type(error) is ChainInvalid
    assert "not signed by the next" in str(error)


async def test_expired() -> None:
    error = await refused(make_chain(2, end=NOW - timedelta(seconds=1)))
    assert type(error) is ChainInvalid
    assert "expired at 2026-06-01 11:59 UTC" in str(error)


async def test_not_yet_valid() -> None:
    error = await refused(make_chain(3, start=NOW + timedelta(minutes=1)))
    assert type(error) is ChainInvalid
    assert "not valid before 2026-06-01 12:01 UTC" in str(error)


def test_dates_are_checked_again_for_a_known_chain() -> None:
    chain = make_chain(2).chain
    check_chain(chain, None, NOW)
    with pytest.raises(ChainInvalid):
        check_chain(chain, None, NOW + timedelta(days=2))


def test_flipped_bit_in_a_signature() -> None:
    leaf, ca = make_chain(2).chain
    with pytest.raises(ChainInvalid):
        check_chain((leaf[:-1] + bytes([leaf[-1] ^ 1]), ca), None, NOW)


@pytest.mark.parametrize("junk", [b"", b"\x30", b"not a certificate"])
def test_junk_instead_of_a_certificate(junk: bytes) -> None:
    with pytest.raises(ChainInvalid):
        check_chain((make_chain(2).chain[0], junk), None, NOW)


def test_other_algorithms() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    days = timedelta(days=1)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, NOW - days, NOW + days)
    certificate = builder.sign(key, SHA256()).public_bytes(Encoding.DER)
    with pytest.raises(ChainInvalid, match="neither Ed25519 nor Ed448"):
        check_chain((certificate, certificate), None, NOW)
