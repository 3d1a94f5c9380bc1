"""What a device has, from its file alone, also beside an agent at work: nobody is asked, nothing changes."""

from __future__ import annotations

import argparse

from agent.cli.running import key_of, output, state_file
from agent.duplex.records import Connection
from agent.duplex.store import reading
from agent.duplex.tables import connections, receive_queues
from agent.notifications.records import Subscription
from agent.notifications.rows import subscriptions, token_of


async def show(args: argparse.Namespace) -> None:
    with reading(state_file(args), key_of(args)) as db:
        token = token_of(db)
        known = [connection for connection in connections(db) if not connection.deleted]
        rows = {row.queue_id: row for row in subscriptions(db)}
        queues = [receive_queues(db, connection.connection_id) for connection in known]
    if token is None:
        output(args).say({"token": None}, "Token: none")
    else:
        values = {"token": token.status, "mode": token.mode, "server": str(token.server)}
        output(args).say(values, f"Token: {token.status}, {token.mode}, at {token.server}")
    for connection, own in zip(known, queues, strict=True):
        _show(args, connection, [rows[queue.queue_id] for queue in own if queue.queue_id in rows])


def _show(args: argparse.Namespace, connection: Connection, rows: list[Subscription]) -> None:
    notifications = [
        " ".join(filter(None, (row.status, f"(next: {row.action})" if row.action else ""))) for row in rows
    ]
    values = {
        "connection": connection.connection_id,
        "kind": connection.kind,
        "ratchet": connection.sync_state.value,
        "pq": connection.pq_support,
        "notifications": notifications,
    }
    pq = ", post-quantum" if connection.pq_support else ""
    said = "; ".join(notifications) or "none"
    text = f"Connection {connection.connection_id}: {connection.kind}{pq}; notifications: {said}"
    output(args).say(values, text)
