"""Every row of the token's table, against a real server: with the same device token and with another."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from agent.duplex.replies import RouterRefused, TemporaryFailure
from agent.duplex.secrets import Secrets
from agent.duplex.store import Change, DuplexStore
from agent.errors import BadPush, Prohibited
from agent.notifications.records import Mode, Token, TokenAction
from agent.notifications.rows import deleted_tokens, deletions_at, put_token, token_of
from agent.notifications.sessions import NtfSessions
from agent.notifications.tokens import Tokens, delete_token
from ntf_demo.demo import Playground
from ntf_demo.fake_push.recorder import RecordedPush
from protocol.addresses import NtfServer
from protocol.crypto import Ed25519PrivateKey, X25519PrivateKey
from protocol.device_token import ApnsToken
from protocol.encoding import EntityId, unb64
from protocol.push_messages import open_push
from protocol.statuses import TokenStatus
from smp_client.dialer import Dialer
from smp_client.requests import SessionConfig
from smp_client.session import NtfSession, connect_ntf
from store.records import TokenRecord
from tests.agent.notifications.world import DEVICE, OTHER_DEVICE, Clock, verification
from tests.agent.proxy import LossyProxy, lossy_proxy
from tests.store.builders import bring_to

PERIOD = 30


@dataclass
class Bench:
    """A token under test, its server, and what a test asks of both."""

    world: Playground
    store: DuplexStore
    tokens: Tokens
    proxy: LossyProxy

    @property
    def server(self) -> NtfServer:
        return self.proxy.in_front_of(self.world.server.address)

    async def register(self, device: ApnsToken = DEVICE, mode: Mode = Mode.INSTANT) -> TokenStatus:
        return await self.tokens.register(device, mode, self.server, PERIOD)

    async def saved(self) -> Token:
        token = await self.store.read(token_of)
        assert token is not None
        return token

    async def resume(self) -> None:
        await self.tokens.resume(await self.saved())

    async def at_server(self, token: Token) -> TokenRecord | None:
        return await self.world.server.store.token_by_device(token.device_token, token.auth_key.public.der)

    async def verify_with(self, push: RecordedPush) -> TokenStatus:
        return await self.tokens.verify(*_verification(push))

    async def in_state(self, action: TokenAction | None) -> Token:
        """A registered token whose next action is this one."""
        await self.register()
        push = await verification(self.world)
        if action is TokenAction.CHECK:
            await self.verify_with(push)
        elif action is TokenAction.VERIFY:
            token = await self.saved()
            assert token.dh_secret is not None
            code = open_push(token.dh_secret, *_verification(push))
            changed = replace(token, status=TokenStatus.CONFIRMED, action=action, code=code)
            await self.store.run(lambda tx: put_token(tx, changed))
        return await self.saved()


def _verification(push: RecordedPush) -> tuple[bytes, bytes]:
    data = json.loads(push.body)["notificationData"]
    return unb64(data["nonce"].encode()), unb64(data["verification"].encode())


@pytest.fixture
async def bench(world: Playground, tmp_path: Path) -> AsyncIterator[Bench]:
    async def connect(server: NtfServer) -> NtfSession:
        return await connect_ntf(server, Dialer(), config=SessionConfig(connect=10.0, answer=10.0))

    async with (
        DuplexStore.open(tmp_path / "phone.db", Secrets(), Clock()) as store,
        lossy_proxy(world.server.address) as proxy,
    ):

        async def transact(change: Change[object]) -> object:
            return (await store.run(change))[0]

        sessions = NtfSessions(connect)
        yield Bench(world, store, Tokens(transact, sessions), proxy)
        await sessions.close()


STATES = [None, TokenAction.VERIFY, TokenAction.CHECK]


# No token, and a token whose first registration was not answered


async def test_first_registration(bench: Bench) -> None:
    assert await bench.register() is TokenStatus.REGISTERED
    token = await bench.saved()
    assert token.action is None
    record = await bench.at_server(token)
    assert record is not None
    assert record.token_id == token.token_id
    assert record.dh_secret == token.dh_secret


@pytest.mark.parametrize("device", [DEVICE, OTHER_DEVICE])
async def test_no_id_register(bench: Bench, device: ApnsToken) -> None:
    bench.proxy.refusing = True
    with pytest.raises(TemporaryFailure):
        await bench.register()
    before = await bench.saved()
    assert (before.token_id, before.action) == (None, TokenAction.REGISTER)
    bench.proxy.refusing = False
    assert await bench.register(device) is TokenStatus.REGISTERED
    after = await bench.saved()
    assert (after.auth_key, after.dh_key) == (before.auth_key, before.dh_key)
    assert after.device_token == device
    assert await bench.at_server(after) is not None


async def test_lost_answer_to_registration_is_repeated_with_the_same_keys(bench: Bench) -> None:
    bench.proxy.lose()
    with pytest.raises(TemporaryFailure):
        await bench.register()
    assert bench.proxy.lost == 1
    before = await bench.saved()
    made = await bench.at_server(before)
    assert made is not None  # the server did it
    await bench.register()
    after = await bench.saved()
    assert after.token_id == made.token_id
    assert after.auth_key == before.auth_key


# The same device token


async def test_id_and_nothing_same_device_registers_again(bench: Bench) -> None:
    before = await bench.in_state(None)
    pushes = len(bench.world.accepted())
    assert await bench.register() is TokenStatus.REGISTERED
    after = await bench.saved()
    assert (after.token_id, after.auth_key) == (before.token_id, before.auth_key)
    assert await bench.verify_with(await verification(bench.world, pushes)) is TokenStatus.ACTIVE


async def test_id_and_verify_same_device_verifies(bench: Bench) -> None:
    await bench.in_state(TokenAction.VERIFY)
    assert await bench.register() is TokenStatus.ACTIVE
    after = await bench.saved()
    assert (after.action, after.code, after.status) == (TokenAction.CHECK, None, TokenStatus.ACTIVE)
    record = await bench.at_server(after)
    assert record is not None
    assert record.status is TokenStatus.ACTIVE


async def test_id_and_check_same_device_checks_and_follows_the_mode(bench: Bench) -> None:
    await bench.in_state(TokenAction.CHECK)
    assert await bench.register(mode=Mode.PERIODIC) is TokenStatus.ACTIVE
    periodic = await bench.saved()
    record = await bench.at_server(periodic)
    assert record is not None
    assert (periodic.mode, periodic.cron, record.cron_minutes) == (Mode.PERIODIC, PERIOD, PERIOD)
    assert await bench.register(mode=Mode.INSTANT) is TokenStatus.ACTIVE
    record = await bench.at_server(await bench.saved())
    assert record is not None
    assert record.cron_minutes == 0


async def test_id_and_check_of_a_dead_token_waits_for_registration(bench: Bench) -> None:
    token = await bench.in_state(TokenAction.CHECK)
    record = await bench.at_server(token)
    assert record is not None
    await bring_to(bench.world.server.store, record.key, TokenStatus.INVALID_UNREGISTERED)
    assert await bench.register() is TokenStatus.INVALID_UNREGISTERED
    assert (await bench.saved()).action is None
    assert await bench.register() is TokenStatus.REGISTERED
    assert (await bench.saved()).token_id == token.token_id


async def test_id_and_check_of_a_forgotten_token_makes_a_new_one(bench: Bench) -> None:
    before = await bench.in_state(TokenAction.CHECK)
    record = await bench.at_server(before)
    assert record is not None
    await bench.world.server.store.delete_token(record.key)
    assert await bench.register() is TokenStatus.REGISTERED
    after = await bench.saved()
    assert after.token_id != before.token_id
    assert after.auth_key != before.auth_key
    assert await bench.at_server(after) is not None


# Another device token


@pytest.mark.parametrize("action", STATES)
async def test_other_device_replaces(bench: Bench, action: TokenAction | None) -> None:
    before = await bench.in_state(action)
    pushes = len(bench.world.accepted())
    assert await bench.register(OTHER_DEVICE) is TokenStatus.REGISTERED
    after = await bench.saved()
    assert (after.token_id, after.action, after.code) == (before.token_id, None, None)
    assert after.device_token == OTHER_DEVICE
    assert await bench.at_server(before) is None
    push = await verification(bench.world, pushes, OTHER_DEVICE)
    assert push.token == OTHER_DEVICE.token.decode()
    assert await bench.verify_with(push) is TokenStatus.ACTIVE


@pytest.mark.parametrize("action", STATES)
async def test_other_device_of_a_forgotten_token_makes_a_new_one(
    bench: Bench, action: TokenAction | None
) -> None:
    before = await bench.in_state(action)
    record = await bench.at_server(before)
    assert record is not None
    await bench.world.server.store.delete_token(record.key)
    assert await bench.register(OTHER_DEVICE) is TokenStatus.REGISTERED
    after = await bench.saved()
    assert after.token_id != before.token_id
    assert await bench.at_server(after) is not None


async def test_replacing_stays_undone_while_the_server_is_away(bench: Bench) -> None:
    before = await bench.in_state(TokenAction.CHECK)
    bench.proxy.lose()
    with pytest.raises(TemporaryFailure):
        await bench.register(OTHER_DEVICE)
    assert (await bench.saved()).device_token == DEVICE
    assert await bench.register(OTHER_DEVICE) is TokenStatus.REGISTERED
    assert (await bench.saved()).token_id == before.token_id


# Verification


async def test_push_for_another_token_is_refused(bench: Bench) -> None:
    await bench.in_state(None)
    with pytest.raises(BadPush):
        await bench.tokens.verify(bytes(24), bytes(100))
    assert (await bench.saved()).action is None


async def test_verification_without_a_token(bench: Bench) -> None:
    with pytest.raises(Prohibited):
        await bench.tokens.verify(bytes(24), bytes(100))


async def test_outdated_code_leads_back_to_registration(bench: Bench) -> None:
    await bench.register()
    outdated = await verification(bench.world)
    pushes = len(bench.world.accepted())
    await bench.register(OTHER_DEVICE)  # gets another code
    with pytest.raises(RouterRefused):
        await bench.verify_with(outdated)
    assert (await bench.saved()).action is None
    assert (
        await bench.verify_with(await verification(bench.world, pushes, OTHER_DEVICE)) is TokenStatus.ACTIVE
    )


async def test_lost_answer_to_verification_is_resumed(bench: Bench) -> None:
    await bench.register()
    push = await verification(bench.world)
    bench.proxy.lose()
    with pytest.raises(TemporaryFailure):
        await bench.verify_with(push)
    assert (await bench.saved()).action is TokenAction.VERIFY
    await bench.resume()
    assert (await bench.saved()).status is TokenStatus.ACTIVE


async def test_repeated_verification_push_changes_nothing(bench: Bench) -> None:
    await bench.in_state(TokenAction.CHECK)
    assert await bench.verify_with(await verification(bench.world)) is TokenStatus.ACTIVE


@pytest.mark.parametrize(
    ("action", "status"), [(None, TokenStatus.CONFIRMED), (TokenAction.CHECK, TokenStatus.ACTIVE)]
)
async def test_check(bench: Bench, action: TokenAction | None, status: TokenStatus) -> None:
    await bench.in_state(action)
    record = await bench.at_server(await bench.saved())
    assert record is not None
    if record.status is TokenStatus.REGISTERED:  # the provider's answer may still be on its way
        await bring_to(bench.world.server.store, record.key, TokenStatus.CONFIRMED)
    assert await bench.tokens.check() is status
    assert (await bench.saved()).status is status


@pytest.mark.parametrize("period", [-1, 0, 19, 2**16])
async def test_period_that_no_server_takes(bench: Bench, period: int) -> None:
    with pytest.raises(Prohibited, match="20 to 65535"):
        await bench.tokens.register(DEVICE, Mode.PERIODIC, bench.server, period)
    assert await bench.store.read(token_of) is None


async def test_work_on_a_token_that_changed_meanwhile_is_dropped(bench: Bench) -> None:
    stale = await bench.in_state(TokenAction.VERIFY)
    await bench.store.run(lambda tx: put_token(tx, replace(stale, mode=Mode.PERIODIC)))
    await bench.tokens.resume(stale)
    assert await bench.saved() == replace(stale, mode=Mode.PERIODIC)
    await bench.resume()
    after = await bench.saved()
    assert (after.status, after.mode, after.cron) == (TokenStatus.ACTIVE, Mode.PERIODIC, PERIOD)


# The end


async def test_token_that_is_given_up_is_remembered_for_its_server(bench: Bench) -> None:
    token = await bench.in_state(TokenAction.CHECK)
    _, tx = await bench.store.run(delete_token)
    assert tx.notifications == {deletions_at(bench.server)}
    assert await bench.store.read(token_of) is None
    (deleted,) = await bench.store.read(lambda db: deleted_tokens(db, bench.server))
    assert (deleted.token_id, deleted.auth_key) == (token.token_id, token.auth_key)
    with pytest.raises(Prohibited):
        await bench.store.run(delete_token)


async def test_token_that_was_refused_needs_no_deletion(bench: Bench) -> None:
    bench.proxy.refusing = True
    with pytest.raises(TemporaryFailure):
        await bench.register()
    refused = replace(await bench.saved(), action=None)
    await bench.store.run(lambda tx: put_token(tx, refused))
    await bench.store.run(delete_token)
    assert await bench.store.read(lambda db: deleted_tokens(db, bench.server)) == []


async def delete_at_server(bench: Bench) -> None:
    (deleted,) = await bench.store.read(lambda db: deleted_tokens(db, bench.server))
    await bench.tokens.delete(deleted)


async def test_token_whose_id_got_lost_is_deleted_too(bench: Bench) -> None:
    bench.proxy.lose()
    with pytest.raises(TemporaryFailure):
        await bench.register()
    token = await bench.saved()
    assert await bench.at_server(token) is not None
    await bench.store.run(delete_token)
    await delete_at_server(bench)
    assert await bench.at_server(token) is None


async def test_token_whose_id_got_lost_is_deleted_when_there_is_another_device(bench: Bench) -> None:
    bench.proxy.lose()
    with pytest.raises(TemporaryFailure):
        await bench.register()
    before = await bench.saved()
    await bench.register(OTHER_DEVICE)
    await delete_at_server(bench)
    assert await bench.at_server(before) is None
    assert await bench.at_server(await bench.saved()) is not None


async def test_refused_work_is_not_resumed_for_ever(bench: Bench) -> None:
    token = await bench.in_state(TokenAction.VERIFY)
    await bench.store.run(lambda tx: put_token(tx, replace(token, code=b"another code")))
    await bench.resume()
    assert not (await bench.saved()).is_unfinished


def test_secrets_do_not_show() -> None:
    token = Token(
        server=NtfServer(("localhost",), "443", bytes(32)),
        device_token=DEVICE,
        mode=Mode.INSTANT,
        auth_key=Ed25519PrivateKey(b"k" * 32),
        dh_key=X25519PrivateKey(b"d" * 32),
        token_id=EntityId(b"secret id"),
        dh_secret=b"secret secret",
        code=b"secret code",
    )
    for secret in ("secret", "kkkk", "dddd", DEVICE.token.decode()):
        assert secret not in repr(token)


# Another device token, and an answer that is lost


async def test_a_lost_answer_to_the_replacement_is_asked_for_again(bench: Bench) -> None:
    """The server has the new device token, so the agent must not say that the old one works."""
    before = await bench.in_state(TokenAction.CHECK)
    bench.proxy.lose()
    with pytest.raises(TemporaryFailure):
        await bench.register(OTHER_DEVICE)
    token = await bench.saved()
    assert (token.status, token.action) == (TokenStatus.REGISTERED, TokenAction.REPLACE)
    assert token.is_unfinished
    await verification(
        bench.world, device=OTHER_DEVICE
    )  # its code will be replaced by that of the repetition
    pushes = len(bench.world.accepted())
    await bench.resume()
    after = await bench.saved()
    assert (after.device_token, after.replacement) == (OTHER_DEVICE, None)
    assert after.token_id == before.token_id
    push = await verification(bench.world, pushes, OTHER_DEVICE)
    assert await bench.verify_with(push) is TokenStatus.ACTIVE


async def test_going_back_to_the_former_device_replaces_again(bench: Bench) -> None:
    await bench.in_state(TokenAction.CHECK)
    bench.proxy.lose()
    with pytest.raises(TemporaryFailure):
        await bench.register(OTHER_DEVICE)
    pushes = len(bench.world.accepted())
    assert await bench.register(DEVICE) is TokenStatus.REGISTERED
    assert await bench.at_server(await bench.saved()) is not None
    push = await verification(bench.world, pushes, DEVICE)
    assert await bench.verify_with(push) is TokenStatus.ACTIVE


async def test_a_push_that_comes_while_the_device_is_replaced_changes_nothing(bench: Bench) -> None:
    await bench.in_state(None)
    push = await verification(bench.world)
    bench.proxy.lose()
    with pytest.raises(TemporaryFailure):
        await bench.register(OTHER_DEVICE)
    assert await bench.verify_with(push) is TokenStatus.REGISTERED
    assert (await bench.saved()).action is TokenAction.REPLACE
