"""Single steps of agents that nothing else would notice to be missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.duplex.delivery import CONTINUED_DELAY, CONTINUED_TIME, after_attempt
from agent.duplex.events import Event, QueueDeleted
from agent.duplex.message_kinds import MessageKind
from agent.duplex.outgoing import next_delivery, queue_message
from agent.duplex.records import RcvSwitch
from agent.duplex.replies import RouterRefused
from agent.duplex.rotation import queues_deleted, start_switch
from agent.duplex.services import adopt_service, service_credentials
from agent.duplex.store import Tx
from agent.duplex.tables import connection, receive_queues, send_queues, set_send_queue
from agent.errors import Prohibited
from protocol.agent.messages import (
    AMessage,
    Hello,
    QueueContinue,
    RatchetReady,
    Receipt,
    Receipts,
    UserMessage,
    message_hash,
)
from protocol.agent.ratchet_sync import SyncState
from protocol.errors import QUOTA
from protocol.smp_messages import Key
from smp_router.router import Router
from tests.agent.duplex.simulation import (
    SERVERS,
    NoWait,
    Party,
    Routers,
    carry,
    connected_parties,
    finish,
    settle,
)
from tests.agent.duplex.world import person

# Rotation


def test_a_switch_is_aborted_while_the_offer_is_sent() -> None:
    alice, bob = connected_parties()
    assert alice.switch()
    alice.command()
    old = next(queue for queue in receive_queues(alice.db, 1) if queue.switch is not None)
    assert old.switch is RcvSwitch.SENDING_QADD
    assert alice.abort_switch()
    settle(alice, bob)
    (queue,) = receive_queues(alice.db, 1)
    assert (queue.queue_id, queue.switch) == (old.queue_id, None)


def sender_keys(party: Party) -> int:
    (count,) = party.db.execute("SELECT count(*) FROM receive_queues WHERE sender_key IS NOT NULL").fetchone()
    return int(count)


def test_the_key_of_a_sender_is_deleted_when_its_router_has_it() -> None:
    alice, bob = connected_parties()
    assert alice.switch()
    carry(alice, bob, 0)  # QADD
    carry(bob, alice, 0)  # QKEY
    assert sender_keys(alice) == 1
    alice.loses = Key
    alice.command()
    assert sender_keys(alice) == 1, "KEY has to be sent again"
    alice.loses = None
    alice.command()
    assert sender_keys(alice) == 0


def test_a_second_offer_replaces_the_first() -> None:
    alice, bob = connected_parties()
    for _ in range(2):
        assert alice.switch()
        alice.command()
        alice.deliver()
        bob.receive()
        if bob.sends_to() == 2 and alice.queues() == 2:
            alice.abort_switch()
    assert bob.sends_to() == 2, "the queue that is replaced, and the last that was offered"


def test_no_switch_while_the_ratchet_is_synchronised() -> None:
    alice, bob = connected_parties()
    alice.sync()
    assert not alice.switch()
    settle(alice, bob)
    assert alice.switch()


def test_no_switch_to_the_same_router() -> None:
    alice, _ = connected_parties()
    here = receive_queues(alice.db, 1)[0].server
    with pytest.raises(Prohibited, match="no other router"):
        alice.run(lambda tx: start_switch(tx, 1, [here]))
    alice.run(lambda tx: start_switch(tx, 1, [here, *SERVERS]))


def delete_at_router(party: Party, index: int) -> list[Event]:
    """What is told of it."""
    queue = receive_queues(party.db, 1)[index]
    party.routers.queues.pop(queue.recipient_id)
    told: list[Event] = []

    def change(tx: Tx) -> None:
        queues_deleted(tx, queue.server, [queue.recipient_id], SERVERS)
        told.extend(tx.events)

    party.run(change)
    return told


def test_the_router_deletes_the_only_queue() -> None:
    alice, bob = connected_parties()
    assert delete_at_router(alice, 0) == [QueueDeleted(1, False)]
    assert receive_queues(alice.db, 1)[0].deleting
    bob.send(b"lost")
    alice.send(b"still arrives")
    settle(alice, bob)
    assert bob.read == [b"still arrives"]
    assert alice.delete()
    settle(alice, bob)
    assert not alice.has_connection()


def test_the_router_deletes_the_queue_that_is_to_be_the_new_one() -> None:
    alice, bob = connected_parties()
    assert alice.switch()
    carry(alice, bob, 0)  # QADD
    told = delete_at_router(alice, 1)
    assert told[0] == QueueDeleted(1, True)
    settle(alice, bob)
    assert alice.queues() == 1
    (queue,) = receive_queues(alice.db, 1)
    assert queue.switch is None
    bob.send(b"to another one")
    settle(alice, bob)
    assert alice.read == [b"to another one"]


def test_the_router_deletes_the_queue_that_is_replaced() -> None:
    alice, bob = connected_parties()
    assert alice.switch()
    carry(alice, bob, 0)  # QADD
    carry(bob, alice, 0)  # QKEY
    alice.command()  # KEY
    assert delete_at_router(alice, 0)[0] == QueueDeleted(1, True)
    settle(alice, bob)
    assert alice.queues() == 1
    bob.send(b"to the new one")
    settle(alice, bob)
    assert alice.read == [b"to the new one"]


async def test_a_real_router_says_that_it_deleted_a_queue(tmp_path: Path) -> None:
    async with Router.start() as router, person(tmp_path / "alice.db", router.address) as alice:
        connection_id, _ = await alice.agent.create_invitation(pq=False)
        (queue,) = router.state.queues
        router.faults.send_deld([queue.recipient_id])
        assert await alice.event(QueueDeleted) == QueueDeleted(connection_id, False)


# Synchronisation


def test_the_same_keys_again_change_nothing() -> None:
    alice, bob = connected_parties()
    alice.sync()
    alice.deliver()
    bob.disturb("duplicate", 0)
    bob.receive()
    assert bob.sync_state is SyncState.AGREED
    bob.receive()
    assert bob.sync_state is SyncState.AGREED
    assert not bob.errors


# Messages


@pytest.mark.parametrize(
    ("message", "notifies"),
    [(Hello(), True), (RatchetReady(1), True), (QueueContinue, False), (Receipts, False)],
    ids=["HELLO", "EREADY", "A_QCONT", "A_RCVD"],
)
def test_what_wakes_the_peers_device(message: object, notifies: bool) -> None:
    alice, _ = connected_parties()
    (queue,) = send_queues(alice.db, 1)
    wanted: AMessage = Hello()
    if message is QueueContinue:
        wanted = QueueContinue(queue.address)
    elif message is Receipts:
        wanted = Receipts((Receipt(1, bytes(32)),))
    elif isinstance(message, RatchetReady):
        wanted = message
    alice.run(lambda tx: queue_message(tx, connection(tx.db, 1), wanted))
    delivery = next_delivery(alice.db, queue.queue_id)
    assert delivery is not None
    assert delivery.notification is notifies
    assert delivery.command(bytes(24)).notification is notifies


def next_notifies(party: Party) -> tuple[MessageKind, bool]:
    (queue,) = send_queues(party.db, party.connection_id)
    delivery = next_delivery(party.db, queue.queue_id)
    assert delivery is not None
    return delivery.kind, delivery.command(bytes(24)).notification


def test_what_wakes_the_peers_device_in_handshakes_synchronisations_and_moves() -> None:
    routers = Routers()
    alice, bob = Party("alice", routers), Party("bob", routers)
    bob.join(alice.create())
    bob.command()
    assert next_notifies(bob) == (MessageKind.CONFIRMATION, True)
    bob.deliver()
    alice.receive()
    alice.command()
    assert next_notifies(alice) == (MessageKind.REPLY, True)
    settle(alice, bob)
    alice.sync()
    assert next_notifies(alice) == (MessageKind.RATCHET_KEY, True)
    settle(alice, bob)
    assert alice.switch()
    alice.command()
    assert next_notifies(alice) == (MessageKind.ADD, False)


def sent_by(party: Party, body: bytes) -> Receipt:
    """What a receipt for this message says."""
    party.send(body)
    sql = "SELECT message_id, message_hash FROM sent_messages ORDER BY local_id DESC LIMIT 1"
    row = party.db.execute(sql).fetchone()
    return Receipt(row["message_id"], row["message_hash"])


def confirm(party: Party, *receipts: Receipt) -> None:
    party.run(lambda tx: queue_message(tx, connection(tx.db, 1), Receipts(receipts)))


def test_a_receipt_that_comes_twice_is_told_once() -> None:
    alice, bob = connected_parties()
    receipt = sent_by(alice, b"hello")
    settle(alice, bob)
    for _ in range(2):
        confirm(bob, receipt)
        settle(alice, bob)
    assert [same for _, same in alice.receipts] == [True]
    assert not alice.errors


def test_an_invalid_receipt_does_not_invalidate_others() -> None:
    """One for a message that is no user's, one for another text, one that is right."""
    alice, bob = connected_parties()
    alice.run(lambda tx: queue_message(tx, connection(tx.db, 1), Hello()))
    (hello_id,) = alice.db.execute("SELECT max(message_id) FROM sent_messages").fetchone()
    other, right = sent_by(alice, b"one"), sent_by(alice, b"two")
    confirm(bob, Receipt(hello_id, bytes(32)), Receipt(other.message_id, message_hash(b"other")), right)
    while bob.deliver():
        pass
    alice.receive()
    assert [same for _, same in alice.receipts] == [False, True]
    assert alice.errors == ["A_PROHIBITED receipt"]


class RecordedWait(NoWait):
    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)


@pytest.mark.parametrize(
    ("since", "delay"), [(None, 300), (0, CONTINUED_DELAY), (CONTINUED_TIME - 1, 2), (CONTINUED_TIME, 300)]
)
def test_a_full_queue_whose_recipient_reads_again(since: int | None, delay: float) -> None:
    """Peers say so before there is room: the next attempt comes soon, and its delay does not grow."""
    alice, _ = connected_parties()
    alice.send(b"hello")
    (queue,) = send_queues(alice.db, 1)
    now = 1000
    if since is not None:
        alice.run(lambda tx: set_send_queue(tx, queue.queue_id, continued_at=now - since))
    delivery, wait = next_delivery(alice.db, queue.queue_id), RecordedWait()
    assert delivery is not None
    finish(after_attempt(alice._transact, wait, delivery, RouterRefused(QUOTA), now))
    assert wait.seconds == [delay]


def test_a_queue_that_continues_is_known_by_what_its_recipient_says() -> None:
    alice, bob = connected_parties()
    (queue,) = send_queues(bob.db, 1)
    alice.run(lambda tx: queue_message(tx, connection(tx.db, 1), QueueContinue(queue.address)))
    settle(alice, bob)
    assert send_queues(bob.db, 1)[0].continued_at is not None


def test_a_message_that_goes_to_two_queues_is_sent_once() -> None:
    alice, bob = connected_parties()
    assert alice.switch()
    carry(alice, bob, 0)
    carry(bob, alice, 0)
    alice.command()
    bob.send(b"both ways")
    carry(alice, bob, 0)  # QUSE
    settle(alice, bob)
    assert bob.sent == [b"both ways"]
    assert MessageKind.USER.value == "A_MSG"
    assert UserMessage(b"both ways").body in alice.read


def test_a_message_whose_queue_is_replaced_while_it_is_sent_is_told_of() -> None:
    alice, bob = connected_parties()
    assert alice.switch()
    carry(alice, bob, 0)  # QADD
    carry(bob, alice, 0)  # QKEY
    alice.command()  # KEY
    carry(alice, bob, 0)  # QUSE
    bob.send(b"on its way")
    old, new = 0, 1
    bob.before_answer = lambda: bob.deliver(new)  # QTEST
    bob.deliver(old)
    assert bob.sends_to() == 1
    settle(alice, bob)
    assert bob.sent == alice.read == [b"on its way"]


# Services


def test_a_router_that_does_not_know_services_any_more() -> None:
    """The record of the service goes; one that the router never knew stays."""
    alice, _ = connected_parties()
    here = receive_queues(alice.db, 1)[0].server
    alice.run(lambda tx: service_credentials(tx, here, ours=True))
    count = "SELECT count(*) FROM services"
    alice.run(lambda tx: adopt_service(tx, here, None))
    assert alice.db.execute(count).fetchone()[0] == 1
    alice.db.execute("UPDATE services SET service_id = x'01'")
    alice.run(lambda tx: adopt_service(tx, here, None))
    assert alice.db.execute(count).fetchone()[0] == 0
