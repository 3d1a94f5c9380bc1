"""What a handshake agreed on: everything later code needs to know of the session."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol import versions
from protocol.crypto import Ed25519PrivateKey, Ed25519PublicKey, X25519PrivateKey, X25519PublicKey
from protocol.encoding import EntityId
from protocol.hiding import hides_bytes
from protocol.versions import VersionRange


@hides_bytes
@dataclass(frozen=True, slots=True)
class ServiceSession:
    """A service during one session; its client also holds the private half of the session key."""

    service_id: EntityId = field(repr=False)
    fingerprint: bytes
    session_key: Ed25519PublicKey = field(repr=False)
    private_key: Ed25519PrivateKey | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class RouterProof:
    """What a router showed in its handshake; a proxy passes it on to clients, who check it for themselves."""

    versions: VersionRange
    chain: tuple[bytes, ...] = field(repr=False)
    signed_key: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParams:
    block_size: int
    version: int
    session_id: bytes = field(repr=False)
    batch: bool
    implied_session_id: bool
    service_signatures: bool
    "Authorised transmissions have a place for a service signature."
    own_session_key: X25519PrivateKey | None = field(default=None, repr=False)
    "The server's key of this session: authenticators are checked with it."
    peer_session_key: X25519PublicKey | None = field(default=None, repr=False)
    "At a client, the server's: authenticators are made with it."
    service: ServiceSession | None = field(default=None, repr=False)
    shared_secret: bytes | None = field(default=None, repr=False)
    "Of both session keys, if the client sent one: seals what a proxy forwards."
    proof: RouterProof | None = field(default=None, repr=False)
    "At a client, the router's."


def ntf_params(
    version: int,
    session_id: bytes,
    *,
    own_session_key: X25519PrivateKey | None = None,
    peer_session_key: X25519PublicKey | None = None,
) -> SessionParams:
    modern = version >= versions.NTF_BATCHING
    return SessionParams(
        block_size=versions.NTF_BLOCK_SIZE,
        version=version,
        session_id=session_id,
        batch=modern,
        implied_session_id=modern,
        service_signatures=False,
        own_session_key=own_session_key if modern else None,
        peer_session_key=peer_session_key if modern else None,
    )


def smp_params(
    version: int,
    session_id: bytes,
    *,
    own_session_key: X25519PrivateKey | None = None,
    peer_session_key: X25519PublicKey | None = None,
    service: ServiceSession | None = None,
    shared_secret: bytes | None = None,
    proof: RouterProof | None = None,
) -> SessionParams:
    has_keys = version >= versions.SMP_SESSION_KEYS
    return SessionParams(
        block_size=versions.SMP_BLOCK_SIZE,
        version=version,
        session_id=session_id,
        batch=True,
        implied_session_id=has_keys,
        service_signatures=version >= versions.SMP_SERVICE_CERTS,
        own_session_key=own_session_key if has_keys else None,
        peer_session_key=peer_session_key if has_keys else None,
        service=service,
        shared_secret=shared_secret,
        proof=proof,
    )
