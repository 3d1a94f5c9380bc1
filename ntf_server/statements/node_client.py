"""One connection to a statement-store node: JSON-RPC 2.0 over WebSocket."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from ntf_server.metrics import counter

CONNECT_TIMEOUT = 20.0
CALL_TIMEOUT = 30.0
"Seconds in which nothing comes from the node: an answer stands behind what it has stored."
HEARTBEAT = 30.0
"Seconds of silence after which the node is asked for a sign of life; without one the connection ends."
MAX_MESSAGE = 16 * 1024 * 1024
"Bytes: a batch of stored statements; a node that sends more is disconnected."
NOTIFICATIONS = frozenset({"statement_statement", "statement_statements"})

MALFORMED = counter("statements_malformed_messages", "Messages of the statement store that make no sense")

OnStatements = Callable[[list[bytes]], Awaitable[None]]
"Takes encoded statements; nothing more is read until it returns."


class NodeError(Exception):
    """The node cannot be reached, went away, or refused a call; the message names no secret."""


class NodeClient:
    """Calls and notifications of one connection. `run` reads until the connection ends."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, on_statements: OnStatements) -> None:
        self._socket = socket
        self._on_statements = on_statements
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._heard = 0
        self._is_taking = False
        self._closed = False

    async def subscribe(self, topics: Collection[bytes] | None) -> str:
        """The name of a subscription to any of the topics; None: to every statement."""
        asked: Any = "any" if topics is None else {"matchAny": [f"0x{topic.hex()}" for topic in topics]}
        name = await self._call("statement_subscribeStatement", asked)
        if not isinstance(name, str | int):
            raise NodeError("the node named no subscription")
        return str(name)

    async def unsubscribe(self, name: str) -> None:
        await self._call("statement_unsubscribeStatement", name)

    async def run(self) -> None:
        """Raises NodeError when the connection ends, whatever ended it."""
        try:
            async for message in self._socket:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    MALFORMED.inc()
                    continue
                await self._handle(message.data)
        except aiohttp.ClientError as error:
            raise NodeError(f"the connection failed: {type(error).__name__}") from None
        finally:
            self._end_calls()
        raise NodeError("the node closed the connection")

    def _end_calls(self) -> None:
        self._closed = True
        for future in self._calls.values():
            if not future.done():
                future.set_exception(NodeError("the connection ended"))

    async def _call(self, method: str, parameter: Any) -> Any:
        if self._closed:
            raise NodeError("the connection ended")
        number = next(self._numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        request = {"jsonrpc": "2.0", "id": number, "method": method, "params": [parameter]}
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                await self._socket.send_json(request)
            return await self._answer(future)
        except TimeoutError:
            raise NodeError(f"no answer to {method}") from None
        except (ConnectionError, aiohttp.ClientError):
            raise NodeError("the connection ended") from None
        finally:
            del self._calls[number]

    async def _answer(self, future: asyncio.Future[Any]) -> Any:
        """TimeoutError if nothing came for so long, though we listened."""
        while True:
            heard = self._heard
            await asyncio.wait([future], timeout=CALL_TIMEOUT)
            if future.done():
                return future.result()
            if self._heard == heard and not self._is_taking:
                raise TimeoutError

    async def _handle(self, text: str) -> None:
        self._heard += 1
        statements: list[bytes] = []
        try:
            message = json.loads(text)
            if message.get("method") in NOTIFICATIONS:
                statements = _statements(message["params"]["result"])
            else:
                self._answered(message)
        except _NONSENSE:
            MALFORMED.inc()
        if statements:
            self._is_taking = True
            await self._on_statements(statements)
            self._is_taking = False

    def _answered(self, message: dict[str, Any]) -> None:
        future = self._calls.get(message["id"])
        if future is None or future.done():
            MALFORMED.inc()
        elif "result" in message:
            future.set_result(message["result"])
        else:
            future.set_exception(
                NodeError(f"the node refused the call: error {int(message['error']['code'])}")
            )


_NONSENSE = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)
"What looking into JSON of another shape than expected can raise."


def _statements(result: dict[str, Any]) -> list[bytes]:
    """Those of a notification that are hex at all; whether they are statements is seen later."""
    found = []
    for text in result["data"]["statements"]:
        try:
            found.append(bytes.fromhex(text.removeprefix("0x")))
        except _NONSENSE:
            MALFORMED.inc()
    return found


@asynccontextmanager
async def connected(url: str, on_statements: OnStatements) -> AsyncIterator[NodeClient]:
    """NodeError if there is no connection within `CONNECT_TIMEOUT`."""
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                socket = await session.ws_connect(url, heartbeat=HEARTBEAT, max_msg_size=MAX_MESSAGE)
        except TimeoutError:
            raise NodeError("no connection in time") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NodeError(f"no connection: {type(error).__name__}") from None
        async with socket:
            yield NodeClient(socket, on_statements)
