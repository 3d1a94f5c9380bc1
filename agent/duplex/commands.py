"""What takes more than one call over the network: stored as a command, worked off until it is done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from agent.duplex import handshake
from agent.duplex.delivery import Transact
from agent.duplex.events import Failed
from agent.duplex.faults import A_LINK, A_VERSION
from agent.duplex.handshake import Incompatible
from agent.duplex.outgoing import Prohibited, queue_message
from agent.duplex.queue_maker import Ask, QueueMaker
from agent.duplex.records import ConnectionKind, QueueStatus, SendQueue
from agent.duplex.replies import HostFailure, RouterRefused, TemporaryFailure
from agent.duplex.store import Tx
from agent.duplex.tables import (
    Command,
    NoConnection,
    command_delayed,
    connection,
    drop_command,
    receive_queues,
    set_receive_queue,
    set_send_queue,
)
from agent.duplex.workers import Wait
from protocol.agent.connection_requests import InvitationRequest, parse_request
from protocol.agent.messages import Hello
from protocol.agent.retry import SECOND
from protocol.encoding import Reader, Writer
from protocol.errors import DecodeError
from protocol.smp_messages import Key, QueueMode, Skey
from smp_client.requests import Request

Handler = Callable[[Command], Awaitable[None]]


def join_arguments(link: str, info: bytes, pq: bool) -> bytes:
    w = Writer()
    w.push_bool(pq)
    w.push_large(link.encode())
    w.push_bytes(info)
    return w.value()


class Commands:
    """One command at a time; `ask` and `transact` raise what went wrong."""

    def __init__(self, transact: Transact, ask: Ask, maker: QueueMaker) -> None:
        self._transact = transact
        self._ask = ask
        self._maker = maker
        self._handlers: dict[str, Handler] = {
            "join": self._join,
            "allow": self._allow,
            "secure": self._secure,
        }

    async def run(self, command: Command, wait: Wait) -> None:
        """Network failures are waited for as long as they last; anything else ends the command."""
        error: str | None = None
        try:
            await self._handlers[command.kind](command)
        except (TemporaryFailure, HostFailure):
            await self._transact(lambda tx: command_delayed(tx, command))
            await wait.sleep(command.retry.delay / SECOND)
            return
        except Incompatible:
            error = A_VERSION
        except DecodeError:
            error = A_LINK
        except (RouterRefused, Prohibited) as refused:
            error = str(refused)
        except NoConnection:
            pass
        await self._transact(lambda tx: _finish(tx, command, error))

    # Handshakes

    async def _join(self, command: Command) -> None:
        r = Reader(command.arguments)
        pq, request, info = r.pull_bool(), parse_request(r.pull_large().decode()), r.pull_tail()
        if not isinstance(request, InvitationRequest):
            raise DecodeError
        connection_id = command.connection_id
        sending = await self._transact(lambda tx: handshake.start_join(tx, connection_id, request, pq=pq))
        await self._secure_sending(sending)
        if await self._transact(lambda tx: connection(tx.db, connection_id).kind) is ConnectionKind.SND:
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

    async def _allow(self, command: Command) -> None:
        connection_id = command.connection_id
        queues = await self._transact(lambda tx: handshake.start_answer(tx, connection_id))
        sending, receiving = queues
        await self._secure_receiving(receiving)
        await self._secure_sending(sending)
        await self._transact(lambda tx: handshake.answer(tx, connection_id, command.arguments))

    async def _secure(self, command: Command) -> None:
        """The creator has answered with a key: secure our queue for him, then say so."""

        def hello(tx: Tx) -> None:
            conn = connection(tx.db, command.connection_id)
            drop_command(tx, command.command_id)
            queue_message(tx, conn, Hello())

        queues = await self._transact(lambda tx: receive_queues(tx.db, command.connection_id))
        await self._secure_receiving(queues[0])
        await self._transact(hello)

    async def _secure_receiving(self, queue: Any) -> None:
        if queue.sender_key is None or queue.status is not QueueStatus.CONFIRMED:
            return
        await self._ask(queue.server, Request(queue.recipient_id, Key(queue.sender_key), queue.recipient_key))
        await self._transact(lambda tx: set_receive_queue(tx, queue.queue_id, status=QueueStatus.SECURED))


def _finish(tx: Tx, command: Command, error: str | None) -> None:
    drop_command(tx, command.command_id)
    if error is not None:
        tx.events.append(Failed(command.connection_id, error))
