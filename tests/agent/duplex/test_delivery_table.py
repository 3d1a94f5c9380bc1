"""What a router's answer to SEND means for each kind of message: the whole table."""

from __future__ import annotations

import pytest

from agent.duplex.delivery import MESSAGE_TIME, QUOTA_TIME, after_attempt
from agent.duplex.events import Event, Failed, MessageDelayed, MessageFailed
from agent.duplex.message_kinds import MessageKind
from agent.duplex.outgoing import Delivery, give_up_queue, next_delivery
from agent.duplex.replies import HostFailure, RouterFailure, RouterRefused, TemporaryFailure
from agent.duplex.store import Tx
from agent.duplex.tables import send_queues
from protocol.agent.retry import FAST, SLOW
from protocol.errors import AUTH, QUOTA, ErrorType
from tests.agent.duplex.simulation import NoWait, Party, connected_parties, finish

FULL, OTHER = RouterRefused(QUOTA), RouterRefused(ErrorType(b"LARGE_MSG"))
AWAY, STRANGER = TemporaryFailure("away"), HostFailure("somebody else")

CONFIRMATIONS = [MessageKind.CONFIRMATION, MessageKind.REPLY]
CONTENT = [MessageKind.RECEIPTS, MessageKind.CONTINUE, MessageKind.READY]
SWITCHING = [MessageKind.ADD, MessageKind.KEY, MessageKind.USE, MessageKind.TEST]

GIVEN_UP: dict[tuple[MessageKind, str], str] = {
    **{(kind, error): "CONN NOT_AVAILABLE" for kind in CONFIRMATIONS for error in ("AUTH", "QUOTA")},
    (MessageKind.HELLO, "AUTH"): "CONN NOT_AVAILABLE",
    (MessageKind.RATCHET_KEY, "AUTH"): "CONN NOT_AVAILABLE",
    **{(kind, "AUTH"): "SMP AUTH" for kind in (MessageKind.USER, *CONTENT)},
    **{(kind, "AUTH"): "A_QUEUE" for kind in SWITCHING},
    **{(kind, "LARGE_MSG"): "SMP LARGE_MSG" for kind in MessageKind},
}
"Everything else is tried again."
SILENT = {(kind, "QUOTA") for kind in (MessageKind.RATCHET_KEY, *SWITCHING)}


def waiting_message(kind: MessageKind) -> tuple[Party, Delivery]:
    """A message that waits to be sent, said to be of this kind."""
    party, _ = connected_parties()
    party.send(b"hello")
    party.db.execute("UPDATE sent_messages SET kind = ?", (kind,))
    return party, next_of(party)


def next_of(party: Party) -> Delivery:
    (queue,) = send_queues(party.db, party.connection_id)
    delivery = next_delivery(party.db, queue.queue_id)
    assert delivery is not None
    return delivery


def after(party: Party, delivery: Delivery, failure: RouterFailure, waited: int = 0) -> list[Event]:
    events: list[Event] = []

    async def transact(change):  # type: ignore[no-untyped-def]
        def told(tx: Tx) -> object:
            tx.now = delivery.queued_at + waited
            result = change(tx)
            events.extend(tx.events)
            return result

        return party.run(told)

    finish(after_attempt(transact, NoWait(), delivery, failure, delivery.queued_at + waited))
    return events


def is_queued(party: Party) -> bool:
    return party.db.execute("SELECT 1 FROM deliveries").fetchone() is not None


@pytest.mark.parametrize("failure", [RouterRefused(AUTH), FULL, OTHER], ids=str)
@pytest.mark.parametrize("kind", MessageKind)
def test_a_router_that_refuses(kind: MessageKind, failure: RouterRefused) -> None:
    party, delivery = waiting_message(kind)
    (given_up, local_id), word = (party.connection_id, delivery.local_id), str(failure.error)
    error = GIVEN_UP.get((kind, word))
    events = after(party, delivery, failure)
    assert is_queued(party) is (error is None)
    if error is None:
        assert events == ([] if (kind, word) in SILENT else [MessageDelayed(given_up, local_id, "SMP QUOTA")])
        assert next_of(party).slow == delivery.slow.next(SLOW)
        assert next_of(party).fast == delivery.fast
    elif kind is MessageKind.USER:
        assert events == [MessageFailed(given_up, local_id, error)]
    else:
        assert events == [Failed(given_up, error)]


@pytest.mark.parametrize("kind", MessageKind)
def test_a_router_that_is_not_there(kind: MessageKind) -> None:
    party, delivery = waiting_message(kind)
    assert after(party, delivery, AWAY) == []
    assert next_of(party).fast == delivery.fast.next(FAST)
    delayed = [MessageDelayed(party.connection_id, delivery.local_id, "somebody else")]
    assert after(party, next_of(party), STRANGER) == delayed
    assert next_of(party).fast == delivery.fast.next(FAST).next(FAST)
    assert next_of(party).slow == delivery.slow


@pytest.mark.parametrize(("failure", "limit"), [(FULL, QUOTA_TIME), (AWAY, MESSAGE_TIME)], ids=str)
def test_what_waited_too_long(failure: RouterFailure, limit: int) -> None:
    for kind in (MessageKind.HELLO, MessageKind.USER):
        party, delivery = waiting_message(kind)
        after(party, delivery, failure, limit - 1)
        assert is_queued(party)
        after(party, next_of(party), failure, limit)
        assert not is_queued(party)


def test_hello_to_somebody_who_is_gone_before_there_is_a_queue_for_his() -> None:
    party, delivery = waiting_message(MessageKind.HELLO)
    party.db.execute("DELETE FROM receive_queues")
    events = after(party, delivery, RouterRefused(AUTH))
    assert events == [Failed(party.connection_id, "CONN NOT_ACCEPTED")]


@pytest.mark.parametrize("failure", [RouterRefused(AUTH), FULL, OTHER, AWAY, STRANGER], ids=str)
@pytest.mark.parametrize("kind", MessageKind)
def test_a_queue_that_was_given_up_during_the_attempt(kind: MessageKind, failure: RouterFailure) -> None:
    """Its owner deletes it as soon as the new one works, where the message went, too."""
    party, delivery = waiting_message(kind)
    party.run(lambda tx: give_up_queue(tx, delivery.queue))
    assert after(party, delivery, failure) == []
    assert not is_queued(party)
