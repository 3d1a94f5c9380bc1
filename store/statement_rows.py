"""Columns to records of the statement gateway, for every implementation of the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protocol.device_token import decode_device_token
from store.statement_records import Channel, GatewayKey, GatewaySubscription, PushKey, Rule, StatementPush


def subscription_record(row: Sequence[Any], rules: Sequence[Sequence[Any]]) -> GatewaySubscription:
    """From key, id, client, channel, device token, call, times."""
    return GatewaySubscription(
        key=GatewayKey(row[0]),
        subscription_id=row[1],
        client_id=row[2],
        channel=Channel(row[3]),
        device_token=decode_device_token(row[4]),
        is_call=bool(row[5]),
        created_at=row[6],
        updated_at=row[7],
        rules=tuple(Rule(sender, topic) for sender, topic in rules),
    )


def statement_push(row: Sequence[Any]) -> StatementPush:
    """From key, subscription key and id, hash, channel, call, device token, sender, topic, data, time."""
    return StatementPush(
        key=PushKey(row[0]),
        subscription_key=GatewayKey(row[1]),
        subscription_id=row[2],
        statement_hash=row[3],
        channel=Channel(row[4]),
        is_call=bool(row[5]),
        device_token=decode_device_token(row[6]),
        sender=row[7],
        topic=row[8],
        data=row[9],
        received_at=row[10],
    )
