"""Steps that meet each other, or a peer that does not do its part: everything goes on by itself."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.duplex import rotation
from agent.duplex.deletion import clean_up
from agent.duplex.message_kinds import MessageKind
from agent.duplex.outgoing import MAX_ANSWERS
from agent.duplex.records import ReceiveQueue
from agent.duplex.resending import MAX_UNREAD, UNREAD_TIME
from agent.duplex.schema import prepare
from agent.duplex.store import Tx
from agent.duplex.synchronisation import ANSWERED, MAX_ROUNDS, PATIENT, PATIENT_GROWTH
from agent.duplex.tables import connection, receive_queues
from agent.errors import Prohibited
from protocol.agent.ratchet_sync import SyncState
from protocol.smp_messages import Del
from tests.agent.duplex.simulation import Killed, Party, carry, connected_parties, settle

OLD, NEW = 0, 1
STEP_OF_JOINED = 7
"Of the tables: before it nobody knew who had joined whom."


def own_queue(party: Party) -> ReceiveQueue:
    (queue,) = receive_queues(party.db, party.connection_id)
    return queue


def talk(alice: Party, bob: Party) -> None:
    seen = len(alice.read), len(bob.read)
    alice.send(b"from alice")
    bob.send(b"from bob")
    settle(alice, bob)
    assert alice.read[seen[0] :] == [b"from bob"]
    assert bob.read[seen[1] :] == [b"from alice"]


# A rotation and a synchronisation


@pytest.mark.parametrize("hers", [True, False], ids=["owner", "sender"])
@pytest.mark.parametrize("steps", range(6))
def test_a_rotation_that_meets_a_synchronisation(steps: int, hers: bool) -> None:
    alice, bob = connected_parties()
    old = own_queue(alice)
    assert alice.switch()
    for step in range(steps):
        carry(*((alice, bob), (bob, alice))[step % 2], NEW)
    (alice if hers else bob).sync()
    settle(alice, bob)
    assert own_queue(alice).recipient_id != old.recipient_id
    assert own_queue(alice).switch is None
    assert bob.sends_to() == 1
    assert set(alice.errors + bob.errors) <= {"A_CRYPTO RATCHET_HEADER"}, "of the old ratchet"
    talk(alice, bob)


@pytest.mark.parametrize("who", ["alice", "bob"])
def test_death_in_a_rotation_that_meets_a_synchronisation(who: str) -> None:
    for dies_after in range(1, 200):
        alice, bob = connected_parties()
        old, mortal = own_queue(alice), alice if who == "alice" else bob
        mortal.dies_at = mortal.steps + dies_after
        died = False
        for work in (alice.switch, bob.sync, lambda a=alice, b=bob: settle(a, b)):
            try:
                work()
            except Killed:
                died = True
                mortal.restart()
        mortal.dies_at = None
        settle(alice, bob)
        if alice.queues() == 1 and own_queue(alice).recipient_id == old.recipient_id:
            assert alice.switch(), "it died before the switch was stored"
            settle(alice, bob)
        assert own_queue(alice).recipient_id != old.recipient_id, f"death after {dies_after} steps"
        talk(alice, bob)
        if not died:
            return
    raise AssertionError("it never ends")


@pytest.mark.parametrize("lost", ["QADD", "QKEY", "QUSE", "QTEST"])
def test_a_step_of_a_rotation_that_a_new_ratchet_makes_unreadable(lost: str) -> None:
    """Its receiver has given up the ratchet that it was sealed with: it is sent again with the next one."""
    alice, bob = connected_parties()
    old = own_queue(alice)
    assert alice.switch()
    for name, who, peer, choice in (
        ("QADD", alice, bob, OLD),
        ("QKEY", bob, alice, OLD),
        ("QUSE", alice, bob, OLD),
        ("QTEST", bob, alice, NEW),
    ):
        who.command()
        who.deliver(choice)
        if name == lost:
            peer.disturb("lose", 0)
            break
        peer.receive(choice)
    bob.sync()
    settle(alice, bob)
    talk(alice, bob)
    settle(alice, bob)
    assert own_queue(alice).recipient_id != old.recipient_id
    assert own_queue(alice).switch is None
    assert bob.sends_to() == 1
    assert not alice.errors + bob.errors


@pytest.mark.parametrize("after", range(1, 5))
def test_a_step_that_is_sent_again_although_it_was_read_changes_nothing(after: int) -> None:
    """Neither before nor after the other side has gone on, nor when the new queue is in use."""
    alice, bob = connected_parties()
    assert alice.switch()
    for step, (who, peer) in enumerate([(alice, bob), (bob, alice)] * 2, 1):
        carry(who, peer, NEW)
        if step == after:
            break
    for who in (alice, bob):
        who.run(lambda tx: rotation.send_again(tx, 1))
    settle(alice, bob)
    assert not alice.errors + bob.errors
    assert own_queue(alice).switch is None
    assert bob.sends_to() == 1
    talk(alice, bob)


def test_a_step_that_waits_for_the_new_ratchet_is_sent_once() -> None:
    alice, _ = connected_parties()
    assert alice.switch()
    alice.sync()
    alice.command()
    alice.run(lambda tx: rotation.send_again(tx, 1))
    (waiting,) = alice.db.execute("SELECT count(*) FROM commands").fetchone()
    assert waiting == 1, "QADD"


def test_receipts_wait_for_the_new_ratchet() -> None:
    alice, bob = connected_parties()
    alice.send(b"hello")
    alice.deliver()
    bob.receive()
    bob.sync()
    bob.ack(receipt=b"")
    settle(alice, bob)
    assert [same for _, same in alice.receipts] == [True]


def test_what_waits_for_the_new_ratchet_is_bounded() -> None:
    """QADDs to a side that cannot answer: they are refused at some point."""
    alice, bob = connected_parties()
    bob.sync()
    for _ in range(MAX_ANSWERS + 5):
        assert alice.switch()
        alice.command()
        alice.deliver()
        bob.receive()
        assert alice.abort_switch()
    (count,) = bob.db.execute("SELECT count(*) FROM commands").fetchone()
    assert count <= MAX_ANSWERS
    assert "A_PROHIBITED too many answers wait to be sent" in bob.errors


def test_aborting_while_the_new_queue_is_made_leaves_none_behind() -> None:
    alice, bob = connected_parties()
    old = own_queue(alice)
    assert alice.switch()
    alice.before_answer = alice.abort_switch
    alice.command()
    settle(alice, bob)
    assert len(alice.routers.queues) == 2
    assert own_queue(alice).recipient_id == old.recipient_id
    assert own_queue(alice).switch is None
    talk(alice, bob)


def test_a_switch_whose_offer_waits_can_be_aborted() -> None:
    alice, bob = connected_parties()
    alice.run(lambda tx: None)
    assert alice.switch()
    alice.sync()
    alice.command()
    assert alice.abort_switch()
    settle(alice, bob)
    assert not alice.errors + bob.errors
    assert alice.queues() == 1
    assert bob.sends_to() == 1
    talk(alice, bob)


# A peer that deletes its old queue unread


def until_quse(alice: Party, bob: Party) -> ReceiveQueue:
    """Alice moves, and Bob has sent his keys. Her old queue."""
    old = own_queue(alice)
    assert alice.switch()
    carry(alice, bob, OLD)  # QADD
    carry(bob, alice, OLD)  # QKEY
    return old


def waiting(party: Party) -> list[str]:
    """Kinds of what is still to be sent."""
    sql = "SELECT kind FROM deliveries JOIN sent_messages USING (connection_id, local_id) ORDER BY local_id"
    return [kind for (kind,) in party.db.execute(sql)]


def lose_old_queue(alice: Party, old: ReceiveQueue) -> None:
    """As a deployed agent does when the first message comes on the new queue."""
    alice.routers.queues[old.recipient_id].messages.clear()


@pytest.mark.parametrize("read", range(4))
def test_messages_in_a_queue_that_is_deleted_unread_are_sent_again(read: int) -> None:
    alice, bob = connected_parties()
    bob.send(b"long before")
    settle(alice, bob)
    old = until_quse(alice, bob)
    bodies = [b"%d" % number for number in range(4)]
    for body in bodies:
        bob.send(body)
        bob.deliver(OLD)
    for _ in range(read):
        alice.receive(OLD)
        alice.ack()
    alice.command()  # KEY
    alice.deliver()  # QUSE
    bob.receive()
    lose_old_queue(alice, old)
    settle(alice, bob)
    assert alice.read == [b"long before", *bodies]
    assert bob.sent == [b"long before", *bodies]
    assert not alice.errors + bob.errors
    kept = bob.db.execute("SELECT count(*) FROM sent_messages WHERE plaintext IS NOT NULL").fetchone()
    assert tuple(kept) == (0,)
    talk(alice, bob)


def test_what_was_confirmed_is_not_sent_again() -> None:
    alice, bob = connected_parties()
    until_quse(alice, bob)
    for body in (b"first", b"confirmed", b"third"):
        bob.send(body)
        bob.deliver(OLD)
    for _ in range(2):
        alice.receive(OLD)
        alice.ack(receipt=b"")
    alice.deliver()
    alice.deliver()
    bob.receive()
    bob.ack()
    alice.command()
    alice.deliver()
    for _ in range(4):
        bob.receive()
        bob.ack()
    assert waiting(bob) == [MessageKind.USER, MessageKind.TEST]


def test_no_step_of_a_rotation_is_sent_again_with_the_messages() -> None:
    alice, bob = connected_parties()
    until_quse(alice, bob)
    bob.send(b"after QKEY")
    bob.deliver(OLD)
    alice.command()  # KEY
    alice.deliver()  # QUSE
    bob.receive()
    assert waiting(bob) == [MessageKind.USER, MessageKind.TEST]


def test_what_was_sent_before_the_keys_is_not_kept() -> None:
    """Whoever has read QKEY has read all before it in the same queue."""
    alice, bob = connected_parties()
    assert alice.switch()
    alice.command()
    alice.deliver()  # QADD
    bob.send(b"before QKEY")
    bob.receive()
    assert waiting(bob) == [MessageKind.USER, MessageKind.KEY]
    bob.deliver(OLD)
    assert waiting(bob) == [MessageKind.KEY]
    sql = "SELECT count(*) FROM sent_messages WHERE kind = ? AND plaintext IS NOT NULL"
    assert tuple(bob.db.execute(sql, (MessageKind.USER,)).fetchone()) == (0,)


def test_what_is_kept_for_a_new_queue_is_bounded() -> None:
    alice, bob = connected_parties()
    until_quse(alice, bob)
    for number in range(MAX_UNREAD + 20):
        bob.send(b"%d" % number)
        bob.deliver(OLD)
    sql = "SELECT count(*) FROM sent_messages WHERE plaintext IS NOT NULL"
    assert bob.db.execute(sql).fetchone()[0] <= MAX_UNREAD + 2

    def much_later(tx: Tx) -> None:
        tx.now += UNREAD_TIME + 1
        clean_up(tx)

    bob.run(much_later)
    assert bob.db.execute(sql).fetchone()[0] == 0
    assert bob.db.execute("SELECT count(*) FROM sent_messages").fetchone()[0] >= MAX_UNREAD


# Synchronisations that do not end by themselves


def recover(alice: Party, bob: Party) -> None:
    for _ in range(2 * MAX_ROUNDS + 2):
        for who in (alice, bob):
            who.synchronise_again()
            settle(alice, bob)


def agreed(alice: Party, bob: Party) -> None:
    for who in (alice, bob):
        assert who.sync_state is SyncState.OK
        assert connection(who.db, who.connection_id).sync_rounds == 0
    talk(alice, bob)


def agreed_after_talk(alice: Party, bob: Party) -> None:
    talk(alice, bob)
    agreed(alice, bob)


def test_a_peer_that_forgot_the_synchronisation() -> None:
    alice, bob = connected_parties()
    backup = bob.backup()
    alice.sync()
    settle(alice, bob)
    bob.restore(backup)
    alice.sync()
    alice.deliver()
    bob.disturb("lose", 0)
    bob.send(b"with the ratchet of the backup")
    settle(alice, bob)
    assert alice.sync_state is SyncState.STARTED
    recover(alice, bob)
    agreed(alice, bob)


@pytest.mark.parametrize("hers", [True, False], ids=["made the link", "joined"])
def test_keys_that_come_after_an_agreement(hers: bool) -> None:
    """One side starts and the other one answers: in seconds, with none of the patience for silent peers."""
    alice, bob = connected_parties()
    who, peer = (alice, bob) if hers else (bob, alice)
    for _ in range(2):
        who.sync()
        who.deliver()
        peer.receive()
    assert peer.sync_state is SyncState.REQUIRED
    settle(alice, bob)
    for each in (peer, who) * 4:
        due = connection(each.db, each.connection_id).sync_due
        if due is not None and due - each.run(lambda tx: tx.now) <= ANSWERED[1]:
            each.synchronise_again()
            settle(alice, bob)
    agreed(alice, bob)


@pytest.mark.parametrize("hers", [True, False], ids=["owner", "sender"])
def test_keys_that_miss_each_other_while_a_queue_moves(hers: bool) -> None:
    """Of the queues of the connection, each side knows others."""
    alice, bob = connected_parties()
    until_quse(alice, bob)
    carry(alice, bob, OLD)  # QUSE
    while bob.deliver(OLD):
        pass
    assert bob.sends_to() == 1, "QTEST was sent"
    alice.disturb("lose", 0)
    who, peer = (alice, bob) if hers else (bob, alice)
    for _ in range(2):
        who.sync()
        carry(who, peer, 0)
    assert peer.sync_state is SyncState.REQUIRED
    settle(alice, bob)
    recover(alice, bob)
    agreed(alice, bob)


def test_after_an_upgrade_both_sides_know_who_starts() -> None:
    parties = connected_parties()
    for party in parties:
        party.db.execute("ALTER TABLE connections DROP COLUMN joined")
        party.db.execute(f"PRAGMA user_version = {STEP_OF_JOINED - 1}")
        prepare(party.db)
    alice, bob = (connection(party.db, 1) for party in parties)
    assert alice.joined is not bob.joined


@pytest.mark.parametrize("seed", range(8))
def test_keys_that_miss_each_other(seed: int) -> None:
    """Each side waits for an answer to its last keys, which the other one has seen too early."""
    alice, bob = connected_parties(seed)
    for _ in range(2):
        bob.sync()
        carry(bob, alice, 0)
    alice.sync()
    settle(alice, bob)
    recover(alice, bob)
    agreed(alice, bob)


def test_a_new_ratchet_overtakes_a_message_in_another_queue() -> None:
    """QTEST is in the new queue only: that it comes too late is no reason for yet another ratchet."""
    alice, bob = connected_parties()
    until_quse(alice, bob)
    bob.send(b"delays the new queue")
    carry(alice, bob, OLD)  # QUSE
    alice.sync()
    settle(alice, bob)
    assert alice.errors == ["A_CRYPTO RATCHET_HEADER"]
    assert alice.sync_state is SyncState.ALLOWED
    agreed_after_talk(alice, bob)
    assert alice.queues() == 1


def test_rounds_are_bounded() -> None:
    """The peer is silent: what it does not answer is not repeated for ever."""
    alice, bob = connected_parties()
    alice.sync()
    carry(alice, bob, 0)
    bob.deliver()
    alice.receive()
    assert alice.sync_state is SyncState.AGREED
    for _ in range(MAX_ROUNDS + 3):
        alice.synchronise_again()
    assert connection(alice.db, alice.connection_id).sync_rounds == MAX_ROUNDS
    (keys,) = alice.db.execute("SELECT count(*) FROM sent_messages WHERE kind = 'R'").fetchone()
    assert keys <= MAX_ROUNDS + 1


def test_a_silent_peer_is_asked_less_and_less_often() -> None:
    """At random times: two that are silent at once must not start together again."""
    first = set[int]()
    for seed in range(4):
        alice, bob = connected_parties(seed)
        alice.sync()
        carry(alice, bob, 0)
        bob.deliver()
        alice.receive()
        for number in range(MAX_ROUNDS):
            due = connection(alice.db, alice.connection_id).sync_due
            assert due is not None
            wait = due - alice.run(lambda tx: tx.now) + 1
            least, most = (seconds * PATIENT_GROWTH**number for seconds in PATIENT)
            assert least <= wait <= most
            if number == 0:
                first.add(wait)
            alice.synchronise_again()
        assert connection(alice.db, alice.connection_id).sync_due is None
    assert len(first) > 1


SYNCS = ("sync", "deliver", "receive", "ack", "restart", "answer lost", "send")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.booleans(), st.sampled_from(SYNCS)), min_size=8, max_size=24),
    st.integers(0, 2**32 - 1),
)
def test_synchronisations_of_both_sides_at_any_time(script: list[tuple[bool, str]], seed: int) -> None:
    alice, bob = connected_parties(seed)
    for number, (hers, name) in enumerate(script):
        who = alice if hers else bob
        if name == "send":
            with suppress(Prohibited):
                who.send(b"%d" % number)
        elif name == "answer lost":
            who.answer_lost = True
            who.deliver()
            who.answer_lost = False
        else:
            getattr(who, name)()
    settle(alice, bob)
    recover(alice, bob)
    agreed(alice, bob)
    assert len(set(alice.read)) == len(alice.read)


# Deletion


def test_a_deletion_is_told_of_when_it_is_true() -> None:
    """However often it was tried before."""
    alice, bob = connected_parties()
    alice.away = True
    assert alice.delete()
    for _ in range(50):
        alice.all_commands()
    assert not alice.deleted
    assert alice.has_connection()
    alice.away = False
    alice.loses = Del
    settle(alice, bob)
    settle(alice, bob)
    assert alice.deleted
    assert not alice.has_connection()
    assert len(alice.routers.queues) == 1


def test_death_at_every_step_of_a_deletion() -> None:
    for dies_after in range(1, 60):
        alice, bob = connected_parties()
        assert alice.switch()
        alice.dies_at = alice.steps + dies_after
        died = False
        for work in (alice.command, alice.delete, lambda a=alice, b=bob: settle(a, b)):
            try:
                work()
            except Killed:
                died = True
                alice.restart()
        alice.dies_at = None
        alice.delete()
        settle(alice, bob)
        assert not alice.has_connection(), f"death after {dies_after} steps"
        left = len(alice.routers.queues) - bob.queues()
        assert left <= 1, "only a queue whose NEW was never stored may be left"
        if not died:
            assert left == 0
            return
    raise AssertionError("it never ends")
