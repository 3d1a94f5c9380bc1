"""Topics stay watched over a real WebSocket, whatever the node does."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from ntf_demo.fake_node.server import FakeNode, NodeConnection
from ntf_server.statements import node_client
from ntf_server.statements.node_client import (
    LONG_MESSAGE,
    MALFORMED,
    READ_AT_ONCE,
    NodeError,
    NotificationReader,
    _read_notification,
    connected,
)
from ntf_server.statements.topic_groups import MAX_GROUP
from ntf_server.statements.watcher import NewRules, TopicWatcher
from tests.ntf_server.statements.builders import sender, signed, topic
from tests.waiting import until

Serve = Callable[[web.Request], Awaitable[web.WebSocketResponse]]


class Heard:
    """What a watcher hears."""

    def __init__(self) -> None:
        self.statements: list[bytes] = []
        self.stored: list[bytes] = []

    async def take(self, statements: list[bytes], is_stored: bool) -> None:
        self.statements += statements
        if is_stored:
            self.stored += statements


@asynccontextmanager
async def watching(
    url: str, heard: Heard, most_topics: int = 100_000, new_rules: NewRules | None = None
) -> AsyncIterator[TopicWatcher]:
    watcher = TopicWatcher(url, heard.take, most_topics=most_topics, new_rules=new_rules, chance=lambda: 0.0)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watcher.run())
        yield watcher
        running.cancel()


async def test_new_statements_of_watched_topics(node: FakeNode) -> None:
    heard = Heard()
    async with watching(node.url, heard) as watcher:
        watcher.watch([topic(1), topic(2)])
        await until(lambda: node.subscriptions == 1)
        wanted, other = signed(sender(), topic(2)), signed(sender(), topic(3))
        assert await node.submit(other) == "new"
        assert await node.submit(wanted) == "new"
        await until(lambda: bool(heard.statements))
    assert heard.statements == [wanted]


class SlowNode(FakeNode):
    """Answers no subscription until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.may_answer = asyncio.Event()

    async def _subscribe(self, client: NodeConnection, parameter: object) -> str:
        self.asked += 1
        await self.may_answer.wait()
        return await super()._subscribe(client, parameter)


class Baselines:
    """No rule is new; what was watched when the watcher asked."""

    def __init__(self, node: FakeNode) -> None:
        self._node = node
        self.seen: list[tuple[frozenset[bytes], frozenset[bytes]]] = []
        "Topics that the watcher takes to be watched, and those that are."

    async def begin_baseline(self, watched: Collection[bytes] | None) -> list[bytes]:
        assert watched is not None
        self.seen.append((frozenset(watched), self._node.watched))
        return []

    async def settle(self, topics: Sequence[bytes]) -> None:
        raise AssertionError


async def test_what_new_rules_name_is_watched_before_they_are_looked_at() -> None:
    """Also a topic that came while others were subscribed."""
    async with SlowNode() as node:
        baselines = Baselines(node)
        async with watching(node.url, Heard(), new_rules=baselines) as watcher:
            watcher.watch([topic(1)])
            await until(lambda: node.asked == 1)
            watcher.watch([topic(1), topic(2)])
            node.may_answer.set()
            await until(lambda: any(topic(2) in taken for taken, _ in baselines.seen))
    assert [taken - watched for taken, watched in baselines.seen if taken - watched] == []


async def test_stored_statements_come_first(node: FakeNode) -> None:
    stored = [signed(sender(), topic(1), sequence=number) for number in range(250)]
    for statement in stored:
        await node.submit(statement)
    heard = Heard()
    async with watching(node.url, heard) as watcher:
        watcher.watch([topic(1)])
        await until(lambda: len(heard.statements) == len(stored))
        fresh = signed(sender(), topic(1), sequence=250)
        await node.submit(fresh)
        await until(lambda: len(heard.statements) == len(stored) + 1)
    assert (heard.stored, heard.statements) == (stored, [*stored, fresh])


async def test_many_topics_share_few_subscriptions_and_stay_balanced(node: FakeNode) -> None:
    heard = Heard()
    async with watching(node.url, heard) as watcher:
        watcher.watch([topic(number) for number in range(10_000)])
        groups = -(-10_000 // MAX_GROUP)
        await until(lambda: node.subscriptions == groups)
        watcher.watch([topic(number) for number in range(1, 10_001)])
        # One group lost a topic, another got one: both are made anew, all the others stay.
        await until(lambda: node.subscribed == groups + 2 and node.subscriptions == groups)
        for number in (1, 5_000, 10_000):
            await node.submit(signed(sender(), topic(number)))
        await node.submit(signed(sender(), topic(0)))
        await until(lambda: len(heard.statements) == 3)
        watcher.watch([topic(1)])
        await until(lambda: node.subscriptions == 1)


async def test_too_many_topics_become_one_subscription_to_all(node: FakeNode) -> None:
    heard = Heard()
    async with watching(node.url, heard, most_topics=200) as watcher:
        watcher.watch([topic(number) for number in range(150)])
        await until(lambda: node.subscriptions == 2)
        watcher.watch([topic(number) for number in range(201)])
        await until(lambda: node.subscriptions == 1)
        await node.submit(signed(sender(), topic(5000)))
        await until(lambda: bool(heard.statements))
        watcher.watch([topic(number) for number in range(100)])
        await until(lambda: node.subscribed == 4 and node.subscriptions == 1)


async def test_a_node_that_restarts_is_found_again(node: FakeNode) -> None:
    heard = Heard()
    async with watching(node.url, heard) as watcher:
        watcher.watch([topic(1)])
        await until(lambda: node.subscriptions == 1)
        await node.stop()
        await node.start()
        await until(lambda: node.subscriptions == 1)
        await node.submit(signed(sender(), topic(1)))
        await until(lambda: len(heard.statements) == 1)


async def test_a_node_that_is_not_there() -> None:
    with pytest.raises(NodeError):
        async with connected("ws://127.0.0.1:1", Heard().take):
            pass


@asynccontextmanager
async def served(serve: Serve, elsewhere: Serve | None = None) -> AsyncIterator[str]:
    """A node that does as it likes; its address."""
    app = web.Application()
    app.router.add_get("/", serve)
    if elsewhere is not None:
        app.router.add_get("/elsewhere", elsewhere)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"ws://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    "message",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"id": 77, "result": 1}',
        '{"id": {}, "result": 1}',
        '{"method": "statement_statement"}',
        '{"method": "statement_statement", "params": {"result": {"data": {"statements": 5}}}}',
        '{"method": "statement_statement", "params": {"result": {"data": {"statements": [5, "0xzz"]}}}}',
        "[" * 100_000,
    ],
    ids=range(10),
)
async def test_nonsense_is_counted(message: str) -> None:
    heard = Heard()
    good = signed(sender(), topic(1))
    result = {"event": "newStatements", "data": {"statements": [f"0x{good.hex()}"]}}
    notification = json.dumps({"method": "statement_statements", "params": {"result": result}})

    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_str(message)
        await socket.send_bytes(b"binary")
        await socket.send_str(notification)
        await socket.close()
        return socket

    before = MALFORMED._value.get()
    async with served(serve) as url, connected(url, heard.take) as client:
        with pytest.raises(NodeError):
            await client.run()
        with pytest.raises(NodeError):
            await client.subscribe([topic(1)])
    assert MALFORMED._value.get() - before >= 2
    assert heard.statements == [good]


def notification(statements: list[str], **more: object) -> str:
    result = {"event": "newStatements", "data": {"statements": statements, "remaining": 0}}
    params = {"subscription": "sub1", "result": result}
    return json.dumps({"jsonrpc": "2.0", "method": "statement_statement", "params": params, **more})


async def heard_of(text: str) -> tuple[list[bytes], int]:
    """The statements that a message brings, and how many things in it make no sense."""
    heard = Heard()

    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_str(text)
        await socket.close()
        return socket

    before = MALFORMED._value.get()
    async with served(serve) as url, connected(url, heard.take) as client:
        with pytest.raises(NodeError, match="closed"):
            await client.run()
    return heard.statements, int(MALFORMED._value.get() - before)


async def test_a_long_message_brings_what_a_short_one_does() -> None:
    sent = [os.urandom(size) for size in (0, 1, 500, 200_000, 1)]
    text = notification([*(f"0x{one.hex()}" for one in sent), "0xzz"])
    assert len(text) > LONG_MESSAGE
    assert await heard_of(text) == (sent, 1)
    assert await heard_of(notification(["0x00", "0xzz"])) == ([b"\0"], 1)


@pytest.mark.parametrize(
    "text",
    [
        notification(["0x00"], method="other", more="x" * LONG_MESSAGE),
        notification(["0x00"], more=["x" * LONG_MESSAGE]),
        notification(["0x" + "00" * LONG_MESSAGE])[:-1],
        notification(["0x" + "00" * LONG_MESSAGE]) + "}",
        notification(["0x" + "00" * LONG_MESSAGE], method="other"),
        "[" * 2 * LONG_MESSAGE,
        '{"a":' * LONG_MESSAGE,
        " " * 2 * LONG_MESSAGE + notification(["0x00"]),
        json.dumps({"id": 1, "result": "x" * LONG_MESSAGE}),
    ],
    ids=range(9),
)
async def test_long_nonsense_is_counted(text: str) -> None:
    assert await heard_of(text) == ([], 1)


async def test_a_long_message_leaves_the_loop_free() -> None:
    """Others have their turns while it is read."""
    reading = asyncio.ensure_future(_read_notification(notification(["0x" + "00" * 100] * 20_000)))
    turns = 0
    while not reading.done():
        await asyncio.sleep(0)
        turns += 1
    assert len((await reading).statements) == 20_000
    assert turns > 50


def test_values_that_nobody_asked_for_leave_the_loop_free() -> None:
    """Short names cost as much to read as short statements do."""
    text = json.dumps({f"{number}": 0 for number in range(10_000)} | json.loads(notification([])))
    turns = sum(NotificationReader(text)) / READ_AT_ONCE
    assert turns > 50


async def test_a_node_cannot_send_us_elsewhere() -> None:
    asked = []

    async def serve(request: web.Request) -> web.WebSocketResponse:
        asked.append(request.path)
        raise web.HTTPTemporaryRedirect("/elsewhere")

    async def elsewhere(request: web.Request) -> web.WebSocketResponse:
        asked.append(request.path)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        return socket

    async with served(serve, elsewhere) as url:
        with pytest.raises(NodeError, match="redirects"):
            async with connected(url, Heard().take):
                pass
    assert asked == ["/"]


@pytest.mark.parametrize("code", ["1e999", "Infinity", "NaN", "[]", '"?"', "null"])
async def test_a_refusal_that_makes_no_sense(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_client, "CALL_TIMEOUT", 0.2)

    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for _ in socket:
            await socket.send_str(f'{{"id": 1, "error": {{"code": {code}}}}}')
        return socket

    async with served(serve) as url, connected(url, Heard().take) as client:
        running = asyncio.create_task(client.run())
        with pytest.raises(NodeError, match="no answer"):
            await client.subscribe([topic(1)])
        assert not running.done()
        running.cancel()


async def test_an_answer_may_stand_behind_much_that_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """To take it can last longer than an answer may; to begin anew would be to begin for ever."""
    timeout, count = 0.1, 4
    monkeypatch.setattr(node_client, "CALL_TIMEOUT", timeout)
    stored = {"method": "statement_statement", "params": {"result": {"data": {"statements": ["0x00"]}}}}

    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for _ in socket:
            for _ in range(count):
                await socket.send_json(stored)
            await socket.send_json({"id": 1, "result": "name"})
        return socket

    taken = 0

    async def take(statements: list[bytes], is_stored: bool) -> None:
        nonlocal taken
        taken += len(statements)
        await asyncio.sleep(2 * timeout)

    async with served(serve) as url, connected(url, take) as client:
        running = asyncio.create_task(client.run())
        assert await client.subscribe([topic(1)]) == "name"
        running.cancel()
    assert taken == count


async def rpc(url: str, *messages: str) -> list[dict[str, object]]:
    """The answers, without the notifications in between."""
    answers: list[dict[str, object]] = []
    async with aiohttp.ClientSession() as session, session.ws_connect(url) as socket:
        for message in messages:
            await socket.send_str(message)
        while len(answers) < len(messages):
            if "id" in (came := await socket.receive_json()):
                answers.append(came)
    return answers


def call(method: str, *parameters: object) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": parameters})


async def test_the_node_refuses_what_a_node_refuses(node: FakeNode) -> None:
    hexes = [f"0x{topic(number).hex()}" for number in range(MAX_GROUP + 1)]
    answers = await rpc(
        node.url,
        "nonsense",
        call("statement_other", 1),
        call("statement_subscribeStatement"),
        call("statement_subscribeStatement", {"matchAny": hexes}),
        call("statement_subscribeStatement", {"matchAll": hexes[:5]}),
        call("statement_subscribeStatement", {"matchAny": ["0x00"]}),
        call("statement_subscribeStatement", {"matchAny": []}),
        call("statement_submit", "zz"),
    )
    assert all("error" in answer for answer in answers)
    answers = await rpc(
        node.url,
        call("statement_subscribeStatement", {"matchAll": hexes[:4]}),
        call("statement_unsubscribeStatement", "none such"),
        call("statement_submit", "0x00"),
    )
    results = [answer["result"] for answer in answers]
    assert results[1:] == [False, {"status": "invalid"}]
