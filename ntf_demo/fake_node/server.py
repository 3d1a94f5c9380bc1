"""JSON-RPC over WebSocket: submit a statement, subscribe to topics, hear of what is stored and what comes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import WSMsgType, web

from ntf_server.config import LOCALHOST
from protocol.errors import DecodeError
from protocol.statements import FIELD_SIZE, Statement, decode_statement, statement_hash

BATCH = 100
"Stored statements sent in one notification."
MAX_ANY, MAX_ALL = 128, 4
"Topics of a subscription to any, or to all of them."
MAX_MESSAGE = 4 * 1024 * 1024
INVALID_PARAMS = -32602
METHOD_NOT_FOUND = -32601
PARSE_ERROR = -32700


class RpcError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Filter:
    """Statements with one of the topics, or with all of them; without topics every one."""

    topics: frozenset[bytes] = frozenset()
    all_of_them: bool = False

    def wants(self, statement: Statement) -> bool:
        if self.all_of_them:
            return self.topics.issubset(statement.named_topics)
        return not self.topics or not self.topics.isdisjoint(statement.named_topics)


@dataclass(slots=True, eq=False)
class NodeConnection:
    """One connection and its subscriptions."""

    socket: web.WebSocketResponse
    filters: dict[str, Filter] = field(default_factory=dict)


class FakeNode:
    """`async with` serves; what was submitted is kept over `drop_clients`, as a node does over a restart."""

    def __init__(self, host: str = LOCALHOST, port: int = 0) -> None:
        self._host = host
        self.port = port
        self._stored: dict[bytes, tuple[bytes, Statement]] = {}
        self._clients: set[NodeConnection] = set()
        self._names = itertools.count(1)
        self._runner: web.AppRunner | None = None
        self.subscribed = 0
        "Subscriptions ever made."
        self.lets_in = asyncio.Event()
        "While it is not set, new connections wait."
        self.lets_in.set()
        self.says_remaining = True
        "With what is stored, how much of it is still to come."

    @property
    def url(self) -> str:
        return f"ws://{self._host}:{self.port}"

    @property
    def subscriptions(self) -> int:
        return sum(len(client.filters) for client in self._clients)

    @property
    def watched(self) -> frozenset[bytes]:
        """Topics that subscriptions name."""
        named = (wanted.topics for client in self._clients for wanted in client.filters.values())
        return frozenset().union(*named)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """On the same port as before, if there was one."""
        app = web.Application()
        app.router.add_get("/", self._serve)
        self._runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self.drop_clients()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def drop_clients(self) -> None:
        for client in list(self._clients):
            await client.socket.close()

    async def submit(self, encoded: bytes) -> str:
        """Store a statement and tell all who asked for it; what became of it."""
        try:
            statement = decode_statement(encoded)
        except DecodeError:
            return "invalid"
        name = statement_hash(encoded)
        if name in self._stored:
            return "known"
        self._stored[name] = (encoded, statement)
        for client in list(self._clients):
            for subscription, wanted in list(client.filters.items()):
                if wanted.wants(statement):
                    await _notify(client, subscription, [encoded])
        return "new"

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        await self.lets_in.wait()
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE)
        await socket.prepare(request)
        client = NodeConnection(socket)
        self._clients.add(client)
        try:
            async for message in socket:
                if message.type is WSMsgType.TEXT:
                    await self._answer(client, message.data)
        finally:
            self._clients.discard(client)
        return socket

    async def _answer(self, client: NodeConnection, text: str) -> None:
        call: Any = None
        try:
            call = json.loads(text)
            method, parameters = call["method"], call.get("params", [])
            answer = {"result": await self._call(client, method, parameters)}
        except RpcError as error:
            answer = {"error": {"code": error.code, "message": error.message}}
        except (ValueError, KeyError, TypeError, AttributeError):
            answer = {"error": {"code": PARSE_ERROR, "message": "parse error"}}
        number = call.get("id") if isinstance(call, dict) else None
        with contextlib.suppress(ConnectionError):
            await client.socket.send_json({"jsonrpc": "2.0", "id": number, **answer})
        if "result" in answer and method == "statement_subscribeStatement":
            await self._replay(client, answer["result"])

    async def _call(self, client: NodeConnection, method: str, parameters: list[Any]) -> Any:
        handlers: dict[str, Callable[[NodeConnection, Any], Awaitable[Any]]] = {
            "statement_subscribeStatement": self._subscribe,
            "statement_unsubscribeStatement": self._unsubscribe,
            "statement_submit": self._submit,
        }
        handler = handlers.get(method)
        if handler is None:
            raise RpcError(METHOD_NOT_FOUND, "method not found")
        if not isinstance(parameters, list) or len(parameters) != 1:
            raise RpcError(INVALID_PARAMS, "one parameter is needed")
        return await handler(client, parameters[0])

    async def _subscribe(self, client: NodeConnection, parameter: Any) -> str:
        try:
            wanted = _filter(parameter)
        except ValueError:
            raise RpcError(INVALID_PARAMS, "invalid topic filter") from None
        name = f"sub{next(self._names)}"
        client.filters[name] = wanted
        self.subscribed += 1
        return name

    async def _unsubscribe(self, client: NodeConnection, name: Any) -> bool:
        return isinstance(name, str) and client.filters.pop(name, None) is not None

    async def _submit(self, client: NodeConnection, parameter: Any) -> dict[str, str]:
        try:
            return {"status": await self.submit(_unhex(parameter))}
        except ValueError:
            raise RpcError(INVALID_PARAMS, "a statement is 0x and hex") from None

    async def _replay(self, client: NodeConnection, name: str) -> None:
        """What was stored before the subscription."""
        wanted = client.filters.get(name)
        if wanted is None:
            return
        found = [encoded for encoded, statement in self._stored.values() if wanted.wants(statement)]
        for start in range(0, max(1, len(found)), BATCH):
            remaining = max(0, len(found) - start - BATCH) if self.says_remaining else None
            await _notify(client, name, found[start : start + BATCH], remaining)


async def _notify(
    client: NodeConnection, subscription: str, encoded: list[bytes], remaining: int | None = None
) -> None:
    data: dict[str, Any] = {"statements": [f"0x{item.hex()}" for item in encoded]}
    if remaining is not None:
        data["remaining"] = remaining
    message = {
        "jsonrpc": "2.0",
        "method": "statement_statement",
        "params": {"subscription": subscription, "result": {"event": "newStatements", "data": data}},
    }
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(10):
            await client.socket.send_json(message)


def _filter(parameter: Any) -> Filter:
    """ValueError for what no node takes."""
    if parameter == "any":
        return Filter()
    match parameter:
        case {"matchAny": listed, **more} if not more:
            return Filter(_topics(listed, MAX_ANY))
        case {"matchAll": listed, **more} if not more:
            return Filter(_topics(listed, MAX_ALL), all_of_them=True)
    raise ValueError


def _topics(listed: Any, limit: int) -> frozenset[bytes]:
    if not isinstance(listed, list) or not 0 < len(listed) <= limit:
        raise ValueError
    topics = frozenset(map(_unhex, listed))
    if any(len(topic) != FIELD_SIZE for topic in topics):
        raise ValueError
    return topics


def _unhex(text: Any) -> bytes:
    """From `0x…`; ValueError for anything else."""
    if not isinstance(text, str) or not text.startswith("0x"):
        raise ValueError
    return bytes.fromhex(text[2:])
