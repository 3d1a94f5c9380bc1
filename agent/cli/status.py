"""What a device has, from its file alone: no server is asked, and nothing changes."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime

from agent.cli.running import key_of, output, state_file
from agent.duplex.records import Connection
from agent.duplex.secrets import Secrets
from agent.duplex.store import DuplexStore
from agent.duplex.tables import connections, receive_queues
from agent.notifications.records import Subscription
from agent.notifications.rows import subscriptions, token_of


async def show(args: argparse.Namespace) -> None:
    now = datetime.now(UTC).timestamp
    async with DuplexStore.open(state_file(args), Secrets(), now, key_of(args)) as store:
        token = await store.read(token_of)
        known = [connection for connection in await store.read(connections) if not connection.deleted]
        rows = {row.queue_id: row for row in await store.read(subscriptions)}
        queues = [await store.read(lambda db, c=c: receive_queues(db, c.connection_id)) for c in known]  # type: ignore[misc]
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
