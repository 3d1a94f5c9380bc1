"""Two Connections in memory: a client and its server, with bytes carried by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from protocol.connection import Connection, Failed, HandshakeDone
from protocol.crypto import SigningKey, X25519PrivateKey, sha256
from protocol.encoding import EntityId
from protocol.errors import HandshakeErrorType
from protocol.handshake import Handshake
from protocol.ntf_commands import NTF_COMMANDS, NTF_RESPONSES, NtfCommand, NtfResponse
from protocol.ntf_handshake import NtfClientHandshake, NtfServerHandshake
from protocol.smp_codec import SMP_COMMANDS, SMP_MESSAGES
from protocol.smp_handshake import ServiceLogin, ServiceRole, SmpClientHandshake, SmpServerHandshake
from protocol.smp_messages import SmpCommand, SmpMessage
from protocol.versions import NTF_VERSIONS, SMP_VERSIONS, VersionRange
from tests.builders import ed25519, fixed, server_chain, x25519

Command = TypeVar("Command")
Answer = TypeVar("Answer")


@dataclass
class Twins(Generic[Command, Answer]):
    """Feed and watch both; `client_events` and `server_events` are what each has seen so far."""

    client: Connection[Answer, Command]
    server: Connection[Command, Answer]

    def __post_init__(self) -> None:
        self.client_events: list[Any] = []
        self.server_events: list[Any] = []

    def to_client(self, data: bytes, chunk: int = 0) -> None:
        self.client_events += deliver(self.client, data, chunk)

    def to_server(self, data: bytes, chunk: int = 0) -> None:
        self.server_events += deliver(self.server, data, chunk)

    def shake(self, chunk: int = 0) -> Twins[Command, Answer]:
        """Carries bytes until neither side has more to say."""
        while True:
            down, up = self.server.data_to_send(), self.client.data_to_send()
            if not down and not up:
                return self
            self.to_client(down, chunk)
            self.to_server(up, chunk)

    @property
    def agreed(self) -> bool:
        """Both sides have finished the handshake and seen nothing else."""
        return all(
            len(events) == 1 and isinstance(events[0], HandshakeDone)
            for events in (self.client_events, self.server_events)
        )

    @property
    def failures(self) -> tuple[HandshakeErrorType | None, HandshakeErrorType | None]:
        """(client's, server's)"""
        return failure(self.client_events), failure(self.server_events)


def deliver(connection: Connection[Any, Any], data: bytes, chunk: int = 0) -> list[Any]:
    """What `connection` makes of `data`, given whole or in chunks."""
    step = chunk or len(data) or 1
    events: list[Any] = []
    for start in range(0, len(data), step):
        events += connection.receive_data(data[start : start + step])
    return events


def failure(events: Sequence[Any]) -> HandshakeErrorType | None:
    return next((event.error for event in events if isinstance(event, Failed)), None)


def ntf_client(handshake: Handshake) -> Connection[NtfResponse, NtfCommand]:
    return Connection(handshake, NTF_RESPONSES, NTF_COMMANDS, checks_credentials=False)


def ntf_server(handshake: Handshake) -> Connection[NtfCommand, NtfResponse]:
    return Connection(handshake, NTF_COMMANDS, NTF_RESPONSES, checks_credentials=True)


def smp_client(handshake: Handshake) -> Connection[SmpMessage, SmpCommand]:
    return Connection(handshake, SMP_MESSAGES, SMP_COMMANDS, checks_credentials=False)


def smp_router(handshake: Handshake) -> Connection[SmpCommand, SmpMessage]:
    return Connection(
        handshake, SMP_COMMANDS, SMP_MESSAGES, checks_credentials=True, answers_bad_batches=True
    )


def ntf_twins(
    *,
    client_versions: VersionRange = NTF_VERSIONS,
    server_versions: VersionRange = NTF_VERSIONS,
    client_session_id: bytes | None = None,
    client_key_hash: bytes | None = None,
    client_leaf: bytes | None = None,
    chain: Sequence[bytes] | None = None,
    signer: SigningKey | None = None,
) -> Twins[NtfCommand, NtfResponse]:
    """Each argument that differs from the peer's makes the handshake fail in its own way."""
    session_id, chain = fixed("sessionId"), chain or server_chain()
    key_hash = sha256(chain[1])
    server = NtfServerHandshake(
        session_id, key_hash, signer or ed25519("serverCertSk"), x25519("serverX"), server_versions
    )
    client = NtfClientHandshake(
        client_session_id or session_id,
        client_key_hash or key_hash,
        client_leaf or chain[0],
        client_versions,
    )
    return Twins(ntf_client(client), ntf_server(server))


def smp_twins(
    *,
    client_versions: VersionRange = SMP_VERSIONS,
    router_versions: VersionRange = SMP_VERSIONS,
    client_session_id: bytes | None = None,
    client_key_hash: bytes | None = None,
    client_router_chain: Sequence[bytes] | None = None,
    chain: Sequence[bytes] | None = None,
    signer: SigningKey | None = None,
    session_key: X25519PrivateKey | None = None,
    service: ServiceLogin | None = None,
    tls_client_chain: Sequence[bytes] | None = None,
    proxy: bool = False,
) -> Twins[SmpCommand, SmpMessage]:
    """As ntf_twins. `session_key` turns block encryption on; a service's chain is shown in TLS by default."""
    session_id, chain = fixed("sessionId"), chain or server_chain()
    if tls_client_chain is None:
        tls_client_chain = service.chain if service else ()
    router = SmpServerHandshake(
        session_id,
        chain,
        signer or ed25519("serverCertSk"),
        x25519("serverX"),
        client_chain=tls_client_chain,
        service_id=service_id,
        versions=router_versions,
    )
    client = SmpClientHandshake(
        client_session_id or session_id,
        client_key_hash or sha256(chain[1]),
        chain if client_router_chain is None else client_router_chain,
        session_key,
        service,
        client_versions,
        proxy=proxy,
    )
    return Twins(smp_client(client), smp_router(router))


def service_id(fingerprint: bytes, role: ServiceRole) -> EntityId:
    """The same service has the same id."""
    return EntityId(sha256(fingerprint + role.value)[:24])
