"""One client's connection: blocks in, commands carried out in order, answers and events out."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Sequence
from typing import Any

from protocol.connection import Block, Connection, Failed, HandshakeDone, Outgoing, Received, Rejected
from protocol.crypto import AuthPublicKey, X25519PrivateKey
from protocol.encoding import EntityId
from protocol.errors import AUTH, INTERNAL, SERVICE, TE_BAD_SERVICE, HandshakeError, ProtocolError, TooLarge
from protocol.smp_codec import SMP_COMMANDS
from protocol.smp_handshake import ServiceRole, SmpServerHandshake
from protocol.smp_messages import Err, Nsub, SmpCommand, SmpMessage
from protocol.versions import SMP_ALPN, SMP_BLOCK_SIZE, SMP_LEGACY
from smp_router.authentication import is_authorised
from smp_router.broker import Broker
from smp_router.client import ROOM, ROUTER_MESSAGES, Client, RouterMessage, in_blocks
from smp_router.client_limits import ClientLimits
from smp_router.commands import Response, keys_to_try, respond
from smp_router.faults import Faults
from smp_router.queues import new_id
from smp_router.services import Service
from transport.budget import CpuBudget, Slice
from transport.cancellation import TaskGroup, raise_if_cancelled
from transport.certificates import Credentials
from transport.errors import ConnectionClosed
from transport.limits import source_of
from transport.streams import TlsStream

logger = logging.getLogger(__name__)

Item = Received[SmpCommand] | Rejected

FEW_OFFERS = 16
"Queues with something stored: a client with more waits for its turn to get it."
DENIALS = (AUTH, SERVICE)
"What an authorisation that failed is answered."


def _refusal(failure: Exception) -> Err:
    """A defect of ours is not the client's fault: it is told so, and its other commands go on."""
    if isinstance(failure, ProtocolError):
        return Err(failure.error)
    logger.error("a command failed unexpectedly: %s", type(failure).__name__)
    return Err(INTERNAL)


class Session:
    def __init__(
        self,
        stream: TlsStream,
        broker: Broker,
        faults: Faults,
        credentials: Credentials,
        limits: ClientLimits,
        budget: CpuBudget,
    ) -> None:
        self._stream = stream
        self._broker = broker
        self._faults = faults
        self._config = broker.config
        self._records = broker.state.records
        self._allowance = limits.of(stream.peer[0])
        self._budget = budget
        self._source = source_of(stream.peer[0])
        handshake = SmpServerHandshake(
            stream.session_id,
            credentials.chain,
            credentials.signing_key,
            X25519PrivateKey(secrets.token_bytes(32)),
            client_chain=stream.peer_chain,
            service_id=self._service_id,
            # A client that knows no ALPN knows only the oldest version.
            versions=self._config.versions if stream.alpn == SMP_ALPN else SMP_LEGACY,
        )
        self._connection: Connection[SmpCommand, RouterMessage] = Connection(
            handshake, SMP_COMMANDS, ROUTER_MESSAGES, checks_credentials=True, answers_bad_batches=True
        )
        self.client: Client | None = None
        self._service: Service | None = None
        self._tasks: TaskGroup | None = None
        self._waiting: set[asyncio.Task[None]] = set()
        "For other routers; as many as a client may have under way."

    @property
    def peer(self) -> tuple[str, int]:
        return self._stream.peer

    def _service_id(self, fingerprint: bytes, role: ServiceRole) -> EntityId:
        service = self._broker.service_came(
            Service(new_id(), fingerprint, role, creator=self._allowance.creator)
        )
        if service is None:
            raise HandshakeError(TE_BAD_SERVICE)
        self._service = service
        return service.service_id

    async def run(self) -> None:
        """Serve the client until it goes, breaks the protocol or is too slow."""
        try:
            await self._run()
        finally:
            if self._service is not None:
                self._broker.service_left(self._service)

    async def _run(self) -> None:
        await self._faults.hold()
        try:
            async with asyncio.timeout(self._config.handshake_timeout):
                early = await self._shake_hands()
        except TimeoutError:
            self._stream.abort()
            return
        if early is None or self.client is None:
            return
        try:
            async with TaskGroup() as tasks:
                self._tasks = tasks
                sender = tasks.create_task(self._send(self.client), name="router sender")
                await self._receive(self.client, early)
                sender.cancel()
                for waiting in list(self._waiting):
                    waiting.cancel()
        finally:
            self._broker.release(self.client)

    def drop(self) -> None:
        """Cut the connection; its subscriptions are gone when this returns."""
        if self.client is not None:
            self._broker.release(self.client)
        self._stream.abort()

    async def _shake_hands(self) -> list[Block[SmpCommand] | Failed] | None:
        """Blocks that came in with the end of the handshake; None if it failed."""
        while True:
            self._stream.write(self._connection.data_to_send())
            data = await self._stream.receive()
            if not data:
                return None
            made = self._records.made
            with await self._budget.take(self._source):
                events = self._connection.receive_data(data)
            if not events:
                continue
            if self._records.made != made:  # a service is told its id only when it is kept
                await self._records.durable(self._records.made)
            self._stream.write(self._connection.data_to_send())
            first, *rest = events
            if not isinstance(first, HandshakeDone):
                return None
            self.client = Client(first.params, self._config.max_unsent, self._records, self._allowance)
            return [event for event in rest if not isinstance(event, HandshakeDone)]

    async def _receive(self, client: Client, early: list[Block[SmpCommand] | Failed]) -> None:
        events: list[HandshakeDone | Block[SmpCommand] | Failed] = [*early]
        while await self._process_all(client, events):
            try:
                async with asyncio.timeout(self._config.idle_timeout):
                    data = await self._stream.receive()
            except TimeoutError:
                if self._broker.is_subscribed(client):
                    continue
                return
            except ConnectionClosed:
                return
            if not data:
                return
            for start in range(0, len(data), SMP_BLOCK_SIZE):
                if not await self._process_all(client, events):
                    return
                with await self._budget.take(self._source):
                    events = self._connection.receive_data(data[start : start + SMP_BLOCK_SIZE])

    async def _process_all(
        self, client: Client, events: list[HandshakeDone | Block[SmpCommand] | Failed]
    ) -> bool:
        """Carry out what was received; False if the connection has to end."""
        while events:
            event = events.pop(0)
            if not isinstance(event, Block):
                return False
            await self._allowance.wait_for(len(event.items))
            if not await self._process(client, event):
                return False
        return True

    async def _process(self, client: Client, block: Block[SmpCommand]) -> bool:
        """False if the client's address has failed too often, and has its answers."""
        if self._faults.silent:
            return True
        with client.collecting():
            goes_on = await self._respond_all(client, block.items)
        if not goes_on:
            self._broker.counts["clients_unauthorised"] += 1
            await client.sent.wait()
        return goes_on

    async def _respond_all(self, client: Client, items: Sequence[Item]) -> bool:
        made = self._records.made
        start, goes_on = 0, True
        while goes_on and start < len(items):
            await self._try_keys(client, items[start])
            with await self._budget.take(self._source) as work:
                start, goes_on = self._process_some(client, items, start, made, work)
            # Answers that are not taken stop the work on a block, too: small commands may have large ones.
            if not client.has_room:
                await client.room()
        return goes_on

    def _process_some(
        self, client: Client, items: Sequence[Item], start: int, made: int, work: Slice
    ) -> tuple[int, bool]:
        """Commands from `start` on, one at least; returns the next one, and whether there may be more."""
        failed = succeeded = 0
        for end, item in enumerate(items[start:], start):
            if end > start and (work.is_over or not client.has_room or self._keys_to_try(item)):
                break
            response = self._respond(client, item)
            client.proven_key = None
            if isinstance(response, Coroutine):
                self._answer_later(client, item, response)
                continue
            self._push_answer(client, Outgoing(item.corr_id, item.entity_id, response), made)
            if isinstance(item, Received) and item.raw.auth:
                denied = isinstance(response, Err) and response.error in DENIALS
                succeeded += not denied
                failed += denied and not self._is_anothers_fault(client, item)
        else:
            end = len(items)
        return end, self._budget.authorised(self._source, succeeded=succeeded, failed=failed)

    def _is_anothers_fault(self, client: Client, request: Received[SmpCommand]) -> bool:
        """Whether a refusal says nothing about the client: a notification server subscribes the queues that
        its own clients name, and strangers can name queues that do not exist. One that is subscribed to
        others must not lose its connection by that. What it costs is charged to it as always."""
        return isinstance(request.message, Nsub) and self._broker.notifiers.has(client)

    def _keys_to_try(self, item: Item) -> tuple[AuthPublicKey, ...]:
        return keys_to_try(self._broker, item) if isinstance(item, Received) else ()

    async def _try_keys(self, client: Client, item: Item) -> None:
        """Find which key of a queue that has several authorised the command, in slices."""
        while keys := self._keys_to_try(item):
            assert isinstance(item, Received)
            left = list(keys)
            while left and client.proven_key is None:
                with await self._budget.take(self._source) as work:
                    while left and client.proven_key is None and not work.is_over:
                        key = left.pop()
                        client.proven_key = key if is_authorised(client, key, item) else None
            if keys == self._keys_to_try(item):  # not replaced meanwhile
                return
            client.proven_key = None

    def _push_answer(self, client: Client, answer: Outgoing[RouterMessage], made: int) -> None:
        """It waits for the changes that were made since there were `made`."""
        if self._records.made != made:
            client.depend()
        if not self._faults.losing_answers:
            client.push((answer,))

    def _respond(self, client: Client, item: Item) -> Response:
        if isinstance(item, Rejected):
            return Err(item.error)
        try:
            self._faults.strike(type(item.message))
            return respond(self._broker, client, item)
        except Exception as failure:
            return _refusal(failure)

    def _answer_later(
        self,
        client: Client,
        item: Item,
        response: Coroutine[Any, Any, SmpMessage],
    ) -> None:
        async def wait() -> None:
            try:
                answer = await response
            except Exception as failure:
                raise_if_cancelled()
                answer = _refusal(failure)
            made = self._records.made  # another router did it: nothing here to wait for
            self._push_answer(client, Outgoing(item.corr_id, item.entity_id, answer), made)

        assert self._tasks is not None
        task = self._tasks.create_task(wait(), name="router forwarding")
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        task.add_done_callback(lambda _: response.close())  # it may have been cancelled before it began

    async def _send(self, client: Client) -> None:
        """Send what waits. A client that does not take it in time is cut off, which also ends `_receive`."""
        try:
            while True:
                await client.wake.wait()
                client.wake.clear()
                while client.outbox or client.offers:
                    await self._faults.hold()
                    await self._send_some(client)
                client.sent.set()
        except TimeoutError:
            self._broker.counts["clients_too_slow"] += 1  # no line: a log of connections must not be kept
        except (ConnectionClosed, TooLarge):  # the latter with ids that leave no room for an answer
            logger.debug("a client is gone")
        self.drop()

    async def _send_some(self, client: Client) -> None:
        if client.overrun:
            raise TimeoutError
        await self._take_offers(client)
        batch, depends_on = client.take(), client.depends_on
        try:
            # Nothing leaves before what led to it is safe.
            async with asyncio.timeout(self._config.send_timeout):
                await self._records.durable(depends_on)
            with self._budget.measure(self._source):
                for group in in_blocks(batch):
                    self._stream.write(self._connection.send(group))
            async with asyncio.timeout(self._config.send_timeout):
                await self._stream.drain()
        except BaseException:  # rather part of a batch twice than the rest of it not at all
            client.put_back(batch)
            self._broker.release(client)
            raise
        await asyncio.sleep(0)

    async def _take_offers(self, client: Client) -> None:
        """Fill the outbox from what is stored, as far as there is room. A service offers all of its queues at
        once, and most have nothing: it must not hold up others."""
        if len(client.offers) <= FEW_OFFERS:
            while self._take_offer(client):
                pass
            return
        with await self._budget.take(self._source) as work:
            while self._take_offer(client) and not work.is_over:
                pass

    def _take_offer(self, client: Client) -> bool:
        """False if there is none, or no room for it."""
        if not client.offers or client.unsent >= ROOM:
            return False
        entity_id, _ = client.offers.popitem(last=False)
        client.push(self._broker.take_offer(client, entity_id))
        return True
