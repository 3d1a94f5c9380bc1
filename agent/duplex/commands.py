"""What takes more than one call over the network: stored as a command, worked off until it is done."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from weakref import WeakValueDictionary

from agent.duplex import deletion, handshake, links, rotation
from agent.duplex.creation import CANNOT_CREATE, CREATE, give_up_creation, new_queue, queue_created
from agent.duplex.defects import survive
from agent.duplex.events import Failed
from agent.duplex.outgoing import POSTPONED, queue_message, send_postponed
from agent.duplex.queue_maker import Ask, QueueMaker
from agent.duplex.records import Connection, ConnectionKind, QueueStatus, RcvSwitch, ReceiveQueue, SendQueue
from agent.duplex.replies import HostFailure, RouterRefused, TemporaryFailure
from agent.duplex.secrets import Secrets
from agent.duplex.store import Transact, Tx
from agent.duplex.tables import (
    DELETE_QUEUE,
    StoredCommand,
    add_command,
    command_delayed,
    connection,
    drop_command,
    new_connection,
    receive_queue,
    receive_queues,
    send_queues,
    set_receive_queue,
    set_secured,
    set_send_queue,
)
from agent.duplex.workers import Wait
from agent.errors import A_LINK, A_VERSION, AgentError, LinkRefused, NoConnection, Prohibited
from agent.errors import INTERNAL as INTERNAL_ERROR
from protocol.agent.connection_requests import (
    ConnectionRequest,
    ContactRequest,
    InvitationRequest,
    parse_request,
    request_text,
)
from protocol.agent.envelopes import ClientMessage, InvitationEnvelope, encode_agent_envelope, seal_body
from protocol.agent.errors import LinkError
from protocol.agent.messages import Hello
from protocol.agent.retry import SECOND
from protocol.agent.short_links import ShortLink, parse_short_link
from protocol.agent.versions import AGENT_PQ, AGENT_VERSIONS
from protocol.crypto import X25519PrivateKey
from protocol.encoding import Reader, Writer
from protocol.errors import AUTH, INTERNAL, DecodeError, TooLarge
from protocol.link_crypto import contact_link_keys
from protocol.queue_uri import SMP_CLIENT_VERSIONS
from protocol.smp_messages import Del, Info, Key, Lget, Lkey, Lnk, Que, QueueMode, Send, Skey
from smp_client.requests import Request
from transport.cancellation import raise_if_cancelled

MAX_LINK = 2**16 - 1
DRAINING_TIME = 2 * 86400
"Seconds for which a queue that was replaced may keep messages that nobody reads."


def waiting_messages(info: Info) -> int:
    """How many messages a queue holds; 0 if the router does not say."""
    try:
        size = json.loads(info.json)["qiSize"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return 0
    return size if isinstance(size, int) else 0


def start_joining(tx: Tx, link: str, info: bytes, *, pq: bool, invitation_id: int = 0) -> int:
    """A new connection. What is no text at all is no link either: joining it fails as any wrong link does."""
    w, encoded = Writer(), link.encode(errors="replace")
    if len(encoded) > MAX_LINK:
        raise Prohibited("the link is too long")
    w.push_int64(invitation_id)
    w.push_bool(pq)
    w.push_large(encoded)
    w.push_bytes(info)
    connection_id = new_connection(tx, ConnectionKind.NEW, pq_support=pq)
    add_command(tx, connection_id, "join", w.value())
    return connection_id


class CommandRunner:
    """One command at a time; `ask` and `transact` raise what went wrong."""

    def __init__(self, transact: Transact, ask: Ask, maker: QueueMaker, secrets: Secrets) -> None:
        self._transact = transact
        self._ask = ask
        self._maker = maker
        self._secrets = secrets
        self._creations = WeakValueDictionary[int, asyncio.Lock]()
        self._handlers: dict[str, Callable[[StoredCommand], Awaitable[None]]] = {
            "join": self._join,
            CREATE: lambda command: self.create(command.connection_id),
            "allow": self._allow,
            "secure": self._secure,
            rotation.SWITCH: self._switch,
            rotation.SECURE_NEW: self._secure_new,
            DELETE_QUEUE: self._delete_queue,
            POSTPONED: self._send_postponed,
            deletion.DELETE: self._delete,
        }

    async def run(self, command: StoredCommand, wait: Wait) -> None:
        """Network failures are waited for as long as they last; anything else ends the command."""
        error: str | None = None
        try:
            await self._handlers[command.kind](command)
        except (TemporaryFailure, HostFailure):
            await self._transact(lambda tx: command_delayed(tx, command))
            await wait.sleep(command.retry.seconds)
            return
        except (DecodeError, LinkError):
            error = A_LINK
        except NoConnection:
            pass
        except AgentError as refused:
            error = str(refused)
        except Exception as defect:
            raise_if_cancelled()
            survive(defect, f"the command {command.kind}")
            error = INTERNAL_ERROR
        await self._transact(lambda tx: _finish(tx, command, error))

    async def create(self, connection_id: int) -> None:
        """The queue of a prepared link; again, if the answer was lost."""
        async with self._creations.setdefault(connection_id, asyncio.Lock()):
            found = await self._transact(lambda tx: new_queue(tx.db, connection_id))
            if found is None:
                return
            try:
                queue, link_id = await self._maker.make_for(*found)
                await self._transact(lambda tx: queue_created(tx, connection_id, queue, link_id))
            except RouterRefused as refused:
                await self._transact(lambda tx: give_up_creation(tx, connection_id))
                raise LinkRefused(f"{CANNOT_CREATE}: {refused}") from None

    # Handshakes

    async def _join(self, command: StoredCommand) -> None:
        r = Reader(command.arguments)
        r.pull_int64()
        pq, text, info = r.pull_bool(), r.pull_large().decode(), r.pull_tail()
        connection_id = command.connection_id
        if await self._kind(connection_id) not in (ConnectionKind.SND, ConnectionKind.DUPLEX):
            request, key = await self._request(text)
            if not isinstance(request, InvitationRequest):
                await self._join_address(connection_id, request, info, pq=pq)
                return
            await self._transact(
                lambda tx: handshake.start_join(tx, connection_id, request, pq=pq, secured_with=key)
            )
        await self._answer_invitation(connection_id, info)

    async def _kind(self, connection_id: int) -> ConnectionKind:
        conn: Connection = await self._transact(lambda tx: connection(tx.db, connection_id))
        return conn.kind

    async def _request(self, text: str) -> tuple[ConnectionRequest, X25519PrivateKey | None]:
        """What a link offers; from a short one, and with the key that has secured an invitation's queue."""
        try:
            link = self._short_link(text)
        except DecodeError:
            return parse_request(text), None
        request, _, key = await self._behind(link)
        return request, key

    async def link_data(self, text: str) -> bytes:
        """What the owner of a short link shows; DecodeError or LinkError if it is none."""
        _, user_data, _ = await self._behind(self._short_link(text))
        return user_data

    def _short_link(self, text: str) -> ShortLink:
        return links.with_whole_server(parse_short_link(text), self._maker.servers)

    async def _behind(self, link: ShortLink) -> tuple[ConnectionRequest, bytes, X25519PrivateKey | None]:
        """An invitation's queue is secured for us by reading its data."""
        key = None
        if link.link_id is None:
            link_id = contact_link_keys(link.link_key).link_id
            answer = await self._ask(link.server, Request(link_id, Lget()))
        else:
            key = await self._transact(lambda tx: links.securing_key(tx, link))
            answer = await self._ask(link.server, Request(link.link_id, Lkey(key.public), key))
        if not isinstance(answer, Lnk):
            raise RouterRefused(INTERNAL)
        return *links.behind(link, answer), key

    async def _join_address(
        self, connection_id: int, request: ContactRequest, info: bytes, *, pq: bool
    ) -> None:
        """Ask the owner of an address to join an invitation of ours."""
        address = request.queues[0]
        agent_version = AGENT_VERSIONS.common(request.agent_versions)
        client_version = SMP_CLIENT_VERSIONS.common(address.versions)
        if agent_version is None or client_version is None:
            raise Prohibited(A_VERSION)
        if await self._kind(connection_id) is ConnectionKind.NEW:
            queue = await self._maker.make(self._maker.choose([address.server]), QueueMode.MESSAGING)
            with_pq = pq and agent_version >= AGENT_PQ
            await self._transact(
                lambda tx: handshake.contact_queue_made(tx, connection_id, queue, pq=with_pq)
            )
        own = await self._transact(lambda tx: handshake.own_invitation(tx.db, connection_id))
        if own is None:
            return
        envelope = InvitationEnvelope(agent_version, request_text(own), info)
        key, nonce = self._secrets.x25519(), self._secrets.nonce()
        content, secret = ClientMessage(encode_agent_envelope(envelope)), key.exchange(address.dh_key)
        try:
            body = seal_body(client_version, key.public, secret, nonce, content)
        except TooLarge:
            raise Prohibited("the information about us is too long") from None
        await self._ask(address.server, Request(address.sender_id, Send(True, body)))

    async def _answer_invitation(self, connection_id: int, info: bytes) -> None:
        """From what is stored: the link has done its work, and may be gone."""
        sending: SendQueue = (await self._transact(lambda tx: send_queues(tx.db, connection_id)))[0]
        await self._secure_sending(sending)
        if await self._kind(connection_id) is ConnectionKind.SND:
            server = self._maker.choose([sending.server])
            reply = await self._maker.make(server, QueueMode.MESSAGING, client_version=sending.client_version)
            await self._transact(lambda tx: handshake.reply_queue_made(tx, connection_id, reply))
        await self._transact(lambda tx: handshake.confirm_join(tx, connection_id, info))

    async def _secure_sending(self, queue: SendQueue) -> None:
        """SKEY, if that is for the sender to do; again with the same key it does no harm."""
        if not queue.sender_secures or queue.status is not QueueStatus.NEW:
            return
        await self._ask(queue.server, Request(queue.sender_id, Skey(queue.auth_key.public), queue.auth_key))
        await self._transact(lambda tx: set_send_queue(tx, queue.queue_id, status=QueueStatus.SECURED))

    async def _allow(self, command: StoredCommand) -> None:
        connection_id = command.connection_id
        sending, receiving = await self._transact(lambda tx: handshake.start_answer(tx, connection_id))
        await self._secure_receiving(receiving)
        await self._secure_sending(sending)
        await self._transact(lambda tx: handshake.answer(tx, connection_id, command.arguments))

    async def _secure(self, command: StoredCommand) -> None:
        """The creator has answered with a key: secure our queue for him, then say so."""

        def hello(tx: Tx) -> None:
            conn = connection(tx.db, command.connection_id)
            drop_command(tx, command.command_id)
            queue_message(tx, conn, Hello())

        queues = await self._transact(lambda tx: receive_queues(tx.db, command.connection_id))
        await self._secure_receiving(queues[0])
        await self._transact(hello)

    async def _secure_receiving(self, queue: ReceiveQueue) -> None:
        if queue.sender_key is None or queue.status is not QueueStatus.CONFIRMED:
            return
        await self._ask(queue.server, queue.request(Key(queue.sender_key)))
        await self._transact(lambda tx: set_secured(tx, queue))

    # Rotation

    async def _switch(self, command: StoredCommand) -> None:
        connection_id = command.connection_id
        queues = await self._transact(lambda tx: receive_queues(tx.db, connection_id))
        theirs = await self._transact(lambda tx: send_queues(tx.db, connection_id))
        old = rotation.switching(queues)
        if old is None or old.switch is not RcvSwitch.STARTED:
            return
        server = self._maker.choose([queue.server for queue in (*queues, *theirs)], [old.server])
        new = await self._maker.make(server, QueueMode.MESSAGING, replaces=old.queue_id)
        await self._transact(lambda tx: rotation.offer(tx, connection_id, old, new))

    async def _secure_new(self, command: StoredCommand) -> None:
        queue = await self._transact(lambda tx: receive_queue(tx.db, command.number))
        if queue is None or queue.deleting or queue.sender_key is None:
            return
        await self._ask(queue.server, queue.request(Key(queue.sender_key)))

        def secured(tx: Tx) -> None:
            drop_command(tx, command.command_id)
            rotation.secured(tx, queue)

        await self._transact(secured)

    async def _send_postponed(self, command: StoredCommand) -> None:
        if not await self._transact(lambda tx: send_postponed(tx, command)):
            raise TemporaryFailure("the ratchet is being synchronised")

    async def _delete_queue(self, command: StoredCommand) -> None:
        queue = await self._transact(lambda tx: receive_queue(tx.db, command.queue_id))
        if queue is None:
            return
        if not queue.deleting:
            if command.retry.elapsed < DRAINING_TIME * SECOND:
                await self._check_empty(queue)
            # If the answer gets lost, it is there no more: nobody is to ask for its messages.
            await self._transact(lambda tx: set_receive_queue(tx, queue.queue_id, deleting=True))
        try:
            await self._ask(queue.server, queue.request(Del()))
        except RouterRefused as refused:
            if refused.error != AUTH:  # the router still has it
                raise TemporaryFailure(str(refused)) from None
        await self._transact(lambda tx: rotation.queue_deleted(tx, queue))

    async def _check_empty(self, queue: ReceiveQueue) -> None:
        """What came before the peer knew of the new queue is nowhere else: it has to be read first."""
        try:
            answer = await self._ask(queue.server, queue.request(Que()))
        except RouterRefused:
            return
        if isinstance(answer, Info) and waiting_messages(answer):
            raise TemporaryFailure("messages are still to be read")

    # The end

    async def _delete(self, command: StoredCommand) -> None:
        connection_id, until = command.connection_id, command.number
        with suppress(LinkRefused):
            await self.create(connection_id)  # its answer was lost: so the queue can be deleted
        if not await self._transact(lambda tx: deletion.finish(tx, connection_id, until)):
            raise TemporaryFailure("messages are still to be sent, or queues to be deleted")


def _finish(tx: Tx, command: StoredCommand, error: str | None) -> None:
    drop_command(tx, command.command_id)
    if command.kind == "join":
        handshake.invitation_joined(tx, Reader(command.arguments).pull_int64(), success=error is None)
    if error is not None:
        tx.events.append(Failed(command.connection_id, error))
