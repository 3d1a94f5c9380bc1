"""How a router behaves; every field has a default that suits development."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.versions import SMP_VERSIONS, VersionRange


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    versions: VersionRange = SMP_VERSIONS
    "What is offered to clients: a lower maximum plays an older router."
    interval: float = 0.0
    "Seconds between rounds of NMSG delivery; 0 delivers at once."
    quota: int = 128
    "Messages a queue holds before senders are told QUOTA."
    max_pending: int = 128
    "NMSGs stored per queue while nobody takes them; the oldest are dropped."
    password: bytes | None = field(default=None, repr=False)
    "What NEW must bring (basic auth); None lets everybody create queues."
    handshake_timeout: float = 15.0
    "Seconds for TLS, and again for the SMP handshake."
    send_timeout: float = 30.0
    "Seconds in which a client must take what is being sent; then it is disconnected."
    idle_timeout: float = 6 * 3600.0
    "Seconds of silence after which a client is disconnected."
    max_unsent: int = 8 * 1024 * 1024
    "Bytes that may wait for one client; a client that reaches it is disconnected."
