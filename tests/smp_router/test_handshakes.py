"""TLS and the SMP handshake: versions, encryption, services and everything that is refused."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from protocol.blocks import pad, unpad
from protocol.crypto import Ed448PrivateKey, X25519PublicKey
from protocol.encoding import short
from protocol.errors import (
    TE_BAD_SERVICE,
    TE_IDENTITY,
    TE_VERSION,
    HandshakeError,
    HandshakeErrorType,
)
from protocol.smp_handshake import (
    RouterHello,
    ServiceLogin,
    ServiceRole,
    SmpClientHandshake,
    service_fingerprint,
)
from protocol.smp_messages import End, Nsub, Nsubs, Ok, Ping, Pong, QueueSet, Sok, Soks, Sub, Subs
from protocol.versions import SMP_BLOCK_SIZE, SMP_VERSIONS, VersionRange
from smp_router.config import RouterConfig
from smp_router.router import Router, make_credentials
from tests.smp_router.wire import WireClient, add_notifier, connected, create_queue, login, tls
from transport.certificates import Credentials, KeyAlgorithm, make_service
from transport.streams import TlsStream


def service_credentials() -> Credentials:
    return make_service(datetime.now(UTC))


NO_QUEUES = QueueSet(0, bytes(16))


async def receive_block(stream: TlsStream) -> bytes:
    data = b""
    while len(data) < SMP_BLOCK_SIZE:
        more = await stream.receive()
        assert more, "the router closed the connection"
        data += more
    assert len(data) == SMP_BLOCK_SIZE
    return data


@pytest.mark.parametrize("algorithm", list(KeyAlgorithm))
async def test_both_kinds_of_certificates(algorithm: KeyAlgorithm) -> None:
    credentials = make_credentials("127.0.0.1", algorithm)
    async with Router.start(credentials=credentials) as router, connected(router.address) as client:
        assert router.address.key_hash == credentials.identity
        assert client.version == SMP_VERSIONS.max
        assert await client.ask(Ping()) == Pong()


async def test_hello_offers_versions_chain_and_a_fresh_key(router: Router) -> None:
    keys = set()
    for _ in range(2):
        stream = await tls(router.address)
        hello = RouterHello.parse(unpad(await receive_block(stream)))
        assert (hello.versions.min, hello.versions.max) == (6, 20)
        assert hello.session_id == stream.session_id
        assert tuple(map(bytes, hello.auth.chain)) == stream.peer_chain
        keys.add(bytes(hello.auth.signed_key))
        stream.abort()
    assert len(keys) == 2


async def test_peer_without_alpn_is_offered_the_oldest_version(router: Router) -> None:
    async with connected(router.address, alpn=None) as client:
        assert client.version == 6
        assert await client.ask(Ping()) == Pong()


async def test_an_older_router() -> None:
    async with Router.start(versions=VersionRange(6, 15)) as router:
        service = service_credentials()
        async with connected(router.address, service=service) as client:
            assert client.version == 15
            assert client.connection.params is not None
            assert client.connection.params.service is None
            queue = await create_queue(client)
            await add_notifier(client, queue)
            assert await client.ask(Nsub(), queue.notifier_id, queue.notifier_key) == Ok()
        assert len(router.services) == 0


@pytest.mark.parametrize("encrypt", [True, False])
async def test_block_encryption_is_the_clients_choice(router: Router, encrypt: bool) -> None:
    async with connected(router.address, encrypt=encrypt) as client:
        assert await client.ask(Ping()) == Pong()
        assert (client.connection._sending is not None) == encrypt


async def raw_hello(router: Router, content: bytes, service: Credentials | None = None) -> TlsStream:
    stream = await tls(router.address, service=service)
    await receive_block(stream)
    stream.write(pad(content, SMP_BLOCK_SIZE))
    return stream


async def is_closed(stream: TlsStream) -> bool:
    return await WireClient(stream, None).closed()  # type: ignore[arg-type]


async def test_what_is_no_hello_closes_the_connection(router: Router) -> None:
    key_hash = router.address.key_hash
    version = (19).to_bytes(2, "big")
    for content in (
        b"",
        b"\0",
        version,
        version + short(key_hash)[:-1],
        version + short(key_hash) + b"X",
        version + short(bytes(32)) + b"F0",
        (SMP_VERSIONS.max + 1).to_bytes(2, "big") + short(key_hash) + b"F0",
        (5).to_bytes(2, "big") + short(key_hash),
        version + short(key_hash) + b"F1Q",
        version + short(key_hash) + b"F1N\x00",
        version + short(key_hash) + short(X25519PublicKey(bytes(32)).der) + b"F0",
        secrets.token_bytes(1000),
    ):
        assert await is_closed(await raw_hello(router, content)), content
    stream = await tls(router.address)
    stream.write(b"\xff" * SMP_BLOCK_SIZE)
    assert await is_closed(stream)


async def test_a_silent_peer_is_dropped() -> None:
    async with Router.start(RouterConfig(handshake_timeout=0.05)) as router:
        assert await is_closed(await tls(router.address))


async def test_an_idle_client_is_dropped() -> None:
    async with Router.start(RouterConfig(idle_timeout=0.05)) as router, connected(router.address) as client:
        assert await client.closed()


async def test_clients_with_subscriptions_are_never_idle() -> None:
    """Until another client takes over: then the same silence ends the connection."""
    config = RouterConfig(idle_timeout=1.0)
    async with Router.start(config) as router, connected(router.address) as client:
        queue = await create_queue(client, subscribe=True)
        async with connected(router.address) as idle:
            assert await idle.closed()
        async with connected(router.address) as other:
            assert await other.ask(Sub(), queue.recipient_id, queue.key) == Sok()
            assert await client.event() == (queue.recipient_id, End())
            assert await client.closed()
            assert await other.ask(Ping()) == Pong()


@pytest.mark.parametrize("role", [ServiceRole.NOTIFIER, ServiceRole.MESSAGING])
async def test_subscribed_services_are_never_idle(role: ServiceRole) -> None:
    config, credentials = RouterConfig(idle_timeout=1.0), service_credentials()
    command = Nsubs(NO_QUEUES) if role is ServiceRole.NOTIFIER else Subs(NO_QUEUES)
    async with (
        Router.start(config) as router,
        connected(router.address, service=credentials, role=role) as client,
    ):
        params = client.connection.params
        assert params is not None
        assert params.service is not None
        key = params.service.private_key
        assert await client.ask(command, client.service_id, key) == Soks(NO_QUEUES)
        async with connected(router.address) as idle:
            assert await idle.closed()
        assert await client.ask(Ping()) == Pong()


async def test_service_gets_the_same_id_for_the_same_certificate_and_role(router: Router) -> None:
    ids = []
    one, two = service_credentials(), service_credentials()
    for credentials, role in (
        (one, ServiceRole.NOTIFIER),
        (one, ServiceRole.NOTIFIER),
        (one, ServiceRole.MESSAGING),
        (one, ServiceRole.PROXY),
        (two, ServiceRole.NOTIFIER),
    ):
        async with connected(router.address, service=credentials, role=role) as client:
            ids.append(client.service_id)
            assert await client.ask(Ping()) == Pong()
    assert ids[0] == ids[1]
    assert len(set(ids)) == 4
    assert all(len(service_id) == 24 for service_id in ids)
    fingerprints = {service.fingerprint for service in router.services}
    assert fingerprints == {service_fingerprint(one.chain), service_fingerprint(two.chain)}


async def test_service_may_have_a_chain_of_two(router: Router) -> None:
    chained = make_credentials("127.0.0.1")
    async with connected(router.address, service=chained):
        assert [service.fingerprint for service in router.services] == [chained.identity]


def other_chain(original: ServiceLogin) -> ServiceLogin:
    return replace(original, chain=service_credentials().chain)


def other_signer(original: ServiceLogin) -> ServiceLogin:
    return replace(original, signer=Ed448PrivateKey(secrets.token_bytes(57)))


def longer_chain(original: ServiceLogin) -> ServiceLogin:
    return replace(original, chain=original.chain * 2)


@pytest.mark.parametrize("change", [other_chain, other_signer, longer_chain])
async def test_bad_service_is_told_so(router: Router, change: Callable[[ServiceLogin], ServiceLogin]) -> None:
    with pytest.raises(HandshakeError) as refusal:
        async with connected(router.address, service=service_credentials(), change_login=change):
            pass
    assert refusal.value.error == TE_BAD_SERVICE
    assert len(router.services) == 0


async def service_answer(
    router: Router, version: int, key_hash: bytes, role: ServiceRole, *, in_tls: bool = True
) -> bytes:
    """What the router says in the third block to a hello with a service."""
    credentials = service_credentials()
    stream = await tls(router.address, service=credentials if in_tls else None)
    await receive_block(stream)
    handshake = SmpClientHandshake(stream.session_id, key_hash, stream.peer_chain)
    stream.write(pad(handshake._hello(version, login(credentials, role)), SMP_BLOCK_SIZE))
    answer = unpad(await receive_block(stream))
    assert answer.startswith(b"R") or await is_closed(stream)
    stream.abort()
    return answer


@pytest.mark.parametrize(
    ("version", "role", "in_tls", "error"),
    [
        (19, ServiceRole.NOTIFIER, False, TE_BAD_SERVICE),
        (18, ServiceRole.MESSAGING, True, TE_BAD_SERVICE),
        (SMP_VERSIONS.max + 1, ServiceRole.NOTIFIER, True, TE_VERSION),
    ],
)
async def test_refusals_in_the_third_block(
    router: Router, version: int, role: ServiceRole, in_tls: bool, error: HandshakeErrorType
) -> None:
    answer = await service_answer(router, version, router.address.key_hash, role, in_tls=in_tls)
    assert answer == b"E" + error.text


async def test_service_with_a_wrong_identity_is_told_so(router: Router) -> None:
    answer = await service_answer(router, 19, bytes(32), ServiceRole.NOTIFIER)
    assert answer == b"E" + TE_IDENTITY.text
    assert (await service_answer(router, 16, router.address.key_hash, ServiceRole.NOTIFIER))[:2] == b"R\x18"


async def test_session_key_of_a_service_must_be_ed25519(router: Router) -> None:
    credentials = service_credentials()
    stream = await tls(router.address, service=credentials)
    await receive_block(stream)
    handshake = SmpClientHandshake(stream.session_id, router.address.key_hash, stream.peer_chain)
    signed_in = replace(login(credentials), session_key=Ed448PrivateKey(secrets.token_bytes(57)))  # type: ignore[arg-type]
    stream.write(pad(handshake._hello(19, signed_in), SMP_BLOCK_SIZE))
    assert unpad(await receive_block(stream)) == b"E" + TE_BAD_SERVICE.text
    stream.abort()
