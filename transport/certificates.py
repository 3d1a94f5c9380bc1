"""Make, store and load the certificates of servers and services."""

from __future__ import annotations

import base64
import binascii
import enum
import ipaddress
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protocol.crypto import SigningKey, X25519PrivateKey, decode_private_key
from protocol.hiding import hides_bytes
from protocol.signed_key import identity_hashes
from transport.errors import CertificateFileError, ChainInvalid
from transport.identity import check_chain
from transport.identity import fingerprint as fingerprint

PrivateKey = Ed25519PrivateKey | Ed448PrivateKey

BACKDATED = timedelta(hours=25)  # peers whose clocks or time zones are a day off still accept the certificate
FAR_FUTURE = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  # X.509's way to say "does not expire"
MAX_COMMON_NAME = 64  # X.520's bound; the whole host name is in the alternative name

CA_CERTIFICATE, CA_KEY = "ca.crt", "ca.key"
SERVER_CERTIFICATE, SERVER_KEY = "server.crt", "server.key"
FINGERPRINT = "fingerprint"
OWNER_ONLY = 0o600


class KeyAlgorithm(enum.Enum):
    """Algorithms a certificate's key may have."""

    ED25519 = "ed25519"
    ED448 = "ed448"

    def generate(self) -> PrivateKey:
        """A fresh private key."""
        return Ed25519PrivateKey.generate() if self is KeyAlgorithm.ED25519 else Ed448PrivateKey.generate()


@hides_bytes
@dataclass(frozen=True)
class Credentials:
    """A certificate chain (DER, leaf first) and the private key of its leaf."""

    chain: tuple[bytes, ...]
    key: PrivateKey = field(repr=False, compare=False)
    pinned: bytes | None = field(default=None, repr=False, compare=False)
    "The certificate of the identity, where it is not at its usual place in the chain."

    @property
    def identity(self) -> bytes:
        """The hash peers pin: of the second certificate, of the only one (a service), or of `pinned`."""
        return fingerprint(self.pinned or self.chain[min(1, len(self.chain) - 1)])

    @property
    def signing_key(self) -> SigningKey:
        """The leaf's private key as the handshakes use it."""
        der = self.key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
        key = decode_private_key(der)
        assert not isinstance(key, X25519PrivateKey)
        return key


def make_ca(algorithm: KeyAlgorithm, common_name: str, now: datetime) -> tuple[bytes, PrivateKey]:
    """A self-signed CA certificate (DER) and its key; its fingerprint becomes the server's identity."""
    key = algorithm.generate()
    name = _name(common_name)
    builder = _builder(name, name, key, now).add_extension(x509.BasicConstraints(True, None), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    return _signed(builder, key), key


def make_online(
    ca_cert: bytes, ca_key: PrivateKey, algorithm: KeyAlgorithm, host: str, now: datetime
) -> Credentials:
    """A certificate for the running server, signed by its CA: a chain of two."""
    key = algorithm.generate()
    issuer = x509.load_der_x509_certificate(ca_cert).subject
    builder = _builder(_name(host), issuer, key, now)
    builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName([_alternative_name(host)]), critical=False)
    return Credentials((_signed(builder, ca_key), ca_cert), key)


def make_service(now: datetime, common_name: str = "ntf-server") -> Credentials:
    """The self-signed Ed25519 certificate a service shows to routers: a chain of one."""
    key = Ed25519PrivateKey.generate()
    name = _name(common_name)
    return Credentials((_signed(_builder(name, name, key, now), key),), key)


def write_server_files(config_dir: Path, ca_cert: bytes, ca_key: PrivateKey, online: Credentials) -> None:
    """Write `ca.crt`, `ca.key`, `server.crt`, `server.key` and `fingerprint`, readable by the owner only.

    Existing files are never overwritten, since that would destroy the server's identity.
    """
    contents = {
        CA_CERTIFICATE: _certificate_pem(ca_cert),
        CA_KEY: _key_pem(ca_key),
        SERVER_CERTIFICATE: b"".join(_certificate_pem(der) for der in online.chain if der != ca_cert),
        SERVER_KEY: _key_pem(online.key),
        FINGERPRINT: base64.urlsafe_b64encode(fingerprint(ca_cert)),
    }
    config_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in contents:
        if (config_dir / name).exists():
            raise CertificateFileError(f"{config_dir / name} exists already and is not overwritten")
    for name, content in contents.items():
        _write_private(config_dir / name, content)


def load_server_files(config_dir: Path, now: datetime | None = None) -> Credentials:
    """The server's chain and online key; `ca.key` is not needed and may be kept elsewhere.

    `server.crt` may have a session certificate before the online one: the identity is `ca.crt` all the same.

    Raises `CertificateFileError`, naming the file that is missing, unreadable, expired or does not fit.
    """
    ca_chain = _load_certificates(config_dir / CA_CERTIFICATE)
    _check_fingerprint(config_dir / FINGERPRINT, fingerprint(ca_chain[0]))
    server_path = config_dir / SERVER_CERTIFICATE
    server_chain = _load_certificates(server_path)
    chain = server_chain if ca_chain[0] in server_chain else server_chain + ca_chain
    key = _load_key(config_dir / SERVER_KEY)
    leaf_key = x509.load_der_x509_certificate(chain[0]).public_key()
    if leaf_key != key.public_key():
        raise CertificateFileError(f"{config_dir / SERVER_KEY} is not the key of {server_path}")
    if fingerprint(ca_chain[0]) not in identity_hashes(chain):
        raise CertificateFileError(
            f"{CA_CERTIFICATE} is neither second nor third in the chain of {server_path}"
        )
    try:
        check_chain(chain, None, now if now is not None else datetime.now(UTC))
    except ChainInvalid as error:
        raise CertificateFileError(f"{server_path} with {CA_CERTIFICATE}: {error}") from error
    return Credentials(chain, key, ca_chain[0])


def renew_online(config_dir: Path, algorithm: KeyAlgorithm | None, host: str, now: datetime) -> Credentials:
    """A new online certificate and key, signed with `ca.key`, in place of the old ones; the identity stays.

    Without an algorithm, the CA's own is used.
    """
    ca_cert = _load_certificates(config_dir / CA_CERTIFICATE)[0]
    ca_key = _load_key(config_dir / CA_KEY)
    if x509.load_der_x509_certificate(ca_cert).public_key() != ca_key.public_key():
        raise CertificateFileError(f"{config_dir / CA_KEY} is not the key of {CA_CERTIFICATE}")
    own = KeyAlgorithm.ED25519 if isinstance(ca_key, Ed25519PrivateKey) else KeyAlgorithm.ED448
    online = make_online(ca_cert, ca_key, algorithm or own, host, now)
    # The key first: a crash in between leaves files that do not fit, which `load_server_files` names.
    _replace_private(config_dir / SERVER_KEY, _key_pem(online.key))
    _replace_private(config_dir / SERVER_CERTIFICATE, _certificate_pem(online.chain[0]))
    return online


def _builder(
    subject: x509.Name, issuer: x509.Name, key: PrivateKey, now: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - BACKDATED).not_valid_after(FAR_FUTURE)


def _signed(builder: x509.CertificateBuilder, key: PrivateKey) -> bytes:
    return builder.sign(key, None).public_bytes(Encoding.DER)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:MAX_COMMON_NAME])])


def _alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host.encode("idna").decode("ascii"))


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _certificate_pem(der: bytes) -> bytes:
    return x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM)


def _key_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write_private(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _replace_private(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.new")
    draft.unlink(missing_ok=True)
    _write_private(draft, content)
    draft.replace(path)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateFileError(f"cannot read {path}: {error.strerror}") from error


def _load_certificates(path: Path) -> tuple[bytes, ...]:
    try:
        certificates = x509.load_pem_x509_certificates(_read(path))
    except ValueError as error:
        raise CertificateFileError(f"{path} is not a PEM certificate") from error
    return tuple(certificate.public_bytes(Encoding.DER) for certificate in certificates)


def _load_key(path: Path) -> PrivateKey:
    try:
        key = load_pem_private_key(_read(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # the cause is dropped: its text may quote the key
        raise CertificateFileError(f"{path} is not an unencrypted PEM private key") from None
    if not isinstance(key, Ed25519PrivateKey | Ed448PrivateKey):
        raise CertificateFileError(f"{path} is neither an Ed25519 nor an Ed448 key")
    return key


def _check_fingerprint(path: Path, expected: bytes) -> None:
    text = _read(path).strip().rstrip(b"=")
    try:
        stored = base64.urlsafe_b64decode(text + b"=" * (-len(text) % 4))
    except (binascii.Error, ValueError) as error:
        raise CertificateFileError(f"{path} is not base64url") from error
    if stored != expected:
        raise CertificateFileError(f"{path} is not the fingerprint of {CA_CERTIFICATE}")
