"""Every row of the command table, over real TLS."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from ntf_server.app import App
from ntf_server.config import LimitsConfig
from protocol.blocks import pack_batches
from protocol.crypto import AuthPrivateKey, Ed448PrivateKey, Ed25519PrivateKey, X25519PrivateKey
from protocol.device_token import ApnsToken, Provider
from protocol.encoding import NO_CORR, NO_ENTITY, CorrId, EntityId, short
from protocol.errors import (
    AUTH,
    BLOCK,
    CMD_HAS_AUTH,
    CMD_NO_AUTH,
    CMD_PROHIBITED,
    CMD_SYNTAX,
    CMD_UNKNOWN,
    QUOTA,
    SESSION,
)
from protocol.ntf_commands import (
    Err,
    IdSub,
    IdTkn,
    NtfCommand,
    NtfResponse,
    Ok,
    Ping,
    Pong,
    Schk,
    Sdel,
    Snew,
    Sub,
    Tchk,
    Tcrn,
    Tdel,
    Tkn,
    Tnew,
    Trpl,
    Tvfy,
)
from protocol.statuses import SubState, TokenStatus
from protocol.transmission import authorize, body, encode_transmission
from protocol.versions import VersionRange
from tests import builders
from tests.ntf_server.conftest import active_device, code_of, null_token
from tests.ntf_server.ntf_client import Device, NtfClient
from tests.store.builders import TOKEN_STATUSES, bring_to

KEYS: list[Callable[[], AuthPrivateKey]] = [
    lambda: Ed25519PrivateKey(os.urandom(32)),
    lambda: Ed448PrivateKey(os.urandom(57)),
    lambda: X25519PrivateKey(os.urandom(32)),
]


# Version 1 has no authenticators.
VERSIONS_AND_KEYS = [(version, key) for version in (1, 2, 3) for key in KEYS[: 2 if version == 1 else 3]]


@pytest.mark.parametrize(("version", "make_key"), VERSIONS_AND_KEYS)
async def test_life_of_a_device(app: App, version: int, make_key: Callable[[], AuthPrivateKey]) -> None:
    key = make_key()
    client = await NtfClient.open(app.address, versions=VersionRange(version, version))
    device = await active_device(app, client, key=key)
    assert await device.ask(client, Tchk()) == Tkn(TokenStatus.ACTIVE)
    queue, notifier_key = builders.queue_ntf(1), make_key()
    subscription = await device.subscribe(client, queue, notifier_key)
    status = await client.ask(Schk(), subscription, device.key)
    assert isinstance(status, Sub)
    assert status.status.state in (SubState.NEW, SubState.PENDING)
    assert await device.ask(client, Tcrn(30)) == Ok()
    assert await device.ask(client, Tcrn(0)) == Ok()
    assert await client.ask(Sdel(), subscription, device.key) == Ok()
    assert await client.ask(Schk(), subscription, device.key) == Err(AUTH)
    assert await device.ask(client, Tdel()) == Ok()
    assert await device.ask(client, Tchk()) == Err(AUTH)
    assert await client.ask(Ping()) == Pong()
    client.close()


async def test_no_alpn_means_version_1(app: App) -> None:
    client = await NtfClient.open(app.address, alpn=())
    assert client.params.version == 1
    assert await client.ask(Ping()) == Pong()
    client.close()


async def test_registration_repeated(app: App, client: NtfClient) -> None:
    device = Device.make(null_token())
    first = await device.register(client)
    code = await code_of(app, device)
    assert await device.register(client) == first
    assert await code_of(app, device) == code
    other_dh = Device(device.token, device.key, X25519PrivateKey(os.urandom(32)))
    assert await client.ask(other_dh.tnew, NO_ENTITY, device.key) == Err(AUTH)
    await device.verify(client, code)
    await device.verify(client, code)
    assert await device.ask(client, Tvfy(os.urandom(32))) == Err(AUTH)
    assert await device.register(client) == first
    assert await device.ask(client, Tchk()) == Tkn(TokenStatus.ACTIVE)


async def test_second_registration_takes_the_device_over(app: App, client: NtfClient) -> None:
    first = await active_device(app, client)
    subscription = await first.subscribe(client, builders.queue_ntf(1), builders.ed25519())
    second = Device.make(first.token)
    await second.register(client)
    assert second.token_id != first.token_id
    assert await first.ask(client, Tchk()) == Tkn(TokenStatus.ACTIVE)  # not verified yet: nothing changed
    await second.verify(client, await code_of(app, second))
    assert await first.ask(client, Tchk()) == Err(AUTH)
    assert await client.ask(Schk(), subscription, first.key) == Err(AUTH)
    await second.subscribe(client, builders.queue_ntf(1), builders.ed25519())


async def test_replacing_a_device_token_keeps_subscriptions(app: App, client: NtfClient) -> None:
    device = await active_device(app, client)
    subscription = await device.subscribe(client, builders.queue_ntf(1), builders.ed25519())
    old_code = await code_of(app, device)
    device.token = null_token()
    assert await device.ask(client, Trpl(device.token)) == Ok()
    code = await code_of(app, device)
    assert code != old_code
    status = await device.ask(client, Tchk())
    assert status in (Tkn(TokenStatus.REGISTERED), Tkn(TokenStatus.CONFIRMED))
    assert await device.ask(client, Tvfy(old_code)) == Err(AUTH)
    await device.verify(client, code)
    assert isinstance(await client.ask(Schk(), subscription, device.key), Sub)


async def test_subscription_repeated(app: App, client: NtfClient) -> None:
    device = await active_device(app, client)
    queue, key = builders.queue_ntf(1), builders.ed25519()
    subscription = await device.subscribe(client, queue, key)
    assert await device.subscribe(client, queue, key) == subscription
    other_key = Ed25519PrivateKey(os.urandom(32))
    assert await client.ask(Snew(device.token_id, queue, other_key), NO_ENTITY, device.key) == Err(AUTH)
    thief = await active_device(app, client)
    assert await client.ask(Snew(thief.token_id, queue, key), NO_ENTITY, thief.key) == Err(AUTH)


@pytest.mark.parametrize("minutes", [1, 19])
async def test_cron_below_the_minimum(app: App, client: NtfClient, minutes: int) -> None:
    device = await active_device(app, client)
    assert await device.ask(client, Tcrn(minutes)) == Err(QUOTA)


async def test_test_provider_is_refused_unless_allowed(app: App, client: NtfClient) -> None:
    device = Device.make(ApnsToken(Provider.APNS_TEST, b"ab" * 32))
    assert await client.ask(device.tnew, NO_ENTITY, device.key) == Err(CMD_PROHIBITED)
    other = await active_device(app, client)
    assert await other.ask(client, Trpl(device.token)) == Err(CMD_PROHIBITED)
    assert await other.ask(client, Tchk()) == Tkn(TokenStatus.ACTIVE)


async def test_a_subscription_is_deleted_once(app: App, client: NtfClient) -> None:
    """Both commands of a block are authorised before the first is carried out."""
    device = await active_device(app, client)
    subscription = await device.subscribe(client, builders.queue_ntf(1), builders.ed25519())
    assert await client.ask_many([(Sdel(), subscription, device.key)] * 2) == [Ok(), Err(AUTH)]


# What each command answers in each status of the token. TVFY is sent with the right code.

DEAD = [status for status in TOKEN_STATUSES if status.is_invalid]
WAITING = [TokenStatus.REGISTERED, TokenStatus.CONFIRMED]


def expected(status: TokenStatus, command: type) -> type[NtfResponse] | Err:
    if command is Tvfy and status in DEAD:
        return Err(AUTH)
    if command is Snew and status in WAITING:
        return Err(AUTH)
    return {Tnew: IdTkn, Tchk: Tkn, Snew: IdSub, Schk: Sub}.get(command, Ok)


@pytest.mark.parametrize("status", TOKEN_STATUSES)
async def test_commands_in_each_status(app: App, client: NtfClient, status: TokenStatus) -> None:
    for command in (Tnew, Tvfy, Tchk, Trpl, Tcrn, Snew, Schk, Sdel, Tdel):
        device = await active_device(app, client)
        number = int.from_bytes(os.urandom(8), "big")
        subscription = await device.subscribe(client, builders.queue_ntf(number), builders.ed25519())
        record = await app.store.token_by_device(device.token, device.key.public.der)
        assert record is not None
        await bring_to(app.store, record.key, status)
        message, entity = await _request(app, device, subscription, command)
        answer = await client.ask(message, entity, device.key)
        wanted = expected(status, command)
        assert answer == wanted if isinstance(wanted, Err) else isinstance(answer, wanted), (command, answer)
        if command is Tnew and status in DEAD:
            checked = await device.ask(client, Tchk())
            assert checked in (Tkn(TokenStatus.REGISTERED), Tkn(TokenStatus.CONFIRMED))


async def test_a_token_that_was_never_verified_does_not_subscribe(app: App, client: NtfClient) -> None:
    """Not by being called invalid, for which a malformed address is enough, nor by registering again."""
    device = Device.make(null_token())
    for status in DEAD:
        await device.register(client)
        record = await app.store.token_by_device(device.token, device.key.public.der)
        assert record is not None
        await bring_to(app.store, record.key, status)
        snew = Snew(device.token_id, builders.queue_ntf(1), builders.ed25519())
        assert await device.ask(client, Tchk()) == Tkn(status)
        assert await client.ask(snew, NO_ENTITY, device.key) == Err(AUTH)
    assert (await app.store.counts()).servers == 0


async def _request(
    app: App, device: Device, subscription: EntityId, command: type
) -> tuple[NtfCommand, EntityId]:
    number = int.from_bytes(os.urandom(8), "big")
    requests: dict[type, tuple[NtfCommand, EntityId]] = {
        Tnew: (device.tnew, NO_ENTITY),
        Tvfy: (Tvfy(await code_of(app, device)), device.token_id),
        Tchk: (Tchk(), device.token_id),
        Trpl: (Trpl(null_token()), device.token_id),
        Tcrn: (Tcrn(20), device.token_id),
        Tdel: (Tdel(), device.token_id),
        Snew: (Snew(device.token_id, builders.queue_ntf(number), builders.ed25519()), NO_ENTITY),
        Schk: (Schk(), subscription),
        Sdel: (Sdel(), subscription),
    }
    return requests[command]


@pytest.mark.parametrize("make_key", KEYS, ids=["ed25519", "ed448", "x25519"])
async def test_unknown_entities_and_wrong_keys(
    app: App, client: NtfClient, make_key: Callable[[], AuthPrivateKey]
) -> None:
    device = await active_device(app, client)
    subscription = await device.subscribe(client, builders.queue_ntf(1), builders.ed25519())
    unknown = EntityId(os.urandom(24))
    for command in (Tvfy(b"x"), Tchk(), Trpl(null_token()), Tdel(), Tcrn(0)):
        assert await client.ask(command, unknown, make_key()) == Err(AUTH)
        assert await client.ask(command, device.token_id, make_key()) == Err(AUTH)
    for subscription_command in (Schk(), Sdel()):
        assert await client.ask(subscription_command, unknown, make_key()) == Err(AUTH)
        assert await client.ask(subscription_command, subscription, make_key()) == Err(AUTH)
        assert await client.ask(subscription_command, device.token_id, device.key) == Err(AUTH)
    for token_id in (unknown, device.token_id):
        snew = Snew(token_id, builders.queue_ntf(2), builders.ed25519())
        assert await client.ask(snew, NO_ENTITY, make_key()) == Err(AUTH)
    foreign = Device.make(null_token())
    assert await client.ask(foreign.tnew, NO_ENTITY, make_key()) == Err(AUTH)


async def test_credentials(app: App, client: NtfClient) -> None:
    device = await active_device(app, client)
    snew = Snew(device.token_id, builders.queue_ntf(1), builders.ed25519())
    for command in (device.tnew, snew):
        assert await client.ask(command) == Err(CMD_NO_AUTH)
        assert await client.ask(command, device.token_id, device.key) == Err(CMD_HAS_AUTH)
    for entity_command in (Tvfy(b""), Tchk(), Trpl(null_token()), Tdel(), Tcrn(0), Schk(), Sdel()):
        assert await client.ask(entity_command, device.token_id) == Err(CMD_NO_AUTH)
        assert await client.ask(entity_command, NO_ENTITY, device.key) == Err(CMD_NO_AUTH)
    assert await client.ask(Ping(), device.token_id) == Err(CMD_HAS_AUTH)
    assert await client.ask(Ping(), NO_ENTITY, device.key) == Err(CMD_HAS_AUTH)


def raw(client: NtfClient, command: bytes, key: AuthPrivateKey, entity: EntityId = NO_ENTITY) -> bytes:
    corr_id = CorrId(os.urandom(24))
    content = body(corr_id, entity, command)
    text = short(client.params.session_id) + content
    return encode_transmission(client.params, authorize(client.params, key, corr_id, text), None, content)


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (b"", CMD_UNKNOWN),
        (b"NOPE", CMD_UNKNOWN),
        (b"tchk", CMD_UNKNOWN),
        (b"TCHK ", CMD_SYNTAX),
        (b"TCHK x", CMD_SYNTAX),
        (b"TVFY", CMD_SYNTAX),
        (b"TVFY \x05ab", CMD_SYNTAX),
        (b"TCRN \x00", CMD_SYNTAX),
        (b"TCRN \x00\x14\x00", CMD_SYNTAX),
        (b"TNEW TXX\x00", CMD_SYNTAX),
        (b"SNEW S", CMD_SYNTAX),
    ],
)
async def test_broken_commands(app: App, client: NtfClient, command: bytes, error: object) -> None:
    device = await active_device(app, client)
    client.send_content(pack_batches([raw(client, command, device.key, device.token_id)], 512)[0])
    (answer,) = await client.receive(1)
    assert answer.message == Err(error)  # type: ignore[arg-type]
    assert await client.ask(Ping()) == Pong()


async def test_batch_with_a_broken_transmission_in_the_middle(app: App, client: NtfClient) -> None:
    device = await active_device(app, client)
    good = [raw(client, b"TCHK", device.key, device.token_id) for _ in range(2)]
    ping = encode_transmission(client.params, b"", None, body(CorrId(b"c"), NO_ENTITY, b"PING"))
    for broken in (b"", b"\x40abc", b"\x00\x05ab"):
        (content,) = pack_batches([good[0], broken, ping, good[1]], 512)
        client.send_content(content)
        answers = await client.receive(4)
        assert [a.message for a in answers] == [
            Tkn(TokenStatus.ACTIVE),
            Err(BLOCK),
            Pong(),
            Tkn(TokenStatus.ACTIVE),
        ]
        assert (answers[1].corr_id, answers[1].entity_id) == (NO_CORR, NO_ENTITY)
        assert answers[2].corr_id == b"c"


async def test_authorisation_of_impossible_length(client: NtfClient) -> None:
    entity, corr_id = EntityId(b"e" * 24), CorrId(b"c" * 24)
    client.send_content(pack_batches([short(b"x" * 65) + body(corr_id, entity, b"TCHK")], 512)[0])
    (answer,) = await client.receive(1)
    assert (answer.message, answer.corr_id, answer.entity_id) == (Err(BLOCK), corr_id, entity)


async def test_wrong_session_id_in_version_1(app: App) -> None:
    client = await NtfClient.open(app.address, versions=VersionRange(1, 1))
    content = b"\x00" + short(b"s" * 32) + body(CorrId(b"c"), NO_ENTITY, b"PING")
    client.send_content(content)
    (answer,) = await client.receive(1)
    assert (answer.message, answer.corr_id) == (Err(SESSION), b"c")
    client.close()


async def test_large_batches_keep_their_order(app: App, client: NtfClient) -> None:
    device = await active_device(app, client)
    ids = [await device.subscribe(client, builders.queue_ntf(n), builders.ed25519()) for n in range(20)]
    mixed: list[tuple[NtfCommand, EntityId, AuthPrivateKey | None]] = []
    for subscription in ids:
        mixed.append((Schk(), subscription, device.key))
        mixed.append((Sdel(), subscription, device.key))
        mixed.append((Schk(), subscription, device.key))
        mixed.append((Ping(), NO_ENTITY, None))
    answers = await client.ask_many(mixed)
    for index in range(0, len(answers), 4):
        assert isinstance(answers[index], Sub)
        assert answers[index + 1 : index + 4] == [Ok(), Err(AUTH), Pong()]


async def test_verification_pushes_of_a_device_are_rate_limited(client: NtfClient) -> None:
    device = Device.make(null_token())
    most = LimitsConfig().device_verifications_per_hour
    answers = [await client.ask(device.tnew, NO_ENTITY, device.key) for _ in range(most + 1)]
    assert Err(QUOTA) not in answers[:-1]
    assert answers[-1] == Err(QUOTA)
    assert isinstance(answers[0], IdTkn)
    other = Device.make(null_token())
    assert isinstance(await client.ask(other.tnew, NO_ENTITY, other.key), IdTkn)
