"""Commands of two connections at the same moment: what one decided on, the other has changed meanwhile."""

from __future__ import annotations

import asyncio
import os

from ntf_server.app import App
from ntf_server.clock import SystemClock, day
from protocol.device_token import ApnsToken
from protocol.encoding import NO_ENTITY, EntityId
from protocol.errors import AUTH
from protocol.ntf_commands import Err, IdSub, IdTkn, NtfCommand, Ok, Snew, Tcrn, Tdel, Trpl, Tvfy
from protocol.statuses import TokenInput, TokenStatus
from store.records import NewToken, TokenRecord
from tests import builders
from tests.ntf_server.conftest import null_token
from tests.ntf_server.ntf_client import Device, NtfClient
from tests.store.builders import find_token

TRIES = 200
TRIES_PER_VICTIM = 5
"Fewer than the verification pushes that a device may get at once."


async def stored_device(app: App, token: ApnsToken, *, active: bool = False) -> tuple[Device, TokenRecord]:
    """Registered without the wire: the limits of registrations are not what is tried here."""
    device = Device.make(token)
    device.token_id = EntityId(os.urandom(24))
    today = day(SystemClock().now())  # an older one may be purged before it is active
    record = await app.store.create_token(
        NewToken(
            token_id=device.token_id,
            device_token=token,
            verify_key=device.key.public.der,
            dh_private=os.urandom(32),
            dh_secret=os.urandom(32),
            code=os.urandom(32),
            updated_on=today,
        )
    )
    if active:
        await app.store.move_token(record, TokenInput.CODE_MATCHED, today)
    return device, record


async def test_a_code_of_the_old_device_never_activates_the_new_one(app: App, client: NtfClient) -> None:
    """Register an own device, learn its code, then TRPL(a stranger's device) beside TVFY(the old code)."""
    other = await NtfClient.open(app.address)
    takeovers = 0
    for number in range(TRIES):
        if number % TRIES_PER_VICTIM == 0:
            victim, _ = await stored_device(app, null_token(), active=True)
            queue = builders.queue_ntf(number)
            subscribed = await client.ask(
                Snew(victim.token_id, queue, builders.ed25519()), NO_ENTITY, victim.key
            )
            assert isinstance(subscribed, IdSub)
        attacker, record = await stored_device(app, null_token())
        requests = [attacker.ask(client, Trpl(victim.token)), attacker.ask(other, Tvfy(record.code))]
        if number % 2:
            requests.reverse()
        await asyncio.gather(*requests)
        found = await find_token(app.store, attacker.token_id)
        assert found is not None
        takeovers += found.status is TokenStatus.ACTIVE and found.device_token == victim.token
        takeovers += await find_token(app.store, victim.token_id) is None
    other.close()
    assert takeovers == 0, f"{takeovers} of {TRIES} tries gave a stranger's device to the attacker"


async def test_what_comes_beside_a_deletion_is_done_before_it_or_refused(app: App, client: NtfClient) -> None:
    """Whoever comes second finds nothing; nothing is left behind."""
    other = await NtfClient.open(app.address)
    for number in range(60):
        device, record = await stored_device(app, null_token(), active=number % 3 != 1)
        snew = Snew(device.token_id, builders.queue_ntf(number), builders.ed25519())
        request: tuple[NtfCommand, EntityId] = (
            (Tcrn(20), device.token_id),
            (Tvfy(record.code), device.token_id),
            (snew, NO_ENTITY),
        )[number % 3]
        deleted, answer = await asyncio.gather(device.ask(client, Tdel()), other.ask(*request, device.key))
        assert deleted == Ok()
        assert answer == Err(AUTH) or isinstance(answer, Ok | IdSub)
        assert await find_token(app.store, device.token_id) is None
    other.close()
    counts = await app.store.counts()
    assert (counts.tokens, counts.active_tokens, counts.subscriptions) == (0, 0, 0)


async def test_a_registration_beside_a_deletion_has_a_token_in_the_end(app: App, client: NtfClient) -> None:
    other = await NtfClient.open(app.address)
    for _ in range(8):
        device = Device.make(null_token())
        await device.register(client)
        deleted, registered = await asyncio.gather(
            device.ask(client, Tdel()), other.ask(device.tnew, NO_ENTITY, device.key)
        )
        assert deleted == Ok()
        assert isinstance(registered, IdTkn)
        found = await find_token(app.store, registered.token_id)
        assert found is None or found.status in (TokenStatus.REGISTERED, TokenStatus.CONFIRMED)
        assert (found is None) is (registered.token_id == device.token_id)
    other.close()
