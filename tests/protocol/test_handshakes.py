"""Both handshakes between twins: what they agree on, and each way to fail."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed448
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from protocol import smp_messages as smp
from protocol.blocks import pad
from protocol.connection import HandshakeDone, Outgoing
from protocol.crypto import Ed448PrivateKey, Ed448PublicKey, X25519PrivateKey, X25519PublicKey, sha256
from protocol.encoding import NO_ENTITY, CorrId, short
from protocol.errors import (
    TE_BAD_AUTH,
    TE_BAD_SERVICE,
    TE_BLOCK,
    TE_IDENTITY,
    TE_PARSE,
    TE_SESSION,
    TE_VERSION,
    DecodeError,
)
from protocol.ntf_handshake import ServerHello as NtfServerHello
from protocol.signed_key import certificate_key, open_signed_key, sign_key
from protocol.smp_handshake import (
    ClientHello,
    RouterHello,
    ServiceLogin,
    ServiceRole,
    service_fingerprint,
)
from protocol.versions import (
    NTF_LEGACY,
    NTF_VERSIONS,
    SMP_LEGACY,
    SMP_PROXY_FLAG,
    SMP_VERSIONS,
    VersionRange,
)
from tests import twins
from tests.builders import ed448 as ed448_key
from tests.builders import (
    ed25519,
    fixed,
    inputs,
    server_chain,
    service_chain,
    service_login,
    x25519,
)

OTHER = bytes(32)


def certificate(key: Any, algorithm: Any = None) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "other")])
    start = datetime(2024, 1, 1, tzinfo=UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=1))
    )
    return builder.sign(key, algorithm).public_bytes(Encoding.DER)


def ed448_identity() -> tuple[Ed448PrivateKey, tuple[bytes, bytes]]:
    """A signer and a chain of two whose leaf it owns."""
    key = ed448.Ed448PrivateKey.from_private_bytes(ed448_key().seed)
    return ed448_key(), (certificate(key), server_chain()[1])


# Agreement


@pytest.mark.parametrize("server_max", [1, 2, 3])
@pytest.mark.parametrize("client_max", [1, 2, 3])
def test_ntf_agrees_on_the_highest_common_version(client_max: int, server_max: int) -> None:
    both = twins.ntf_twins(
        client_versions=VersionRange(1, client_max), server_versions=VersionRange(1, server_max)
    ).shake()
    assert both.agreed
    version = min(client_max, server_max)
    for params in (both.client.params, both.server.params):
        assert params is not None
        assert (params.version, params.batch, params.implied_session_id) == (
            version,
            version > 1,
            version > 1,
        )
    assert both.client.params is not None
    assert both.client.params.peer_session_key == (x25519("serverX").public if version > 1 else None)


@pytest.mark.parametrize("version", range(6, 20))
@pytest.mark.parametrize("session_key", [None, x25519("clientX")], ids=["plain", "session key"])
def test_smp_agrees(version: int, session_key: X25519PrivateKey | None) -> None:
    both = twins.smp_twins(router_versions=VersionRange(6, version), session_key=session_key).shake()
    assert both.agreed
    for connection in (both.client, both.server):
        params = connection.params
        assert params is not None
        assert (params.version, params.batch, params.implied_session_id) == (version, True, version >= 7)
        assert params.service_signatures == (version >= 16)
        assert (connection._sending is not None) == (session_key is not None and version >= 11)


def test_ed448_servers() -> None:
    signer, chain = ed448_identity()
    assert twins.ntf_twins(signer=signer, chain=chain).shake().agreed
    assert twins.smp_twins(signer=signer, chain=chain).shake().agreed
    assert certificate_key(chain[0]) == signer.public


def test_legacy_peers() -> None:
    assert twins.ntf_twins(server_versions=NTF_LEGACY).shake().agreed
    assert twins.smp_twins(router_versions=SMP_LEGACY, session_key=x25519("clientX")).shake().agreed


@pytest.mark.parametrize("role", ServiceRole)
@pytest.mark.parametrize("version", range(15, 20))
def test_services(role: ServiceRole, version: int) -> None:
    both = twins.smp_twins(
        router_versions=VersionRange(6, version), service=service_login(role), session_key=x25519("clientX")
    ).shake()
    assert both.agreed
    client, router = both.client.params, both.server.params
    assert client is not None
    assert router is not None
    if version < role.since:
        assert client.service is None
        assert router.service is None
        return
    fingerprint = service_fingerprint(service_chain())
    assert fingerprint.hex() == inputs()["serviceCert_fingerprint_sha256_hex"]
    assert client.service is not None
    assert router.service is not None
    assert client.service.service_id == router.service.service_id == twins.service_id(fingerprint, role)
    assert router.service.session_key == ed25519("serviceSessSk").public
    assert router.service.private_key is None


def test_the_second_certificate_is_the_identity_of_a_service() -> None:
    assert service_fingerprint([b"leaf"]) == sha256(b"leaf")
    assert service_fingerprint([b"leaf", b"identity", b"more"]) == sha256(b"identity")


@pytest.mark.parametrize("make", [twins.ntf_twins, twins.smp_twins])
@pytest.mark.parametrize("chunk", [1, 7, 511, 16385])
def test_chunks_do_not_matter(make: Any, chunk: int) -> None:
    assert make().shake(chunk).agreed


# Failures that both protocols share: (client's, server's)


@pytest.mark.parametrize("make", [twins.ntf_twins, twins.smp_twins])
def test_session(make: Any) -> None:
    both = make(client_session_id=OTHER).shake()
    assert both.failures == (TE_SESSION, None)
    assert both.server_events == []


@pytest.mark.parametrize("make", [twins.ntf_twins, twins.smp_twins])
def test_identity(make: Any) -> None:
    both = make(client_key_hash=OTHER).shake()
    assert both.failures == (None, TE_IDENTITY)
    assert both.server.params is None


@pytest.mark.parametrize("make", [twins.ntf_twins, twins.smp_twins])
def test_no_common_version(make: Any) -> None:
    assert make(client_versions=VersionRange(100, 101)).shake().failures == (TE_VERSION, None)


@pytest.mark.parametrize(
    ("make", "versions"), [(twins.ntf_twins, NTF_VERSIONS), (twins.smp_twins, SMP_VERSIONS)]
)
def test_version_that_was_not_offered(make: Any, versions: VersionRange) -> None:
    both = make()
    both.to_server(pad(_client_hello(both, versions.max + 1), both.server._block_size))
    assert both.failures == (None, TE_VERSION)


def _client_hello(both: Any, version: int) -> bytes:
    return version.to_bytes(2, "big") + b"\x20" + sha256(server_chain()[1]) + b"F0"


@pytest.mark.parametrize("make", [twins.ntf_twins, twins.smp_twins])
def test_key_signed_by_another(make: Any) -> None:
    assert make(signer=ed25519("caSk")).shake().failures == (TE_BAD_AUTH, None)
    assert make(signer=ed448_key()).shake().failures == (TE_BAD_AUTH, None)


@pytest.mark.parametrize("make", [twins.ntf_twins, twins.smp_twins])
@pytest.mark.parametrize("content", [b"", b"\0", b"\0\1\0\3\xffshort", b"\0\3\0\1\0"])
def test_unreadable_server_hello(make: Any, content: bytes) -> None:
    both = make()
    both.to_client(pad(content, both.client._block_size))
    assert both.failures[0] in (TE_PARSE, TE_SESSION)


@pytest.mark.parametrize("make", [twins.ntf_twins, twins.smp_twins])
def test_range_upside_down(make: Any) -> None:
    both = make()
    session_id = fixed("sessionId")
    low = b"\0\5\0\1" + bytes((len(session_id),)) + session_id
    both.to_client(pad(low, both.client._block_size))
    assert both.failures == (TE_PARSE, None)


@pytest.mark.parametrize("make", [twins.ntf_twins, twins.smp_twins])
def test_unreadable_client_hello(make: Any) -> None:
    both = make()
    both.to_server(pad(b"\0", both.server._block_size))
    assert both.failures == (None, TE_PARSE)


@pytest.mark.parametrize("make", [twins.ntf_twins, twins.smp_twins])
def test_bad_padding(make: Any) -> None:
    both = make()
    both.to_server(b"\xff\xff" + bytes(both.server._block_size - 2))
    assert both.failures == (None, TE_BLOCK)


def test_later_versions_may_add_fields() -> None:
    both = twins.ntf_twins()
    assert both.server._handshake is not None
    hello = both.server._handshake.start()
    assert hello is not None
    both.to_client(pad(hello + b"more", 512))
    assert isinstance(both.client_events[0], HandshakeDone)
    both.to_server(pad(_client_hello(both, 3) + b"more", 512))
    assert isinstance(both.server_events[0], HandshakeDone)


def test_session_key_of_another_kind() -> None:
    wrong = sign_key(ed25519("serverCertSk"), ed25519().public)
    ranges = {"min": 1, "max": 3}
    ntf = twins.ntf_twins()
    hello = {"versions": ranges, "session_id": fixed("sessionId"), "signed_key": wrong}
    ntf.to_client(pad(NtfServerHello.build(hello), 512))
    assert ntf.failures == (TE_BAD_AUTH, None)
    smp = twins.smp_twins()
    auth = {"chain": list(server_chain()), "signed_key": wrong}
    hello = {"versions": {"min": 6, "max": 19}, "session_id": fixed("sessionId"), "auth": auth}
    smp.to_client(pad(RouterHello.build(hello), 16384))
    assert smp.failures == (TE_BAD_AUTH, None)


# SMP alone


@pytest.mark.parametrize("chain", [(), server_chain()[:1], tuple(reversed(server_chain()))])
def test_router_shows_another_chain_than_in_tls(chain: tuple[bytes, ...]) -> None:
    assert twins.smp_twins(client_router_chain=chain).shake().failures == (TE_BAD_AUTH, None)


def test_router_without_certificates() -> None:
    auth = {"chain": [], "signed_key": b""}
    hello = {"versions": {"min": 6, "max": 19}, "session_id": fixed("sessionId"), "auth": auth}
    both = twins.smp_twins(client_router_chain=())
    both.to_client(pad(RouterHello.build(hello), 16384))
    assert both.failures == (TE_BAD_AUTH, None)


def test_router_key_without_a_secret() -> None:
    """A key of small order would make the shared secret known to everybody."""
    zero = sign_key(ed25519("serverCertSk"), type(x25519().public)(bytes(32)))
    auth = {"chain": list(server_chain()), "signed_key": zero}
    hello = {"versions": {"min": 6, "max": 19}, "session_id": fixed("sessionId"), "auth": auth}
    both = twins.smp_twins(session_key=x25519("clientX"))
    both.to_client(pad(RouterHello.build(hello), 16384))
    assert both.failures == (TE_BAD_AUTH, None)


@pytest.mark.parametrize("key", [ed25519().public.der, type(x25519().public)(bytes(32)).der])
def test_client_key_without_a_secret(key: bytes) -> None:
    both = twins.smp_twins()
    both.to_server(pad(_smp_hello(session_key=key), 16384))
    assert both.failures == (None, TE_PARSE)


def _smp_hello(**changes: Any) -> bytes:
    hello = {
        "version": 19,
        "key_hash": sha256(server_chain()[1]),
        "session_key": None,
        "proxy": b"F",
        "has_service": b"0",
        "service": None,
    }
    return bytes(ClientHello.build(hello | changes))


def test_proxies_do_not_encrypt_blocks() -> None:
    both = twins.smp_twins()
    both.to_server(pad(_smp_hello(session_key=x25519("clientX").public.der, proxy=b"T"), 16384))
    assert both.server.params is not None
    assert both.server._sending is None


@pytest.mark.parametrize("version", [SMP_PROXY_FLAG - 1, SMP_PROXY_FLAG])
def test_both_sides_know_whether_blocks_to_a_proxy_are_encrypted(version: int) -> None:
    both = twins.smp_twins(
        session_key=x25519("clientX"), proxy=True, router_versions=VersionRange(6, version)
    ).shake()
    data = both.client.send([Outgoing(CorrId(b"corr"), NO_ENTITY, smp.Ping())])
    assert (b"PING" in data) == (version == SMP_PROXY_FLAG)
    both.to_server(data)
    [ping] = both.server_events[-1].items
    assert ping.message == smp.Ping()


OTHER_SERVICE = ServiceLogin(ServiceRole.NOTIFIER, service_chain(), ed25519("caSk"), ed25519("serviceSessSk"))


@pytest.mark.parametrize(
    ("service", "tls_chain"),
    [
        (service_login(), ()),
        (service_login(), server_chain()),
        (OTHER_SERVICE, service_chain()),
    ],
    ids=["nothing in TLS", "another chain in TLS", "signed by another key"],
)
def test_bad_service(service: ServiceLogin, tls_chain: tuple[bytes, ...]) -> None:
    both = twins.smp_twins(service=service, tls_client_chain=tls_chain).shake()
    assert both.failures == (TE_BAD_SERVICE, TE_BAD_SERVICE)


@pytest.mark.parametrize(
    ("role", "chain", "version"),
    [(b"N", service_chain(), 19), (b"M", service_chain(), 18), (b"N", (), 19)],
    ids=["session key of another kind", "role of a later version", "empty chain"],
)
def test_bad_service_hello(role: bytes, chain: tuple[bytes, ...], version: int) -> None:
    key = x25519().public if version == 19 else ed25519().public
    service = {"role": role, "chain": list(chain), "signed_key": sign_key(ed25519("serviceCertSk"), key)}
    both = twins.smp_twins(service=service_login(), tls_client_chain=chain)
    both.server.data_to_send()
    both.to_server(pad(_smp_hello(version=version, has_service=b"1", service=service), 16384))
    assert both.failures == (None, TE_BAD_SERVICE)
    assert b"EHANDSHAKE BAD_SERVICE" in both.server.data_to_send()


def test_a_service_is_told_of_every_failure() -> None:
    both = twins.smp_twins(service=service_login(), client_key_hash=OTHER).shake()
    assert both.failures == (TE_IDENTITY, TE_IDENTITY)


@pytest.mark.parametrize(
    "answer", [b"", b"X", b"X" + short(bytes(24)), b"R", b"R\x18short", b"ENONSENSE", b"E"]
)
def test_unreadable_service_answer(answer: bytes) -> None:
    both = twins.smp_twins(service=service_login())
    both.to_client(both.server.data_to_send())
    both.to_client(pad(answer, 16384))
    assert both.failures == (TE_PARSE, None)


# Signed keys and certificates


def test_certificates_with_other_keys() -> None:
    for bad in (certificate(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256()), b"", b"\x30\x03abc"):
        with pytest.raises(DecodeError):
            certificate_key(bad)


def test_signed_key_forms() -> None:
    signer, leaf = ed25519("serverCertSk"), server_chain()[0]
    good = sign_key(signer, x25519().public)
    assert open_signed_key(leaf, good, X25519PublicKey) == x25519().public
    signed = sign_key(signer, ed448_key().public)
    assert open_signed_key(leaf, signed, Ed448PublicKey) == ed448_key().public
    longer = b"\x30\x82" + len(good[2:]).to_bytes(2, "big") + good[2:]
    endless = b"\x30\x80" + good[2:]
    for bad in (longer, endless, good + b"\0", b""):
        with pytest.raises(DecodeError):
            open_signed_key(leaf, bad, X25519PublicKey)


def test_signed_key_of_a_long_object() -> None:
    """Lengths over 255 are written in two bytes; such an object is no key, but its signature holds."""
    signer, leaf = ed25519("serverCertSk"), server_chain()[0]

    class Long:
        der = bytes(300)

    key: Any = Long()
    with pytest.raises(DecodeError):
        open_signed_key(leaf, sign_key(signer, key), X25519PublicKey)
