"""Records and the tables that keep them."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from agent.duplex.links import OwnLink
from agent.duplex.mapping import Table
from agent.duplex.records import Connection, QueueStatus, ReceiveQueue, SendQueue
from agent.duplex.schema import prepare
from agent.duplex.tables import StoredCommand, receive_queue, receive_queues, set_receive_queue
from agent.notifications.records import GivenUpToken, Subscription, Token
from protocol.encoding import EntityId
from protocol.smp_messages import QueueMode
from tests.agent.duplex.simulation import connected_parties, database_in_memory
from tests.builders import ed25519

MADE_BY_THE_DATABASE = {"key"}
"Columns without which a row cannot be made, besides those of its record."


@pytest.mark.parametrize(
    ("table", "record"),
    [
        ("connections", Connection),
        ("receive_queues", ReceiveQueue),
        ("send_queues", SendQueue),
        ("links", OwnLink),
        ("commands", StoredCommand),
        ("ntf_token", Token),
        ("deleted_ntf_tokens", GivenUpToken),
        ("ntf_subscriptions", Subscription),
    ],
)
def test_fields_are_columns(table: str, record: type) -> None:
    db = database_in_memory()
    prepare(db)
    needed, all_columns = set[str](), set[str]()
    for _, name, _, not_null, default, is_key in db.execute(f"PRAGMA table_info({table})"):
        all_columns.add(name)
        if not_null and default is None and not is_key:
            needed.add(name)
    names = {field.name for field in fields(record)}
    assert names <= all_columns
    assert needed - MADE_BY_THE_DATABASE <= names


def test_what_is_written_is_read() -> None:
    alice, _ = connected_parties()
    (queue,) = receive_queues(alice.db, alice.connection_id)
    key = ed25519().public
    changed = replace(
        queue, sender_key=key, mode=QueueMode.CONTACT, deleting=True, status=QueueStatus.NEW, e2e_secret=None
    )
    changes = {
        name: getattr(changed, name) for name in ("sender_key", "mode", "deleting", "status", "e2e_secret")
    }
    alice.run(lambda tx: set_receive_queue(tx, queue.queue_id, **changes))
    assert receive_queue(alice.db, queue.queue_id) == changed != queue
    (stored,) = alice.db.execute("SELECT mode, deleting, status, e2e_secret FROM receive_queues")
    assert tuple(stored) == ("C", 1, "new", None)


def test_a_new_row_gets_a_number_of_its_own() -> None:
    alice, _ = connected_parties()
    table = Table("receive_queues", ReceiveQueue, "queue_id", numbered=True)
    (queue,) = receive_queues(alice.db, alice.connection_id)
    other = replace(queue, recipient_id=EntityId(b"another"))
    queue_id = alice.run(lambda tx: table.add(tx, other))
    assert queue_id != queue.queue_id
    assert table.get(alice.db, queue_id) == replace(other, queue_id=queue_id)
    alice.run(lambda tx: table.drop(tx, queue_id))
    assert table.get(alice.db, queue_id) is None
