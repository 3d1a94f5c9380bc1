"""The SMP handshake: as NTF's, with certificates, block encryption and a third block for services."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from construct import Bytes, Const, Construct, FocusedSeq, If, Int16ub, Optional, Select, Struct

from protocol.blocks import session_chains
from protocol.crypto import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
    SigningKey,
    X25519PrivateKey,
    X25519PublicKey,
    decode_x25519_public,
    sha256,
)
from protocol.encoding import EntityId, Reader, short
from protocol.errors import (
    HANDSHAKE_ERRORS,
    TE_BAD_AUTH,
    TE_BAD_SERVICE,
    TE_IDENTITY,
    TE_PARSE,
    TE_SESSION,
    TE_VERSION,
    DecodeError,
    HandshakeError,
)
from protocol.handshake import (
    Agreed,
    HandshakeRefused,
    Step,
    VersionRangeFormat,
    agree_version,
    offered_range,
    parse_hello,
)
from protocol.hiding import hides_bytes
from protocol.session_params import RouterProof, ServiceSession, smp_params
from protocol.signed_key import (
    CertificateChain,
    LargeString,
    ShortString,
    identity_hashes,
    open_signed_key,
    sign_key,
)
from protocol.versions import (
    SMP_BLOCK_ENCRYPTION,
    SMP_BLOCK_SIZE,
    SMP_PROXY_FLAG,
    SMP_RCV_SERVICE,
    SMP_SERVICE_CERTS,
    SMP_SESSION_KEYS,
    SMP_VERSIONS,
    VersionRange,
)


class ServiceRole(Enum):
    MESSAGING = b"M"
    NOTIFIER = b"N"
    PROXY = b"P"

    @property
    def since(self) -> int:
        """The first version in which a service of this role is sent."""
        return SMP_RCV_SERVICE if self is ServiceRole.MESSAGING else SMP_SERVICE_CERTS


def _from(version: int, format: Construct) -> Construct:
    return If(lambda hello: hello.version >= version, format)


RouterHello = Struct(
    "versions" / VersionRangeFormat,
    "session_id" / ShortString,
    "auth"
    / If(
        lambda hello: hello.versions.max >= SMP_SESSION_KEYS,
        Struct("chain" / CertificateChain, "signed_key" / LargeString),
    ),
)
ServiceHello = Struct(
    "role" / Select(*(Const(role.value) for role in ServiceRole)),
    "chain" / CertificateChain,
    "signed_key" / LargeString,
)
# The key is simply absent when not used: no field that may follow it starts with its length byte.
SessionKey = Optional(FocusedSeq("der", Const(b"\x2c"), "der" / Bytes(0x2C)))
ClientHello = Struct(
    "version" / Int16ub,
    "key_hash" / ShortString,
    "session_key" / _from(SMP_SESSION_KEYS, SessionKey),
    "proxy" / _from(SMP_PROXY_FLAG, Select(Const(b"F"), Const(b"T"))),
    "has_service" / _from(SMP_SERVICE_CERTS, Select(Const(b"0"), Const(b"1"))),
    "service" / If(lambda hello: hello.has_service == b"1", ServiceHello),
)


@hides_bytes
@dataclass(frozen=True, slots=True)
class ServiceLogin:
    """A service client's identity for one session: `session_key` is fresh, `signer` the certificate's key."""

    role: ServiceRole
    chain: tuple[bytes, ...]
    signer: SigningKey = field(repr=False)
    session_key: Ed25519PrivateKey = field(repr=False)


def service_fingerprint(chain: Sequence[bytes]) -> bytes:
    return sha256(chain[0] if len(chain) == 1 else chain[1])


class SmpServerHandshake:
    """The router's side. `service_id(fingerprint, role)` finds or makes the id of a service."""

    block_size = SMP_BLOCK_SIZE

    def __init__(
        self,
        session_id: bytes,
        chain: Sequence[bytes],
        signer: SigningKey,
        session_key: X25519PrivateKey,
        *,
        client_chain: Sequence[bytes] = (),
        service_id: Callable[[bytes, ServiceRole], EntityId],
        versions: VersionRange = SMP_VERSIONS,
    ) -> None:
        """`client_chain`: the certificates that the client showed in TLS."""
        self._session_id = session_id
        self._chain = list(chain)
        self._signer = signer
        self._session_key = session_key
        self._client_chain = list(client_chain)
        self._service_id = service_id
        self._versions = versions

    def start(self) -> bytes:
        auth = {"chain": self._chain, "signed_key": sign_key(self._signer, self._session_key.public)}
        hello = {
            "versions": {"min": self._versions.min, "max": self._versions.max},
            "session_id": self._session_id,
            "auth": auth if self._versions.max >= SMP_SESSION_KEYS else None,
        }
        return bytes(RouterHello.build(hello))

    def receive(self, content: bytes) -> Step:
        hello = parse_hello(ClientHello, content)
        try:
            return self._agree(hello)
        except HandshakeError as error:
            if hello.service is None:
                raise
            raise HandshakeRefused(error, b"E" + error.error.text) from None

    def _agree(self, hello: Any) -> Step:
        if hello.key_hash not in identity_hashes(self._chain):
            raise HandshakeError(TE_IDENTITY)
        if hello.version not in self._versions:
            raise HandshakeError(TE_VERSION)
        service = None if hello.service is None else self._check_service(hello.service, hello.version)
        shared = None if hello.session_key is None else self._exchange(hello.session_key)
        params = smp_params(
            hello.version,
            self._session_id,
            own_session_key=self._session_key,
            service=service,
            shared_secret=shared,
        )
        reply = None if service is None else b"R" + short(service.service_id)
        if hello.version < SMP_BLOCK_ENCRYPTION or shared is None or hello.proxy == b"T":
            return Step(reply, Agreed(params))
        sending, receiving = session_chains(self._session_id, shared)
        return Step(reply, Agreed(params, sending, receiving))

    def _exchange(self, client_key: bytes) -> bytes:
        try:
            return self._session_key.exchange(decode_x25519_public(client_key))
        except DecodeError:
            raise HandshakeError(TE_PARSE) from None

    def _check_service(self, hello: Any, version: int) -> ServiceSession:
        role, chain = ServiceRole(hello.role), [bytes(certificate) for certificate in hello.chain]
        if version < role.since or not chain or chain != self._client_chain:
            raise HandshakeError(TE_BAD_SERVICE)
        try:
            key = open_signed_key(chain[0], hello.signed_key, Ed25519PublicKey)
        except DecodeError:
            raise HandshakeError(TE_BAD_SERVICE) from None
        fingerprint = service_fingerprint(chain)
        return ServiceSession(self._service_id(fingerprint, role), fingerprint, key)


class SmpClientHandshake:
    """The client's side. With `session_key` blocks are encrypted where the router can do it."""

    block_size = SMP_BLOCK_SIZE

    def __init__(
        self,
        session_id: bytes,
        key_hash: bytes,
        router_chain: Sequence[bytes],
        session_key: X25519PrivateKey | None = None,
        service: ServiceLogin | None = None,
        versions: VersionRange = SMP_VERSIONS,
        *,
        proxy: bool = False,
    ) -> None:
        """`router_chain`: what the router showed in TLS. `service`: only if TLS sent its certificate.

        A `proxy` encrypts what it forwards itself, so blocks are not encrypted once more where the router
        knows of proxies.
        """
        self._session_id = session_id
        self._key_hash = key_hash
        self._router_chain = list(router_chain)
        self._session_key = session_key
        self._service = service
        self._versions = versions
        self._proxy = proxy
        self._awaiting_service: Agreed | None = None

    def start(self) -> None:
        return None

    def receive(self, content: bytes) -> Step:
        if self._awaiting_service is not None:
            return Step(agreed=self._service_answer(self._awaiting_service, content))
        hello = parse_hello(RouterHello, content)
        if hello.session_id != self._session_id:
            raise HandshakeError(TE_SESSION)
        version = agree_version(self._versions, offered_range(hello))
        if hello.auth is None:
            agreed = self._agreed(version, None, None)
        else:
            proof = RouterProof(offered_range(hello), tuple(self._router_chain), bytes(hello.auth.signed_key))
            agreed = self._agreed(version, self._router_key(hello.auth), proof)
        service = self._service if self._service and version >= self._service.role.since else None
        reply = self._hello(version, service)
        if service is None:
            return Step(reply, agreed)
        self._awaiting_service = agreed
        return Step(reply)

    def _router_key(self, auth: Any) -> X25519PublicKey:
        if not self._router_chain or [bytes(c) for c in auth.chain] != self._router_chain:
            raise HandshakeError(TE_BAD_AUTH)
        try:
            return open_signed_key(self._router_chain[0], auth.signed_key, X25519PublicKey)
        except DecodeError:
            raise HandshakeError(TE_BAD_AUTH) from None

    def _agreed(self, version: int, router_key: X25519PublicKey | None, proof: RouterProof | None) -> Agreed:
        shared = None
        if self._session_key is not None and router_key is not None:
            try:
                shared = self._session_key.exchange(router_key)
            except DecodeError:
                raise HandshakeError(TE_BAD_AUTH) from None
        params = smp_params(
            version, self._session_id, peer_session_key=router_key, shared_secret=shared, proof=proof
        )
        unencrypted = self._proxy and version >= SMP_PROXY_FLAG
        if version < SMP_BLOCK_ENCRYPTION or shared is None or unencrypted:
            return Agreed(params)
        receiving, sending = session_chains(self._session_id, shared)
        return Agreed(params, sending, receiving)

    def _hello(self, version: int, service: ServiceLogin | None) -> bytes:
        hello: dict[str, Any] = {
            "version": version,
            "key_hash": self._key_hash,
            "session_key": None if self._session_key is None else self._session_key.public.der,
            "proxy": b"T" if self._proxy else b"F",
            "has_service": b"0" if service is None else b"1",
            "service": None,
        }
        if service is not None:
            hello["service"] = {
                "role": service.role.value,
                "chain": list(service.chain),
                "signed_key": sign_key(service.signer, service.session_key.public),
            }
        return bytes(ClientHello.build(hello))

    def _service_answer(self, agreed: Agreed, content: bytes) -> Agreed:
        r = Reader(content)
        try:
            kind = r.pull_bytes(1)
            if kind == b"E":
                raise HandshakeError(HANDSHAKE_ERRORS.get(r.pull_tail(), TE_PARSE))
            if kind != b"R":
                raise HandshakeError(TE_PARSE)
            service_id = EntityId(r.pull_short())
        except DecodeError:
            raise HandshakeError(TE_PARSE) from None
        login = self._service
        assert login is not None
        service = ServiceSession(
            service_id, service_fingerprint(login.chain), login.session_key.public, login.session_key
        )
        return replace(agreed, params=replace(agreed.params, service=service))
