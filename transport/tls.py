"""TLS contexts: what this project agrees to speak, for both sides."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from OpenSSL import SSL

from transport.certificates import Credentials
from transport.errors import CertificateFileError

CIPHERSUITE = b"TLS_CHACHA20_POLY1305_SHA256"
GROUPS = b"X25519:X448"
SIGNATURES = b"ed25519:ed448"
WEB_GROUPS = b"X25519:P-256:P-384"
WEB_CIPHERS = b"ECDHE+AESGCM:ECDHE+CHACHA20"  # of TLS 1.2
HTTP_ALPN = b"http/1.1"
CLIENT_CONTEXTS = 256  # one per service certificate; a context costs about a millisecond to make

# OpenSSL's name of the step that a client takes only after it sent a non-empty certificate.
_CERTIFICATE_PROVEN = b"SSLv3/TLS write certificate verify"


def server_context(
    credentials: Credentials, alpn: Sequence[bytes], *, ask_client_certificate: bool = False
) -> SSL.Context:
    """A context for accepting connections, shared by all of them.

    ALPN is chosen by the server's order; a client that offers none, or only others, is accepted without ALPN.
    With `ask_client_certificate` clients may present a certificate, and any is accepted here: the protocol
    above checks it.
    """
    context = _context(SSL.TLS_SERVER_METHOD)
    _use_credentials(context, credentials)
    _select_alpn(context, alpn)
    if ask_client_certificate:
        context.set_verify(SSL.VERIFY_PEER, _accept_any_certificate)
    return context


def web_context(cert_file: Path, key_file: Path) -> SSL.Context:
    """A context for HTTP clients of any kind: TLS 1.2 and 1.3, with the certificates and key of PEM files.

    Raises `CertificateFileError`. A key with a passphrase is refused: nobody is there to type it.
    """
    context = SSL.Context(SSL.TLS_SERVER_METHOD)
    context.set_min_proto_version(SSL.TLS1_2_VERSION)
    context.set_cipher_list(WEB_CIPHERS)
    context.set_options(SSL.OP_NO_RENEGOTIATION)
    _restrict(context, WEB_GROUPS)
    try:
        context.use_certificate_chain_file(str(cert_file))
        context.use_privatekey(load_pem_private_key(key_file.read_bytes(), password=None))  # type: ignore[arg-type]
        context.check_privatekey()
    except (OSError, SSL.Error, ValueError, TypeError, UnsupportedAlgorithm):
        raise CertificateFileError(f"{cert_file} and {key_file} are no certificate with its key") from None
    _select_alpn(context, [HTTP_ALPN])
    return context


def client_context(alpn: Sequence[bytes], service: Credentials | None = None) -> SSL.Context:
    """A context for connecting, made once for the same arguments; shows `service` to servers that ask for it.

    OpenSSL itself verifies nothing: the stream checks the chain against the pinned identity.
    """
    return _client_context(tuple(alpn), service)


def certificate_was_sent(connection: SSL.Connection) -> bool:
    """Whether this client was asked for its certificate, sent it and proved to own it."""
    return connection.get_app_data() is True


@lru_cache(maxsize=CLIENT_CONTEXTS)
def _client_context(alpn: tuple[bytes, ...], service: Credentials | None) -> SSL.Context:
    context = _context(SSL.TLS_CLIENT_METHOD)
    context.set_verify(SSL.VERIFY_NONE)
    if alpn:
        context.set_alpn_protos(list(alpn))
    if service is not None:
        _use_credentials(context, service)
        context.set_info_callback(_note_certificate_sent)
    return context


def _context(method: int) -> SSL.Context:
    context = SSL.Context(method)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    context.set_max_proto_version(SSL.TLS1_3_VERSION)
    context.set_tls13_ciphersuites(CIPHERSUITE)
    _require(SSL._lib.SSL_CTX_set1_sigalgs_list(context._context, SIGNATURES))  # type: ignore[attr-defined]
    _restrict(context, GROUPS)
    return context


def _restrict(context: SSL.Context, groups: bytes) -> None:
    """What every context has in common. pyOpenSSL has no public call for groups, and none for signature
    algorithms; its bindings do."""
    _require(SSL._lib.SSL_CTX_set1_curves_list(context._context, groups))  # type: ignore[attr-defined]
    context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
    context.set_options(SSL.OP_NO_TICKET | SSL.OP_NO_COMPRESSION)
    context.set_mode(SSL._lib.SSL_MODE_RELEASE_BUFFERS)  # type: ignore[attr-defined]  # idle ones stay small


def _select_alpn(context: SSL.Context, alpn: Sequence[bytes]) -> None:
    preferred = tuple(alpn)

    def select(_connection: SSL.Connection, offered: list[bytes]) -> object:
        return next((name for name in preferred if name in offered), SSL.NO_OVERLAPPING_PROTOCOLS)

    context.set_alpn_select_callback(select)  # type: ignore[arg-type]  # the marker object is not in its types


def _require(result: int) -> None:
    if result != 1:
        raise RuntimeError("the TLS library refuses the required groups or signature algorithms")


def _use_credentials(context: SSL.Context, credentials: Credentials) -> None:
    leaf, *rest = (x509.load_der_x509_certificate(der) for der in credentials.chain)
    context.use_certificate(leaf)
    for certificate in rest:
        context.add_extra_chain_cert(certificate)
    context.use_privatekey(credentials.key)
    context.check_privatekey()


def _accept_any_certificate(*_details: object) -> bool:
    return True


def _note_certificate_sent(connection: SSL.Connection, where: int, _result: int) -> None:
    if where & SSL.SSL_CB_LOOP and connection.get_state_string() == _CERTIFICATE_PROVEN:
        connection.set_app_data(True)
