"""Certificates that are made, stored and loaded."""

from __future__ import annotations

import base64
import hashlib
import stat
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

from tests.transport.chains import NOW, make_certificate, make_chain
from transport.certificates import (
    Credentials,
    KeyAlgorithm,
    load_server_files,
    make_ca,
    make_online,
    make_service,
    renew_online,
    write_server_files,
)
from transport.errors import CertificateFileError
from transport.identity import check_chain


def written(directory: Path, algorithm: KeyAlgorithm = KeyAlgorithm.ED448) -> Credentials:
    """Files of a new server."""
    ca_cert, ca_key = make_ca(algorithm, "SMP server CA", NOW)
    online = make_online(ca_cert, ca_key, algorithm, "ntf.example.com", NOW)
    write_server_files(directory, ca_cert, ca_key, online)
    return online


@pytest.mark.parametrize("algorithm", list(KeyAlgorithm))
def test_round_trip(tmp_path: Path, algorithm: KeyAlgorithm) -> None:
    online = written(tmp_path / "new", algorithm)
    loaded = load_server_files(tmp_path / "new", NOW)
    assert loaded == online
    assert type(loaded.key).__name__ == f"{algorithm.value.capitalize()}PrivateKey"
    check_chain(loaded.chain, loaded.identity, NOW)
    leaf = x509.load_der_x509_certificate(loaded.chain[0]).public_key()
    leaf.verify(loaded.signing_key.sign(b"data"), b"data")  # type: ignore[union-attr, call-arg]
    assert loaded.signing_key.sign(b"data") == loaded.key.sign(b"data")


def test_files_are_private(tmp_path: Path) -> None:
    online = written(tmp_path)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("ca.crt", "ca.key", "server.crt", "server.key", "fingerprint"), 0o600)
    expected = base64.urlsafe_b64encode(hashlib.sha256(online.chain[1]).digest())
    assert (tmp_path / "fingerprint").read_bytes() == expected
    assert expected.endswith(b"=")


def test_ca_key_may_be_elsewhere(tmp_path: Path) -> None:
    online = written(tmp_path)
    (tmp_path / "ca.key").unlink()
    assert load_server_files(tmp_path, NOW) == online


def test_whole_chain_in_server_file(tmp_path: Path) -> None:
    online = written(tmp_path)
    with (tmp_path / "server.crt").open("ab") as file:
        file.write((tmp_path / "ca.crt").read_bytes())
    assert load_server_files(tmp_path, NOW) == online


def test_fingerprint_without_padding_and_with_newline(tmp_path: Path) -> None:
    online = written(tmp_path)
    path = tmp_path / "fingerprint"
    path.write_bytes(path.read_bytes().rstrip(b"=") + b"\n")
    assert load_server_files(tmp_path, NOW) == online


def test_never_overwritten(tmp_path: Path) -> None:
    written(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CertificateFileError, match=r"ca\.crt exists"):
        written(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["ca.crt", "server.crt", "server.key", "fingerprint"])
@pytest.mark.parametrize("content", [None, b"", b"\xff\x00 junk"])
def test_missing_or_broken(tmp_path: Path, name: str, content: bytes | None) -> None:
    written(tmp_path)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    with pytest.raises(CertificateFileError, match=name):
        load_server_files(tmp_path, NOW)


@pytest.mark.parametrize("name", ["server.crt", "server.key", "fingerprint"])
def test_file_of_another_server(tmp_path: Path, name: str) -> None:
    written(tmp_path / "ours")
    written(tmp_path / "theirs")
    (tmp_path / "ours" / name).write_bytes((tmp_path / "theirs" / name).read_bytes())
    with pytest.raises(CertificateFileError, match=name):
        load_server_files(tmp_path / "ours", NOW)


def test_certificate_and_key_of_another_ca(tmp_path: Path) -> None:
    written(tmp_path / "ours")
    written(tmp_path / "theirs")
    for name in ("server.crt", "server.key"):
        (tmp_path / "ours" / name).write_bytes((tmp_path / "theirs" / name).read_bytes())
    with pytest.raises(CertificateFileError, match=r"server\.crt.*not signed"):
        load_server_files(tmp_path / "ours", NOW)


def test_chain_with_another_ca(tmp_path: Path) -> None:
    written(tmp_path / "ours")
    written(tmp_path / "theirs")
    with (tmp_path / "ours" / "server.crt").open("ab") as file:
        file.write((tmp_path / "theirs" / "ca.crt").read_bytes())
    with pytest.raises(CertificateFileError, match=r"server\.crt with ca\.crt: a certificate was not signed"):
        load_server_files(tmp_path / "ours", NOW)


def test_identity_in_a_place_that_no_client_looks_at(tmp_path: Path) -> None:
    written(tmp_path)
    chain = make_chain(5)
    certificates = [
        x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM).decode() for der in chain.chain
    ]
    (tmp_path / "server.crt").write_text("".join(certificates))
    (tmp_path / "ca.crt").write_text(certificates[-1])
    (tmp_path / "fingerprint").write_bytes(base64.urlsafe_b64encode(hashlib.sha256(chain.chain[-1]).digest()))
    key = chain.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "server.key").write_bytes(key)
    with pytest.raises(CertificateFileError, match="neither second nor third"):
        load_server_files(tmp_path, NOW)


def test_nothing_is_signed_with_the_key_of_another_ca(tmp_path: Path) -> None:
    written(tmp_path / "ours")
    written(tmp_path / "theirs")
    (tmp_path / "ours" / "ca.key").write_bytes((tmp_path / "theirs" / "ca.key").read_bytes())
    before = (tmp_path / "ours" / "server.crt").read_bytes()
    with pytest.raises(CertificateFileError, match=r"ca\.key is not the key of ca\.crt"):
        renew_online(tmp_path / "ours", None, "ntf.example.com", NOW)
    assert (tmp_path / "ours" / "server.crt").read_bytes() == before


def test_expired(tmp_path: Path) -> None:
    ca_cert, ca_key = make_ca(KeyAlgorithm.ED25519, "CA", NOW)
    key = KeyAlgorithm.ED25519.generate()
    leaf = make_certificate("host", key, "CA", ca_key)
    write_server_files(tmp_path, ca_cert, ca_key, Credentials((leaf, ca_cert), key))
    load_server_files(tmp_path, NOW)
    with pytest.raises(CertificateFileError, match=r"server\.crt.*expired"):
        load_server_files(tmp_path, NOW + timedelta(days=2))


def test_unusable_keys(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / "server.key"
    key = ec.generate_private_key(ec.SECP256R1())
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(CertificateFileError, match=r"server\.key is neither"):
        load_server_files(tmp_path, NOW)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    with pytest.raises(CertificateFileError, match=r"server\.key is not an unencrypted"):
        load_server_files(tmp_path, NOW)


def test_service() -> None:
    service = make_service(NOW)
    (der,) = service.chain
    certificate = x509.load_der_x509_certificate(der)
    certificate.verify_directly_issued_by(certificate)
    assert certificate.not_valid_before_utc == NOW - timedelta(hours=25)
    assert certificate.not_valid_after_utc.year == 9999
    assert service.identity == hashlib.sha256(der).digest()


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "h" * 60 + ".example.com", "bücher.example"])
def test_hosts(host: str) -> None:
    ca_cert, ca_key = make_ca(KeyAlgorithm.ED25519, "CA", NOW)
    online = make_online(ca_cert, ca_key, KeyAlgorithm.ED25519, host, NOW)
    check_chain(online.chain, hashlib.sha256(ca_cert).digest(), NOW)


def test_key_is_not_printed() -> None:
    service = make_service(NOW)
    assert "key" not in repr(service).replace("b'", "").split("chain=")[0]
    assert "PrivateKey" not in repr(service)
