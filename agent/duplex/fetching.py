"""Queues of a device that sleeps: read with GET when a push tells of news, until there is nothing more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from agent.duplex.events import Event, Failed, Fetched
from agent.duplex.incoming import receive
from agent.duplex.queue_maker import Ask
from agent.duplex.records import ReceiveQueue
from agent.duplex.replies import RouterFailure, RouterRefused
from agent.duplex.store import DuplexStore, Transact
from agent.duplex.tables import receive_queue
from agent.duplex.workers import Wait, WorkerTasks
from protocol.smp_messages import Ack, Get, Msg
from transport.cancellation import TaskGroup


class Fetches:
    """A message that is for the application waits for its ACK; then the queue is read on."""

    def __init__(
        self,
        tasks: TaskGroup,
        store: DuplexStore,
        transact: Transact,
        ask: Ask,
        publish: Callable[[Event], None],
        room: Callable[[], Awaitable[object]],
    ) -> None:
        self._store = store
        self._transact = transact
        self._ask = ask
        self._publish = publish
        self._room = room
        self._acks: dict[int, bytes] = {}
        "The message of a queue that is dealt with, and its router is not told yet."
        self._unread: set[int] = set()
        self._workers: WorkerTasks[int] = WorkerTasks("reading of queue", tasks, self._step)
        self.idle = self._workers.idle

    def start(self, queue_ids: Iterable[int]) -> None:
        for queue_id in queue_ids:
            self._unread.add(queue_id)
            self._workers.wake(queue_id, hurry=True)

    def acknowledge(self, queue: ReceiveQueue, message_id: bytes) -> None:
        self._acks[queue.queue_id] = message_id
        self.start([queue.queue_id])

    def end(self, queue_ids: Iterable[int]) -> None:
        """Their connection is being deleted: nothing of them is waited for."""
        self.start(self._unread.intersection(queue_ids))

    async def _step(self, queue_id: int, wait: Wait) -> bool:
        queue = await self._store.read(lambda db: receive_queue(db, queue_id))
        if queue is None or queue.deleting:
            return self._read(queue_id)
        try:
            message = await self._next_message(queue)
        except RouterRefused as refused:
            self._publish(Failed(queue.connection_id, str(refused)))
            return self._read(queue_id)
        except RouterFailure:
            await wait.after_failure()  # GET repeats what was not acknowledged
            return True
        wait.succeeded()
        if message is None:
            return self._read(queue_id)
        await self._room()
        if await self._transact(lambda tx: receive(tx, queue.server, queue.recipient_id, message)) is None:
            return False  # the application acknowledges it
        self._acks[queue_id] = message.message_id
        return True

    async def _next_message(self, queue: ReceiveQueue) -> Msg | None:
        dealt_with = self._acks.pop(queue.queue_id, None)
        if dealt_with is not None:
            with suppress(RouterRefused):  # the session of its GET is gone: it comes again, and is known
                await self._ask(queue.server, queue.request(Ack(dealt_with)))
        answer = await self._ask(queue.server, queue.request(Get()))
        return answer if isinstance(answer, Msg) else None

    def _read(self, queue_id: int) -> bool:
        self._unread.discard(queue_id)
        self._acks.pop(queue_id, None)
        if not self._unread:
            self._publish(Fetched())
        return False
