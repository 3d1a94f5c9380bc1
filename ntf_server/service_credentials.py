"""As which service this daemon logs in to a router, and what becomes of that when the router disagrees."""

from __future__ import annotations

import logging

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_der_private_key

from ntf_server.clock import Clock, as_datetime
from ntf_server.journal import EventSink
from ntf_server.metrics import counter
from protocol.session_params import ServiceSession
from smp_client.session import Service
from store.interface import SubscriberStore
from store.journal_schema import JournalEvent
from store.records import ServerKey, ServerRecord, ServiceCredentials
from transport.certificates import Credentials, make_service

logger = logging.getLogger(__name__)

RESET_INTERVAL = 600.0
"Credentials that a router refuses are replaced at most this often, in seconds."

SERVICE_RESETS = counter("smp_service_resets", "Service credentials given up because a router refused them")
SERVICE_ID_CHANGES = counter("smp_service_id_changes", "Routers that gave this service another id")


class RouterService:
    """The service of one router: made on first use, stored before use, reset at most once per interval.

    A router that refuses the service in the middle of a session has perhaps only forgotten it, and knows it
    again, under another id, after the next login. Or it refuses it for a single queue, for ever. So after a
    reset one more session is tried, and another one only if the last brought a new id.
    """

    def __init__(
        self,
        store: SubscriberStore,
        key: ServerKey,
        name: str,
        clock: Clock,
        journal: EventSink,
        *,
        enabled: bool,
    ) -> None:
        self._store = store
        self._key = key
        self._name = name
        self._clock = clock
        self._journal = journal
        self._enabled = enabled
        self._reset_at: float | None = None
        self._does_without = False
        self._tried_again = False
        self.service: Service | None = None
        "What to show to the router in the next session."

    async def prepare(self, record: ServerRecord) -> None:
        """Load the credentials, or make and store new ones."""
        if not self._enabled or (self._does_without and not self._may_reset()):
            self.service = None
            return
        self._does_without = False
        stored = record.credentials
        if stored is None:
            credentials = make_service(as_datetime(self._clock.now()))
            stored = ServiceCredentials(chain=credentials.chain, private_key=credentials.signing_key.der)
            await self._store.set_credentials(self._key, stored)
            self.service = Service(credentials)
        elif self.service is None or self.service.credentials.chain != stored.chain:
            self.service = Service(_load(stored))

    async def adopt(self, record: ServerRecord, session: ServiceSession | None) -> None:
        """Make the stored service that of a new session; associations with another one are cleared."""
        if session is None:
            if record.service_id is not None:
                logger.warning("%s: no longer supports services; subscribing queue by queue", self._name)
                await self._clear("unknown")
            return
        if await self._store.set_service_id(self._key, session.service_id):
            self._tried_again = False
            SERVICE_ID_CHANGES.inc()
            logger.warning("%s: gave this service another id; subscribing its queues again", self._name)
            self._journal.record(JournalEvent.SMP_SERVICE_RESET, server=self._name, error="changed")

    async def refused(self) -> bool:
        """The router refuses the service in a session: whether to try in another one."""
        if await self._reset():
            return True
        if self._tried_again:
            return False
        self._tried_again = True
        return True

    def _may_reset(self) -> bool:
        return self._reset_at is None or self._clock.monotonic() - self._reset_at >= RESET_INTERVAL

    async def _reset(self) -> bool:
        """Give up credentials and associations, to start afresh; False if that was done only lately."""
        if not self._may_reset():
            return False
        self._reset_at = self._clock.monotonic()
        self._tried_again = False
        SERVICE_RESETS.inc()
        logger.warning("%s: rejected this service; logging in with a new certificate", self._name)
        self.service = None
        await self._clear("refused")
        return True

    async def refused_in_handshake(self) -> None:
        """The router does not let this service in: try a fresh one, and then none for a while."""
        if not await self._reset():
            self._does_without = True
            self.service = None
            await self._clear("refused")

    async def _clear(self, reason: str) -> None:
        changed = await self._store.clear_service(self._key)
        self._journal.record(JournalEvent.SMP_SERVICE_RESET, server=self._name, error=reason, changed=changed)


def _load(stored: ServiceCredentials) -> Credentials:
    key = load_der_private_key(stored.private_key, password=None)
    assert isinstance(key, Ed25519PrivateKey)
    return Credentials(stored.chain, key)
