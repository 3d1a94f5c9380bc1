"""One connection to a statement-store node: JSON-RPC 2.0 over WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp

from ntf_server.metrics import counter
from ntf_server.statements.json_scanner import NotJson, Scanner
from protocol.hiding import hides_bytes

CONNECT_TIMEOUT = 20.0
CALL_TIMEOUT = 30.0
"Seconds in which nothing comes from the node: an answer stands behind what it has stored."
HEARTBEAT = 30.0
"Seconds of silence after which the node is asked for a sign of life;"
PONG_SHARE = 0.5
"without one within this part of them, as the library has it, the connection ends."
MAX_MESSAGE = 16 * 1024 * 1024
"Bytes: a batch of stored statements; a node that sends more is disconnected."
LONG_MESSAGE = 64 * 1024
"Characters: longer messages are notifications,"
READ_AT_ONCE = 64 * 1024
"of which so many are read in one turn of the event loop: a millisecond or so."
VALUE_COST = 512
"Characters that reading a statement, or anything else, costs besides its length."
LONGEST_VALUE = 4096
"Characters of whatever else is in a notification."
NOTIFICATIONS = frozenset({"statement_statement", "statement_statements"})

MALFORMED = counter("statements_malformed_messages", "Messages of the statement store that make no sense")

REPLAY_SILENCE = 5.0
"Seconds in which nothing comes, after which a node is taken to have sent all that it had stored."
REPLAY_LIMIT = 60.0
"Seconds after which it is taken so in any case."
MAX_REPLAYED = 10_000
"Subscriptions of which it is remembered that the node has sent all that it had stored."

OnStatements = Callable[[list[bytes], bool], Awaitable[None]]
"Takes encoded statements, and whether the node had stored them; nothing more is read until it returns."


class NodeError(Exception):
    """The node cannot be reached, went away, or refused a call; the message names no secret."""


class NodeSilent(NodeError):
    """The node sent nothing for `seconds`, although the connection seemed to be open."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


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
        self._subscribed: set[str] = set()
        self._replayed: dict[str, None] = {}
        self._says_remaining = False
        "The node says how many stored statements are still to come; one that does not is silent after them."
        self._progress = asyncio.Event()

    async def replayed(self, name: str) -> None:
        """Return when the node has sent all that it had stored, and it was taken."""
        deadline = asyncio.get_running_loop().time() + REPLAY_LIMIT
        while name not in self._replayed:
            heard = self._heard
            self._progress.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPLAY_SILENCE):
                    await self._progress.wait()
            if self._closed:
                raise NodeError("the connection ended")
            is_silent = self._heard == heard and not self._is_taking
            if is_silent:
                for subscribed in self._subscribed:
                    self._note_replayed(subscribed)
            if is_silent or asyncio.get_running_loop().time() > deadline:
                self._note_replayed(name)
                return

    async def subscribe(self, topics: Collection[bytes] | None) -> str:
        """The name of a subscription to any of the topics; None: to every statement."""
        asked: Any = "any" if topics is None else {"matchAny": [f"0x{topic.hex()}" for topic in topics]}
        name = await self._call("statement_subscribeStatement", asked)
        if not isinstance(name, str | int):
            raise NodeError("the node named no subscription")
        self._subscribed.add(str(name))
        return str(name)

    async def unsubscribe(self, name: str) -> None:
        await self._call("statement_unsubscribeStatement", name)
        self._subscribed.discard(name)
        self._replayed.pop(name, None)

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
        if isinstance(self._socket.exception(), aiohttp.ServerTimeoutError):
            raise NodeSilent("the node fell silent", HEARTBEAT * (1 + PONG_SHARE))
        raise NodeError("the node closed the connection")

    def _end_calls(self) -> None:
        self._closed = True
        self._progress.set()
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
            raise NodeSilent(f"no answer to {method}", CALL_TIMEOUT) from None
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
        self._is_taking = True
        try:
            told = await self._read(text)
            self._says_remaining |= told.is_stored
            if told.statements:
                await self._on_statements(told.statements, told.is_stored or not self._is_new(told))
        finally:
            self._is_taking = False
        if told.is_last:
            self._note_replayed(told.subscription)
        self._progress.set()

    def _is_new(self, told: Told) -> bool:
        return self._says_remaining or told.subscription in self._replayed

    def _note_replayed(self, name: str) -> None:
        if len(self._replayed) < MAX_REPLAYED:
            self._replayed[name] = None

    async def _read(self, text: str) -> Told:
        """What a message says about statements. Long messages are read a little at a time."""
        try:
            if len(text) > LONG_MESSAGE:
                return await _read_notification(text)
            message = json.loads(text)
            if message.get("method") in NOTIFICATIONS:
                return _told(message["params"])
            self._answered(message)
        except _NONSENSE:
            MALFORMED.inc()
        return Told([])

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


_NONSENSE = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, NotJson)
"What looking into JSON of another shape than expected can raise."


@hides_bytes
class Told(NamedTuple):
    """What a notification says."""

    statements: list[bytes]
    subscription: str = ""
    remaining: int | None = None
    "Of those stored before that are still to come; None: these are new."

    @property
    def is_stored(self) -> bool:
        return self.remaining is not None

    @property
    def is_last(self) -> bool:
        """Of what was stored before."""
        return self.remaining is not None and self.remaining <= 0


def _told(parameters: dict[str, Any]) -> Told:
    result = parameters["result"]
    remaining = result["data"].get("remaining")
    name = str(parameters.get("subscription", ""))
    return Told(_statements(result), name, None if remaining is None else int(remaining))


def _statements(result: dict[str, Any]) -> list[bytes]:
    """Those of a notification that are hex at all; whether they are statements is seen later."""
    found = []
    for text in result["data"]["statements"]:
        try:
            found.append(bytes.fromhex(text.removeprefix("0x")))
        except _NONSENSE:
            MALFORMED.inc()
    return found


async def _read_notification(text: str) -> Told:
    """As `_told`, with pauses in which others have a turn. NotJson if it is anything else."""
    reading = NotificationReader(text)
    read_since = 0
    for size in reading:
        read_since += size
        if read_since > READ_AT_ONCE:
            read_since = 0
            await asyncio.sleep(0)
    return reading.told


class NotificationReader:
    """Reads a notification statement by statement; iterating tells how many characters were read."""

    def __init__(self, text: str) -> None:
        self._scanner = Scanner(text)
        self._values: dict[str, Any] = {}
        self.statements: list[bytes] = []

    @property
    def told(self) -> Told:
        """When all is read."""
        remaining = self._values.get("remaining")
        name = str(self._values.get("subscription", ""))
        return Told(self.statements, name, None if remaining is None else int(remaining))

    def __iter__(self) -> Iterator[int]:
        yield from self._read(_PATH)
        self._scanner.end()
        if self._values.get("method") not in NOTIFICATIONS:
            raise NotJson

    def _read(self, path: Sequence[str]) -> Iterator[int]:
        """Of an object, what is behind the first name of the path."""
        for name in self._scanner.members():
            if name != path[0]:
                value = self._scanner.value(LONGEST_VALUE)
                if name in _READ:
                    self._values[name] = value
                yield len(name) + VALUE_COST
            elif len(path) > 1:
                yield from self._read(path[1:])
            else:
                yield from self._take()

    def _take(self) -> Iterator[int]:
        for _ in self._scanner.items():
            statement = self._scanner.plain_text()
            try:
                self.statements.append(bytes.fromhex(statement.removeprefix("0x")))
            except ValueError:
                MALFORMED.inc()
            yield len(statement) + VALUE_COST


_READ = frozenset({"method", "subscription", "remaining"})
_PATH = ("params", "result", "data", "statements")


async def _refuse(*_: object) -> None:
    """The operator named one node: it cannot send this server to another."""
    raise NodeError("the node redirects to another address")


@asynccontextmanager
async def connected(url: str, on_statements: OnStatements) -> AsyncIterator[NodeClient]:
    """NodeError if there is no connection within `CONNECT_TIMEOUT`."""
    tracing = aiohttp.TraceConfig()
    tracing.on_request_redirect.append(_refuse)
    async with aiohttp.ClientSession(auto_decompress=False, trace_configs=[tracing]) as session:
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                socket = await session.ws_connect(url, heartbeat=HEARTBEAT, max_msg_size=MAX_MESSAGE)
        except TimeoutError:
            raise NodeError("no connection in time") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NodeError(f"no connection: {type(error).__name__}") from None
        async with socket:
            yield NodeClient(socket, on_statements)
