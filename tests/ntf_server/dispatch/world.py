"""Devices, queues, a real store, a real fake push service, and the dispatcher between them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ntf_demo.fake_push.server import FakePushConfig, FakePushServer
from ntf_server.clock import Clock
from ntf_server.config import ApnsConfig, PushConfig
from ntf_server.journal import EventSink
from ntf_server.push.apns import ApnsProvider, make_apns_client
from ntf_server.push.dispatcher import CallLater, Dispatcher
from ntf_server.push.http2 import CurlHttp2
from ntf_server.push.provider import PushProvider
from protocol.addresses import SmpServer
from protocol.crypto import X25519PrivateKey
from protocol.device_token import ApnsToken, DeviceToken, Provider
from protocol.encoding import EntityId
from protocol.push_messages import (
    NmsgMeta,
    PnMessage,
    decode_pn_messages,
    open_nmsg_meta,
    open_push,
    seal_nmsg_meta,
)
from protocol.statuses import TokenInput, TokenStatus
from store.journal_schema import JournalEvent
from store.records import NewSubscription, NewToken, Notification, ServerKey, TokenKey
from store.sqlite import SqliteStore
from tests.faults import StoreFaults, with_faults
from tests.store.builders import create_one

ROUTER = SmpServer(("router.example",), "", b"k" * 32)


class RecordingJournal(EventSink):
    """Keeps what is recorded."""

    def __init__(self) -> None:
        self.events: list[tuple[JournalEvent, dict[str, Any]]] = []

    def record(self, event: JournalEvent, **columns: Any) -> None:
        super().record(event, **columns)
        self.events.append((event, columns))

    def of(self, event: JournalEvent) -> list[dict[str, Any]]:
        return [columns for kind, columns in self.events if kind is event]


@dataclass(frozen=True)
class Queue:
    """A queue as its recipient knows it."""

    notifier_id: EntityId
    server_key: ServerKey
    secret: bytes = field(repr=False)


@dataclass
class Device:
    """A client: it can open what is pushed to it."""

    key: TokenKey
    token_id: EntityId
    name: str
    secret: bytes = field(repr=False)
    code: bytes = field(repr=False)
    queues: list[Queue] = field(default_factory=list)


@dataclass
class World:
    store: SqliteStore
    fake: FakePushServer
    http: CurlHttp2
    apns: ApnsProvider
    clock: Clock
    journal: RecordingJournal
    dispatcher: Dispatcher
    faults: StoreFaults
    message_number: int = 0
    sent: dict[EntityId, bytes] = field(default_factory=dict)
    "The newest message of each queue."

    async def add_device(
        self, queues: int = 0, *, active: bool = True, token: DeviceToken | None = None
    ) -> Device:
        server_side, device_side = X25519PrivateKey(os.urandom(32)), X25519PrivateKey(os.urandom(32))
        name = os.urandom(32).hex()
        code = os.urandom(32)
        record = await self.store.create_token(
            NewToken(
                token_id=EntityId(os.urandom(24)),
                device_token=token or apns_token(name),
                verify_key=os.urandom(44),
                dh_private=server_side.raw,
                dh_secret=server_side.exchange(device_side.public),
                code=code,
                updated_on=0,
            )
        )
        if active:
            await self.store.move_token(record, TokenInput.CODE_MATCHED, 0)
        secret = device_side.exchange(server_side.public)
        device = Device(record.key, record.token_id, name, secret, code)
        for _ in range(queues):
            await self.add_queue(device)
        return device

    async def add_queue(self, device: Device, server: SmpServer = ROUTER) -> None:
        notifier_id = EntityId(os.urandom(24))
        created = await create_one(
            self.store,
            NewSubscription(
                subscription_id=EntityId(os.urandom(24)),
                token_key=device.key,
                server=server,
                notifier_id=notifier_id,
                notifier_key=b"",
            ),
        )
        assert created is not None
        device.queues.append(Queue(notifier_id, created.server_key, os.urandom(32)))

    async def receive(self, *queues: Queue) -> None:
        """NMSGs of one block: stored, then given to the push side."""
        notifications = [self._nmsg(queue) for queue in queues]
        received_at = self.clock.monotonic()
        stored = await self.store.add_notifications(
            queues[0].server_key, notifications, received_at=int(self.clock.now())
        )
        await self.dispatcher.notify([item for item in stored if item is not None], received_at)

    def _nmsg(self, queue: Queue) -> Notification:
        self.message_number += 1
        message_id = self.message_number.to_bytes(24, "big")
        self.sent[queue.notifier_id] = message_id
        nonce = os.urandom(24)
        meta = seal_nmsg_meta(queue.secret, nonce, NmsgMeta(message_id, int(self.clock.now())))
        return Notification(queue.notifier_id, nonce, meta)

    def lists(self, device: Device, status: int = 200) -> list[list[PnMessage]]:
        """The message lists pushed to a device, oldest push first, as the device reads them."""
        return [decode_pn_messages(data) for data in self.opened(device, "message", status)]

    def opened(self, device: Device, name: str, status: int = 200) -> list[bytes]:
        """Decrypted pushes of one kind that got this answer."""
        contents = []
        for push in self.fake.recorder.pushes:
            if push.token != device.name or push.status != status:
                continue
            data = json.loads(push.body)["notificationData"]
            if name in data:
                nonce, boxed = (base64.urlsafe_b64decode(data[key]) for key in ("nonce", name))
                contents.append(open_push(device.secret, nonce, boxed))
        return contents

    def messages(self, device: Device, entries: list[PnMessage]) -> dict[EntityId, bytes]:
        """The message id of each queue in a list, out of the part that only the recipient can read."""
        secrets = {queue.notifier_id: queue.secret for queue in device.queues}
        return {
            entry.queue.notifier_id: open_nmsg_meta(
                secrets[entry.queue.notifier_id], entry.nonce, entry.meta
            ).message_id
            for entry in entries
        }

    def all_messages(self, device: Device) -> dict[EntityId, bytes]:
        """The newest message id of each queue in all accepted pushes of a device."""
        found: dict[EntityId, bytes] = {}
        for entries in self.lists(device):
            found.update(self.messages(device, entries))
        return found

    async def unsent(self) -> int:
        return (await self.store.counts()).unsent_notifications

    async def status(self, device: Device) -> TokenStatus:
        (record,) = await self.store.tokens_by_key([device.key])
        return record.status


def apns_token(name: str) -> DeviceToken:
    return ApnsToken(Provider.APNS_TEST, name.encode())


def write_key(path: Path) -> Path:
    key = ec.generate_private_key(ec.SECP256R1())
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return path


@contextlib.asynccontextmanager
async def running(dispatcher: Dispatcher) -> AsyncIterator[None]:
    """Let a dispatcher work for the time of the block."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(dispatcher.run())
        try:
            yield
        finally:
            await dispatcher.stop(5.0)


@contextlib.asynccontextmanager
async def make_world(
    folder: Path,
    clock: Clock,
    config: PushConfig | None = None,
    *,
    call_later: CallLater | None = None,
    response_timeout: float = 5.0,
    others: Mapping[Provider, PushProvider] | None = None,
) -> AsyncIterator[World]:
    """Everything but the running dispatcher."""
    store = SqliteStore(folder / "ntf.db")
    http = CurlHttp2()
    await store.open()
    async with FakePushServer(FakePushConfig(folder=folder / "fake", record_limit=30_000)) as fake:
        apns_config = ApnsConfig(
            key_file=write_key(folder / "key.p8"),
            key_id="KEY",
            team_id="TEAM",
            allow_test_provider=True,
            test_port=fake.port,
            test_ca_file=fake.ca_file,
        )
        client = make_apns_client(apns_config, http)
        apns = ApnsProvider(apns_config, client, fake.config.clock, response_timeout)
        journal = RecordingJournal()
        faults = StoreFaults()
        dispatcher = Dispatcher(
            with_faults(store, faults),
            {Provider.APNS_TEST: apns, **(others or {})},
            config or PushConfig(),
            clock=clock,
            random=os.urandom,
            journal=journal,
            call_later=call_later,
        )
        try:
            yield World(store, fake, http, apns, clock, journal, dispatcher, faults)
        finally:
            await apns.close()
            await http.close()
            await store.close()
