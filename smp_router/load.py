"""Queues and notifications in quantity, without a client that would have to make them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.connection import Outgoing
from protocol.crypto import Ed25519PrivateKey
from protocol.encoding import NO_CORR, EntityId
from protocol.push_messages import NmsgMeta
from protocol.smp_messages import QueueMode
from smp_router.broker import Broker
from smp_router.client import Client, RouterMessage
from smp_router.queues import ID_SIZE, Notifier, Queue, new_id

SECRET_SIZE = 32
EMIT_CHUNK = 400
"NMSGs handed over at once: five blocks, so that several subscribers take turns."


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadQueue:
    """A queue made on the spot, with all private parts that its owners would have."""

    recipient_id: EntityId = field(repr=False)
    recipient_key: Ed25519PrivateKey = field(repr=False)
    secret: bytes = field(repr=False)
    "Opens the bodies of MSG."
    sender_id: EntityId = field(repr=False)
    "The queue is not secured: SEND comes without authorisation."
    notifier_id: EntityId = field(repr=False)
    notifier_key: Ed25519PrivateKey = field(repr=False)
    rcv_ntf_dh_secret: bytes = field(repr=False)
    "Opens the meta of NMSG."
    notifier: Notifier = field(repr=False)
    repeated: Outgoing[RouterMessage] = field(repr=False)
    "The NMSG that `emit` sends again and again."


class Load:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def create_queues(self, count: int) -> list[LoadQueue]:
        """Queues with notifiers. They share one recipient key, since making keys takes the time."""
        recipient_key = _new_key()
        return [self._create_queue(recipient_key) for _ in range(count)]

    def _create_queue(self, recipient_key: Ed25519PrivateKey) -> LoadQueue:
        notifier_key = _new_key()
        notifier = Notifier(new_id(), notifier_key.public, secrets.token_bytes(SECRET_SIZE))
        queue = Queue(
            recipient_id=new_id(),
            recipient_keys=(recipient_key.public,),
            secret=secrets.token_bytes(SECRET_SIZE),
            sender_id=new_id(),
            mode=QueueMode.MESSAGING,
            notifier=notifier,
        )
        self._broker.state.add_queue(queue)
        return LoadQueue(
            recipient_id=queue.recipient_id,
            recipient_key=recipient_key,
            secret=queue.secret,
            sender_id=queue.sender_id,
            notifier_id=notifier.notifier_id,
            notifier_key=notifier_key,
            rcv_ntf_dh_secret=notifier.secret,
            notifier=notifier,
            repeated=Outgoing(NO_CORR, notifier.notifier_id, notifier.seal(self._meta())),
        )

    def _meta(self) -> NmsgMeta:
        return NmsgMeta(secrets.token_bytes(ID_SIZE), self._broker.timestamp())

    async def emit(
        self, queues: Sequence[LoadQueue], count: int, rate: float | None = None, *, fresh: bool = False
    ) -> None:
        """Send `count` NMSGs over the queues in turn, `rate` a second (None: as fast as they are taken).

        A queue's NMSG is the same every time unless `fresh` asks for new ones. NMSGs of queues without a
        subscriber are stored, as any other.
        """
        if not queues or count <= 0:
            return
        clock = asyncio.get_running_loop().time
        start, sent = clock(), 0
        while sent < count:
            due = count if rate is None else min(count, int((clock() - start) * rate) + 1)
            if sent >= due:
                assert rate is not None
                await asyncio.sleep(max((sent + 1) / rate - (clock() - start), 0.001))
                continue
            chunk = min(due - sent, EMIT_CHUNK)
            await self._emit_chunk([queues[(sent + i) % len(queues)] for i in range(chunk)], fresh)
            sent += chunk

    async def _emit_chunk(self, queues: Sequence[LoadQueue], fresh: bool) -> None:
        batches: dict[Client, list[Outgoing[RouterMessage]]] = {}
        subscriber = self._broker.notifiers.subscriber
        for queue in queues:
            outgoing = queue.repeated
            if fresh:
                outgoing = outgoing._replace(message=queue.notifier.seal(self._meta()))
            client = subscriber(queue.notifier_id)
            if client is None:
                self._store(queue.notifier, outgoing)
            else:
                batches.setdefault(client, []).append(outgoing)
        for client, batch in batches.items():
            client.push(batch)
        for client in batches:
            await client.room()
        await asyncio.sleep(0)

    def _store(self, notifier: Notifier, outgoing: Outgoing[RouterMessage]) -> None:
        nmsg = outgoing.message
        assert isinstance(nmsg, bytes)
        if self._broker.state.queues.by_notifier(notifier.notifier_id) is not None:
            self._broker.notify(notifier, nmsg)


def _new_key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey(secrets.token_bytes(SECRET_SIZE))
