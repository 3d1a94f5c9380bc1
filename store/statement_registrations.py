"""Devices that clients of the statement gateway register, at once or after they have shown a code."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from protocol.device_token import encode_device_token
from store.rows import registration
from store.sql_store import Database, SqlStore, Transaction, reading, shared, writing
from store.statement_records import (
    DEFAULT_GATEWAY_CAPS,
    REGISTRATION_SECONDS,
    DeviceRegistration,
    GatewayCaps,
    NewGatewaySubscription,
    Refusal,
    RegistrationKey,
    SignedRequest,
    TokenTaken,
)

_USE = shared("""
INSERT INTO statement_requests (request_id, valid_until) VALUES ($1, $2) ON CONFLICT DO NOTHING
""")
_TAKEN = shared("""
SELECT subscription_id, client_id, channel FROM statement_subscriptions WHERE device_token = $1
""")
_COUNT = shared("""
SELECT (SELECT count(*) FROM statement_subscriptions WHERE client_id = $1)
    + (SELECT count(*) FROM statement_registrations WHERE client_id = $1)
""")
_SUBSCRIBE = shared("""
INSERT INTO statement_subscriptions (subscription_id, client_id, channel, device_token, is_call, created_at,
    updated_at, renewed_at, device_id, proven)
VALUES ($1, $2, $3, $4, $5, $6, $6, $6, $7, $8) ON CONFLICT (device_token) DO NOTHING
""")
_RENEW = shared(
    "UPDATE statement_subscriptions SET renewed_at = $1 WHERE device_token = $2 AND client_id = $3"
)
_REGISTER = shared("""
INSERT INTO statement_registrations
    (subscription_id, client_id, channel, device_token, is_call, code, created_at)
VALUES ($1, $2, $3, $4, $5, $6, $7)
RETURNING registration_key
""")
_WITHDRAW = shared("DELETE FROM statement_registrations WHERE client_id = $1 AND device_token = $2")
_COLUMNS = "registration_key, subscription_id, client_id, channel, device_token, is_call, code, created_at"
_LOAD = shared(f"SELECT {_COLUMNS} FROM statement_registrations WHERE registration_key = ANY($1::bigint[])")
_OWN = shared(f"""
SELECT {_COLUMNS} FROM statement_registrations WHERE client_id = $1 AND subscription_id = $2 FOR UPDATE
""")
_IS_ACTIVE = shared(
    "SELECT sub_key FROM statement_subscriptions WHERE client_id = $1 AND subscription_id = $2"
)
_LISTED = shared(
    f"SELECT {_COLUMNS} FROM statement_registrations WHERE client_id = $1 ORDER BY registration_key"
)
_DELETE = shared("DELETE FROM statement_registrations WHERE registration_key = $1")
_TAKE_OVER = shared("DELETE FROM statement_subscriptions WHERE device_token = $1")


class Registrations(SqlStore):
    @writing()
    async def add_gateway_subscription(
        self,
        tx: Transaction,
        new: NewGatewaySubscription,
        request: SignedRequest | None,
        caps: GatewayCaps = DEFAULT_GATEWAY_CAPS,
    ) -> TokenTaken | Refusal | None:
        if not await use(tx, request):
            return Refusal.REPLAYED
        # A client's requests come one after the other here, so that what is counted stays so.
        await tx.lock(new.client_id)
        if (taken := await _taken(tx, new)) is not None:
            return taken
        if await tx.fetchval(_COUNT, new.client_id) >= caps.subscriptions_per_client:
            return Refusal.QUOTA
        if await _subscribe(tx, new, proven=False):
            return None
        return await _taken(tx, new) or TokenTaken(None)

    @writing()
    async def register_device(
        self,
        tx: Transaction,
        new: NewGatewaySubscription,
        code: bytes,
        request: SignedRequest | None,
        caps: GatewayCaps = DEFAULT_GATEWAY_CAPS,
    ) -> TokenTaken | Refusal | RegistrationKey:
        if not await use(tx, request):
            return Refusal.REPLAYED
        await tx.lock(new.client_id)
        taken = await _taken(tx, new)
        if taken is not None and taken.subscription_id is not None:
            return taken
        device_token = encode_device_token(new.device_token)
        await tx.execute(_WITHDRAW, new.client_id, device_token)
        if await tx.fetchval(_COUNT, new.client_id) >= caps.subscriptions_per_client:
            return Refusal.QUOTA
        ids = new.subscription_id, new.client_id, new.channel.value, device_token
        return RegistrationKey(await tx.fetchval(_REGISTER, *ids, new.is_call, code, new.created_at))

    @writing()
    async def verify_device(
        self,
        tx: Transaction,
        client_id: bytes,
        subscription_id: bytes,
        code: bytes,
        now: int,
        request: SignedRequest | None,
    ) -> Refusal | None:
        if not await use(tx, request):
            return Refusal.REPLAYED
        if await tx.fetchval(_IS_ACTIVE, client_id, subscription_id) is not None:
            return None
        row = await tx.fetchrow(_OWN, client_id, subscription_id)
        found = None if row is None else registration(row)
        if found is None or found.created_at + REGISTRATION_SECONDS < now:
            return Refusal.UNKNOWN
        if not hmac.compare_digest(found.code, code):
            return Refusal.WRONG_CODE
        new = NewGatewaySubscription(
            subscription_id=subscription_id,
            client_id=client_id,
            channel=found.channel,
            device_token=found.device_token,
            is_call=found.is_call,
            created_at=now,
        )
        await tx.execute(_DELETE, found.key)
        await tx.execute(_TAKE_OVER, encode_device_token(found.device_token))
        return None if await _subscribe(tx, new, proven=True) else Refusal.UNKNOWN

    @reading
    async def registrations(self, db: Database, keys: Sequence[RegistrationKey]) -> list[DeviceRegistration]:
        return [registration(row) for row in await db.fetch(_LOAD, keys)]

    @reading
    async def registrations_of(self, db: Database, client_id: bytes) -> list[DeviceRegistration]:
        return [registration(row) for row in await db.fetch(_LISTED, client_id)]

    @writing()
    async def delete_registration(self, tx: Transaction, key: RegistrationKey) -> None:
        await tx.execute(_DELETE, key)


async def use(tx: Transaction, request: SignedRequest | None) -> bool:
    """False: it was made before."""
    return request is None or await tx.execute(_USE, *request) == 1


async def _taken(tx: Transaction, new: NewGatewaySubscription) -> TokenTaken | None:
    device_token = encode_device_token(new.device_token)
    row = await tx.fetchrow(_TAKEN, device_token)
    if row is None:
        return None
    await tx.execute(_RENEW, new.created_at, device_token, new.client_id)
    return TokenTaken(row[0] if (row[1], row[2]) == (new.client_id, new.channel) else None)


async def _subscribe(tx: Transaction, new: NewGatewaySubscription, *, proven: bool) -> bool:
    """False: another client was faster."""
    ids = new.subscription_id, new.client_id, new.channel.value, encode_device_token(new.device_token)
    values = *ids, new.is_call, new.created_at, new.device_id, proven
    return await tx.execute(_SUBSCRIBE, *values) == 1
