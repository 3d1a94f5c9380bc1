"""What can be made to go wrong, on command."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from protocol.encoding import EntityId
from protocol.errors import ErrorType, ProtocolError
from protocol.smp_codec import SMP_COMMANDS
from smp_router.broker import Broker
from transport.certificates import Credentials


@dataclass(slots=True)
class _Strike:
    error: ErrorType
    left: int | None


class Faults:
    """Each call takes effect at once, in the middle of whatever goes on; sessions ask what they suffer."""

    def __init__(
        self,
        broker: Broker,
        drop_connections: Callable[[], int],
        present_certificate: Callable[[Credentials | None], None],
    ) -> None:
        self._broker = broker
        self.drop_connections = drop_connections
        "Cuts all; returns how many."
        self.present_certificate = present_certificate
        "Shows another to new connections; None goes back to the router's own."
        self.refusing = False
        self.losing_answers = False
        self._delay = 0.0
        self._calm = asyncio.Event()
        self._calm.set()
        self._strikes: dict[type, _Strike] = {}

    # What sessions ask

    @property
    def silent(self) -> bool:
        return not self._calm.is_set()

    async def hold(self) -> None:
        """Called before anything is sent."""
        if self.silent:
            await self._calm.wait()
        if self._delay:
            await asyncio.sleep(self._delay)

    def strike(self, command: type) -> None:
        """Raises the error that was ordered for this command."""
        strike = self._strikes.get(command)
        if strike is None:
            return
        if strike.left is not None:
            strike.left -= 1
            if strike.left <= 0:
                del self._strikes[command]
        raise ProtocolError(strike.error)

    # What is ordered

    def refuse(self, on: bool = True) -> None:
        """Close new connections before TLS starts. Existing ones stay."""
        self.refusing = on

    def black_hole(self, on: bool = True) -> None:
        """Keep connections open, read from them, answer nothing. What was read is forgotten; events wait."""
        if on:
            self._calm.clear()
        else:
            self._calm.set()

    def lose_answers(self, on: bool = True) -> None:
        """Carry commands out and answer nothing. Events are sent."""
        self.losing_answers = on

    def delay(self, seconds: float) -> None:
        """Wait this long before anything is sent, also the first block of a connection; 0 ends it."""
        if seconds < 0:
            raise ValueError("a delay cannot be negative")
        self._delay = seconds

    def forget_services(self) -> None:
        """Lose all services, their ids, associations and subscriptions, without a word."""
        self._broker.state.forget_services()
        self._broker.recipients.forget_services()
        self._broker.notifiers.forget_services()

    def change_service_ids(self) -> None:
        """Services get other ids at their next connection, and keep their queues."""
        self._broker.state.change_service_ids()

    def lose_associations(self, part: float | int) -> list[EntityId]:
        """Forget that some queues belong to services: a share (float) or a number (int) of them.

        They are not subscribed any more either. Returns the ids of the queues.
        """
        services = self._broker.state.services
        count = part if isinstance(part, int) else round(part * services.associated)
        lost = list(services.choose_associated(max(count, 0)))
        for queue_id in lost:
            self._broker.unsubscribe(queue_id)
        return lost

    def delete_queues(self, ids: Iterable[EntityId]) -> int:
        """Lose queues, named by any of their ids, without a word to subscribers. Returns how many."""
        deleted = 0
        for entity_id in list(ids):
            queue = self._broker.state.queues.by_any(entity_id)
            if queue is None:
                continue
            self._broker.unsubscribe(queue.recipient_id)
            if queue.notifier is not None:
                self._broker.unsubscribe(queue.notifier.notifier_id)
            self._broker.delete_queue(queue)
            deleted += 1
        return deleted

    def send_end(self, ids: Iterable[EntityId]) -> None:
        """END the subscriptions to these recipient or notifier ids."""
        for entity_id in ids:
            self._broker.end(entity_id)

    def send_ends(self) -> None:
        """ENDS all subscriptions of services."""
        for service in self._broker.state.services:
            self._broker.end_service(self._broker.recipients, service)
            self._broker.end_service(self._broker.notifiers, service)

    def send_deld(self, ids: Iterable[EntityId]) -> None:
        """Tell subscribers of these recipient or notifier ids that they are deleted; they are not."""
        for entity_id in ids:
            self._broker.deleted(entity_id)

    def answer_errors(self, command: str, error: ErrorType | None, count: int | None = None) -> None:
        """Answer `error` to the next `count` (None: all) commands with this tag; None ends it."""
        spec = SMP_COMMANDS.specs.get(command.encode())
        if spec is None:
            raise ValueError(f"{command} is not a command")
        if error is None:
            self._strikes.pop(spec.kind, None)
        else:
            self._strikes[spec.kind] = _Strike(error, count)
