"""A statement gateway with everything around it on this machine: a node, a push provider, a client's app."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import sr25519
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from ntf_demo.fake_node.server import FakeNode
from ntf_demo.fake_push.recorder import RecordedPush
from ntf_demo.fake_push.server import FakePushConfig, FakePushServer
from ntf_demo.fresh_server import config_dir, fresh_config
from ntf_server.app import App, running
from ntf_server.clock import Clock, SystemClock
from ntf_server.config import LOCALHOST, Config, FcmConfig, StatementsConfig
from ntf_server.statements.openapi import RULES, SUBSCRIPTIONS
from ntf_server.statements.signed_requests import SCHEME, Request, body_hash, signing_text
from protocol.statements import MAX_TOPICS, Scheme, Signed, Statement, encode_statement, signed_bytes
from transport.hosts import named_host

HOUR = 3600
ACTIVE_PAUSE = 0.02
"Seconds between looks whether rules are active."
KeyPair = tuple[bytes, bytes]
"An sr25519 public key and its secret."


def key_pair(name: str) -> KeyPair:
    pair: KeyPair = sr25519.pair_from_seed(name.encode().ljust(32, b"."))
    return pair


def signed_statement(
    pair: KeyPair, *topics: bytes, data: bytes = b"sealed", expires_at: int | None = None
) -> bytes:
    """An encoded statement, good for an hour."""
    unsigned = Statement(
        expiry=(int(SystemClock().now()) + HOUR if expires_at is None else expires_at) << 32,
        topics=(*topics, *[None] * (MAX_TOPICS - len(topics))),
        data=data,
    )
    signature = sr25519.sign(pair, signed_bytes(unsigned))
    return encode_statement(unsigned._replace(proof=Signed(Scheme.SR25519, signature, pair[0])))


class Answer(NamedTuple):
    status: int
    body: Any


@dataclass
class GatewayClient:
    """A client's app: signs what it asks for."""

    _session: aiohttp.ClientSession
    _url: str
    pair: KeyPair = field(repr=False)

    def authorization(self, method: str, path: str, body: bytes, at: int | None = None) -> str:
        at = int(SystemClock().now()) if at is None else at
        request = Request(named_host(urlsplit(self._url).netloc), method, path, body_hash(body).digest())
        signature = sr25519.sign(self.pair, signing_text(request, at))
        return f"{SCHEME} {self.pair[0].hex()}:{at}:{signature.hex()}"

    async def send(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        async with self._session.request(
            method, self._url + path, data=io.BytesIO(body), headers=headers
        ) as response:
            text = await response.text()
            return Answer(response.status, json.loads(text) if text else None)

    async def ask(self, method: str, path: str, value: Any = None) -> Answer:
        body = b"" if value is None else json.dumps(value).encode()
        headers = {"Authorization": self.authorization(method, path, body)}
        return await self.send(method, path, body, headers)

    async def register(self, kind: str, token: str, **more: Any) -> str:
        """The subscription's id."""
        asked = {"notificationType": kind, "token": token, **more}
        answer = await self.ask("POST", SUBSCRIPTIONS, asked)
        assert answer.status == 201, answer
        subscription_id: str = answer.body["subscription_id"]
        return subscription_id

    async def allow(self, subscription_id: str, *rules: tuple[bytes, bytes]) -> None:
        """Exactly these (sender, topic). Statements published from now on are new for them."""
        await self.replace_rules(subscription_id, *rules)
        while not await self._are_active(subscription_id):  # noqa: ASYNC110 -- another process does it
            await asyncio.sleep(ACTIVE_PAUSE)

    async def _are_active(self, subscription_id: str) -> bool:
        listed = await self.ask("GET", SUBSCRIPTIONS)
        assert listed.status == 200, listed
        return all(
            rule["state"] == "active"
            for one in listed.body
            if one["subscription_id"] == subscription_id
            for rule in one["rules"]
        )

    async def replace_rules(self, subscription_id: str, *rules: tuple[bytes, bytes]) -> None:
        """Exactly these, whether or not the node was asked what it has stored."""
        listed = [{"sender_pubkey": sender.hex(), "topic": topic.hex()} for sender, topic in rules]
        answer = await self.ask("PUT", RULES, {"subscription_id": subscription_id, "rules": listed})
        assert answer.status == 204, answer


@dataclass
class GatewayWorld:
    """A node, a push provider and a configuration; `serving` as often as a test restarts the server."""

    node: FakeNode
    push: FakePushServer
    folder: Path
    config: Config
    _session: aiohttp.ClientSession
    server: App = field(init=False)

    @asynccontextmanager
    async def serving(self, clock: Clock | None = None) -> AsyncIterator[App]:
        async with running(App(config_dir(self.folder), self.config, clock=clock)) as self.server:
            yield self.server

    def client(self, name: str, port: int = 0) -> GatewayClient:
        """`port`: of a server in another process."""
        url = f"http://{LOCALHOST}:{port or self.server.gateway_port}"
        return GatewayClient(self._session, url, key_pair(name))

    @property
    def accepted(self) -> list[RecordedPush]:
        """Pushes that the provider took, oldest first."""
        return [push for push in self.push.pushes if push.status < 300]


@asynccontextmanager
async def gateway_parts(
    folder: Path, *, postgres_url: str = "", **settings: Any
) -> AsyncIterator[GatewayWorld]:
    """All on free ports, with everything that is written in `folder`. `settings` are of [STATEMENTS]."""
    async with (
        FakeNode() as node,
        FakePushServer(FakePushConfig(folder=folder / "push", body_limit=4096)) as push,
        aiohttp.ClientSession() as session,
    ):
        config = _with_gateway(fresh_config(folder, push, postgres_url), push, folder, node.url, **settings)
        yield GatewayWorld(node, push, folder, config, session)


@asynccontextmanager
async def gateway_world(folder: Path, **settings: Any) -> AsyncIterator[GatewayWorld]:
    """With the server."""
    async with gateway_parts(folder, **settings) as world, world.serving():
        yield world


def _with_gateway(config: Config, push: FakePushServer, folder: Path, node: str, **settings: Any) -> Config:
    """Pushes to Google go to the fake provider, too."""
    origin = f"https://{LOCALHOST}:{push.port}"
    return replace(
        config,
        FCM=FcmConfig(
            service_account_file=_service_account(folder / "account.json", f"{origin}/token"),
            endpoint=origin,
            ca_file=push.ca_file,
        ),
        STATEMENTS=replace(
            StatementsConfig(enabled=True, node=node, port=0, apns="test", requests_per_minute=10_000),
            **settings,
        ),
    )


def _service_account(path: Path, token_uri: str) -> Path:
    key = rsa.generate_private_key(65537, 2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {"client_email": "gateway@example.org", "project_id": "demo"}
    path.write_text(json.dumps(account | {"private_key": key.decode(), "token_uri": token_uri}))
    return path
