"""What the agent keeps about notifications: one class per row. Keys and ids never show in a repr."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from protocol.addresses import NtfServer, SmpQueueNtf, SmpServer
from protocol.crypto import Ed25519PrivateKey, X25519PrivateKey, X25519PublicKey
from protocol.device_token import DeviceToken
from protocol.encoding import NO_ENTITY, EntityId
from protocol.ntf_commands import MIN_CRON_MINUTES, NtfCommand, Sdel, Snew, Tnew
from protocol.statuses import TokenStatus
from smp_client.requests import Request

MIN_PERIOD = MIN_CRON_MINUTES
MAX_PERIOD = 2**16 - 1


class Mode(StrEnum):
    """How the device hears of messages."""

    INSTANT = "instant"
    "A push for every message: the notification server watches the queues."
    PERIODIC = "periodic"
    "A push now and then: the device looks for itself, nobody watches the queues."


class TokenAction(StrEnum):
    """What is to be done next about the token; none: wait for the verification push, or for the user."""

    REGISTER = "REGISTER"
    REPLACE = "REPLACE"
    "The device token, by the one in `replacement`."
    VERIFY = "VERIFY"
    CHECK = "CHECK"


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """The registration of this device at a notification server."""

    server: NtfServer
    device_token: DeviceToken
    mode: Mode
    period: int = MIN_PERIOD
    "Minutes between pushes in the periodic mode."
    auth_key: Ed25519PrivateKey
    dh_key: X25519PrivateKey
    token_id: EntityId | None = field(default=None, repr=False)
    dh_secret: bytes | None = field(default=None, repr=False)
    "Opens pushes."
    status: TokenStatus = TokenStatus.NEW
    action: TokenAction | None = TokenAction.REGISTER
    code: bytes | None = field(default=None, repr=False)
    "Set while it is to be sent."
    replacement: DeviceToken | None = None
    "A device token that the server may know already in place of `device_token`."
    cron: int = 0
    "Minutes between periodic pushes as the server knows them."

    @property
    def registration(self) -> Tnew:
        return Tnew(self.device_token, self.auth_key.public, self.dh_key.public)

    @property
    def wanted_cron(self) -> int:
        return self.period if self.mode is Mode.PERIODIC else 0

    @property
    def is_unfinished(self) -> bool:
        """Whether its server has to be told something."""
        if self.action is TokenAction.CHECK:
            return self.cron != self.wanted_cron
        return self.action is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUpToken:
    """A token that the server does not know yet to be given up."""

    key: int = 0
    server: NtfServer
    auth_key: Ed25519PrivateKey
    token_id: EntityId | None = field(repr=False)
    device_token: DeviceToken | None = field(repr=False)
    dh_public_key: X25519PublicKey | None = field(repr=False)

    @property
    def registration(self) -> Tnew | None:
        """Without an id: again with the same keys it tells the id of the token that it may have made."""
        if self.token_id is not None or self.device_token is None or self.dh_public_key is None:
            return None
        return Tnew(self.device_token, self.auth_key.public, self.dh_public_key)


class SubAction(StrEnum):
    """The next step of a notification subscription; each is stored before it is taken."""

    SMP_KEY = "SMP_KEY"
    "NKEY at the router, with the keys of the row."
    NTF_CREATE = "NTF_CREATE"
    "SNEW at the notification server, with the notifier the router named."
    NTF_CHECK = "NTF_CHECK"
    "SCHK when due."
    SMP_DELETE = "SMP_DELETE"
    "NDEL at the router, then the row goes."


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """The notification side of a receive queue."""

    queue_id: int
    smp_server: SmpServer
    ntf_server: NtfServer
    token_id: EntityId = field(repr=False)
    "For which token it was made: a new token needs new notifiers."
    action: SubAction | None
    "None: given up; `status` says why."
    due: int
    notifier_key: Ed25519PrivateKey
    dh_key: X25519PrivateKey
    notifier_id: EntityId | None = field(default=None, repr=False)
    dh_secret: bytes | None = field(default=None, repr=False)
    "Opens the meta of NMSG."
    subscription_id: EntityId | None = field(default=None, repr=False)
    status: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedSubscription:
    """A subscription that is still to be deleted at its server."""

    key: int = 0
    server: NtfServer
    token_id: EntityId = field(repr=False)
    auth_key: Ed25519PrivateKey
    subscription_id: EntityId | None = field(repr=False)
    "None if the answer to SNEW was never received: repeating the same SNEW returns it."
    smp_server: SmpServer
    notifier_id: EntityId = field(repr=False)
    notifier_key: Ed25519PrivateKey

    @property
    def request(self) -> Request[NtfCommand]:
        if self.subscription_id is not None:
            return Request(self.subscription_id, Sdel(), self.auth_key)
        queue = SmpQueueNtf(self.smp_server, self.notifier_id)
        return Request(NO_ENTITY, Snew(self.token_id, queue, self.notifier_key), self.auth_key)
