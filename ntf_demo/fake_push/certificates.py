"""A certificate authority of the fake push service's own, and a certificate for this machine."""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME: Final = datetime.timedelta(days=365)
ALPN: Final = "h2"
LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "::1")


def make_certificates(folder: Path, names: tuple[str, ...] = LOCAL_NAMES) -> tuple[Path, Path]:
    """The files of a CA and of a server certificate with its key; made if the folder does not have them."""
    folder.mkdir(parents=True, exist_ok=True)
    ca_file, server_file = folder / "ca.pem", folder / "server.pem"
    if ca_file.exists() and server_file.exists():
        return ca_file, server_file
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fake push CA")])
    ca = _builder(ca_name, ca_name, ca_key.public_key())
    ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    ca = ca.add_extension(
        x509.KeyUsage(False, False, False, False, False, True, True, False, False), critical=True
    )
    subject_key = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    ca_certificate = ca.add_extension(subject_key, critical=False).sign(ca_key, hashes.SHA256())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fake push")])
    leaf = _builder(name, ca_name, key.public_key())
    leaf = leaf.add_extension(x509.SubjectAlternativeName([_general_name(n) for n in names]), critical=False)
    leaf = leaf.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    certificate = leaf.add_extension(authority, critical=False).sign(ca_key, hashes.SHA256())
    ca_file.write_bytes(ca_certificate.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    with open(os.open(server_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(private + certificate.public_bytes(serialization.Encoding.PEM))
    return ca_file, server_file


def server_context(server_file: Path) -> ssl.SSLContext:
    """TLS for HTTP/2."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(server_file)
    context.set_alpn_protocols([ALPN])
    return context


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + LIFETIME)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
