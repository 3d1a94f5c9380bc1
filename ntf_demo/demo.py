"""`ntf-server demo`: two people talk, a phone sleeps, a push wakes it; on this machine, in a few seconds."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TypeVar

from prometheus_client import REGISTRY
from rich.console import Console
from rich.text import Text

from agent.duplex.agent import DuplexAgent, DuplexConfig, open_duplex
from agent.duplex.events import Confirmed, Connected, Event, Fetched, MessageReceived
from agent.errors import AgentError
from agent.notifications.records import Mode
from ntf_demo.fake_push.recorder import RecordedPush
from ntf_demo.fake_push.server import FakePushConfig, FakePushServer, wall_clock
from ntf_demo.fresh_server import config_dir, fresh_config
from ntf_server import setup
from ntf_server.app import App, running
from ntf_server.clock import as_datetime
from ntf_server.config import LOCALHOST
from ntf_server.metrics import PREFIX
from protocol.device_token import ApnsToken, Provider
from protocol.encoding import b64
from protocol.messages_crypto import RcvMessage
from smp_router.router import Router
from transport.cancellation import first_cause, stop_signal

E = TypeVar("E", bound=Event)

PUSH_DEADLINE = 10.0
JOURNAL_SECONDS = 5.0
"So soon can the journal of a kept demo be read."
LOOK_AGAIN = 0.002
DEVICE_TOKEN_SIZE = 32
GREETINGS = ("Hi Alice, it is me", "Hi Bob! I will put the phone away now")
FIRST_TEXT = "Lunch at 12?"
BURST = ("The report is done.", "Call me when you can.", "Happy birthday!")
WIDTH = 100
BAR_WIDTH = 20
EXCERPT = 14
LINK_EXCERPT = 20

Leg = tuple[str, str, float]
"A part of the way: what happens, where, and the seconds it took."


@dataclass(frozen=True, slots=True)
class Playground:
    """A router, a push provider and a notification server that know each other."""

    router: Router
    push: FakePushServer
    server: App

    def accepted(self) -> list[RecordedPush]:
        """Pushes that the provider took, oldest first."""
        return [push for push in self.push.pushes if push.status < 300]


@asynccontextmanager
async def playground(
    folder: Path, *, record_file: Path | None = None, postgres_url: str = "", journal: bool = False
) -> AsyncIterator[Playground]:
    """All three on free ports of this machine, with everything they write in `folder`."""
    async with AsyncExitStack() as stack:
        smp = await stack.enter_async_context(Router.start(host=LOCALHOST))
        push_config = FakePushConfig(folder=folder / "push", record_file=record_file)
        push = await stack.enter_async_context(FakePushServer(push_config))
        server = await stack.enter_async_context(running(_server(folder, push, postgres_url, journal)))
        yield Playground(smp, push, server)


def _server(folder: Path, push: FakePushServer, postgres_url: str, journal: bool) -> App:
    config = fresh_config(folder, push, postgres_url)
    if journal:
        quick = replace(config.JOURNAL, enabled=True, segment_seconds=JOURNAL_SECONDS)
        config = replace(config, JOURNAL=quick)
    return App(config_dir(folder), config)


class Story:
    """Prints what happens while it happens; without colours where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._chapters = 0

    def title(self, text: str) -> None:
        self._console.print(Text(text, style="bold"))

    def chapter(self, text: str) -> None:
        self._chapters += 1
        self._console.print(Text(f"\n {self._chapters}  {text}", style="bold cyan"))

    def step(self, word: str, way: str, what: str) -> None:
        self._line("    ", (f"{word:<11}", "green"), f"{way:<41}", (what, "dim"))

    def fact(self, name: str, value: str, style: str = "") -> None:
        self._line("    ", (f"{name:<22}", "yellow"), (value, style))

    def leg(self, words: str, way: str, seconds: float, bar: str) -> None:
        time_taken = f"{seconds * 1000:7.1f} ms" + ("  " if bar else "")
        self._line("    ", (f"{words:<18}", "green"), f"{way:<45}", (time_taken, "bold"), (bar, "cyan"))

    def text(self, text: str, style: str = "") -> None:
        self._line((f"    {text}", style))

    def plain(self, text: str = "") -> None:
        self._line(text)

    def _line(self, *parts: str | tuple[str, str]) -> None:
        self._console.print(Text.assemble(*parts), soft_wrap=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the demonstration."""
    about = "afterwards leave everything running, with addresses to play with, until Ctrl-C"
    parser.add_argument("--keep", action="store_true", help=about)
    about = "the statement gateway instead: signed statements wake those who asked for them"
    parser.add_argument("--statements", action="store_true", help=about)


def run(args: argparse.Namespace) -> int:
    """Run the demonstration; return the exit code of the process."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without these characters still shows the rest
    console = Console(highlight=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    code = 0
    if args.statements and importlib.util.find_spec("sr25519") is None:
        print("ntf-server: --statements needs pip install 'ntf-server[statements]'", file=sys.stderr)
        return 1
    try:
        asyncio.run(_run(Story(console), keep=args.keep, statements=args.statements))
    except* (AgentError, TimeoutError, OSError) as problems:
        print(f"ntf-server: the demonstration failed: {first_cause(problems)!r}", file=sys.stderr)
        code = 1
    except* (KeyboardInterrupt, asyncio.CancelledError):
        code = 130
    return code


async def _run(story: Story, *, keep: bool, statements: bool) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory(prefix="ntf-demo-") as name:
        if statements:
            from ntf_demo import statement_demo  # with libraries of its own

            await statement_demo.tell(story, Path(name), keep=keep)
        else:
            await _tell_all(story, Path(name), keep=keep)
    story.plain()
    story.plain(f"All of it ran on this machine{'' if statements else ', over TLS'}; nothing is left behind.")


async def _tell_all(story: Story, folder: Path, *, keep: bool) -> None:
    pushes = folder / "pushes.jsonl"
    story.title("ntf-server demo: how a message finds a phone that sleeps")
    async with playground(folder, record_file=pushes, journal=keep) as world:
        await _tell(story, world, folder)
        if keep:
            await _keep(story, world, folder, pushes)


async def _tell(story: Story, world: Playground, folder: Path) -> None:
    story.chapter("Three servers start, on free ports of this machine")
    story.fact("SMP router", _shortened(str(world.router.address)))
    story.fact("push provider", f"https://{LOCALHOST}:{world.push.port} (stands in for APNs)")
    story.fact("notification server", _shortened(str(world.server.address)))
    phone = DuplexConfig(path=folder / "phone.db", servers=[world.router.address], kem_pairs=0)
    async with open_duplex(replace(phone, path=folder / "bob.db")) as bob:
        async with open_duplex(phone) as alice:
            to_alice = await _meet(story, alice, bob)
            await _register(story, world, alice)
            await _subscribe(story, world, alice)
        asleep = replace(phone, subscribe=False)
        legs = await _one_message(story, world, asleep, bob, to_alice)
        await _burst(story, world, asleep, bob, to_alice)
        _show_legs(story, legs)


async def _meet(story: Story, alice: DuplexAgent, bob: DuplexAgent) -> int:
    """Bob's id of the connection."""
    story.chapter("Alice makes a link, Bob joins")
    to_bob, link = await alice.create_short_invitation(b"Alice")
    story.step("NEW", "Alice's phone → router", f"a queue; its link is {link[:LINK_EXCERPT]}…")
    to_alice = await bob.join(link, b"Bob")
    await _next(alice, Confirmed)
    story.step("SEND", "Bob → router → phone", "his keys, and a queue for answers")
    await alice.allow(to_bob, b"Alice")
    made = await _next(alice, Connected)
    await _next(bob, Connected)
    kind = "post-quantum " if made.pq else ""
    story.step(
        "SEND", "Alice's phone → router → Bob", f"hers: both can write, through a {kind}double ratchet"
    )
    for writer, connection, reader, text in zip(
        (bob, alice), (to_alice, to_bob), (alice, bob), GREETINGS, strict=True
    ):
        await writer.send(connection, text.encode())
        message = await _next(reader, MessageReceived)
        await reader.ack(message.connection_id, message.message_id)
        who = "Bob" if writer is bob else "Alice"
        story.step("read", f"“{message.body.decode()}”", f"from {who}")
    return to_alice


async def _register(story: Story, world: Playground, alice: DuplexAgent) -> None:
    device = ApnsToken(Provider.APNS_TEST, secrets.token_hex(DEVICE_TOKEN_SIZE).encode())
    story.chapter("Alice's phone registers for notifications")
    await alice.notifications.register(device, Mode.INSTANT, world.server.address)
    story.step("TNEW", "phone → notification server", "its device token and two public keys")
    push = await _next_push(world, 0)
    story.step("push", "notification server → provider → phone", "a code only this phone can open")
    await alice.notifications.on_push(push.body)
    token = await alice.notifications.token()
    assert token is not None
    story.step("TVFY", "phone → notification server", f"the code; the token is {token.status}")


async def _subscribe(story: Story, world: Playground, alice: DuplexAgent) -> None:
    story.chapter("Her queue gets a notifier")
    await alice.settled()
    story.step("NKEY", "phone → router", "keys of the notifier")
    story.step("SNEW", "phone → notification server", "where the notifier is, and its key")
    wanted = {row.notifier_id for row in await alice.notifications.subscriptions()}
    await until(lambda: wanted <= world.router.subscribed_notifiers())
    story.step("NSUB", "notification server → router", "the queue is watched")


async def _one_message(
    story: Story, world: Playground, asleep: DuplexConfig, bob: DuplexAgent, to_alice: int
) -> list[Leg]:
    story.chapter(f"The phone sleeps. Bob writes: “{FIRST_TEXT}”")
    seen, in_server = len(world.accepted()), _server_seconds()
    sent_at = wall_clock()
    await bob.send(to_alice, FIRST_TEXT.encode())
    push = await _next_push(world, seen)
    story.step("SEND", "Bob → router", "the encrypted message, to be notified about")
    story.step("NMSG", "router → notification server", "a notifier has news: encrypted details")
    story.step("push", "notification server → provider → phone", "the same, encrypted once more")
    started = time.perf_counter()
    async with open_duplex(asleep) as alice:
        woken = time.perf_counter()
        story.step("wake", "phone", "opens the push: it knows which queue to read")
        views = await _views(world, alice, push)
        opening = time.perf_counter()
        (message,) = await _read(alice, push)
        finished = time.perf_counter()
    story.step("GET, ACK", "phone → router", "the message, decrypted on the phone")
    story.plain()
    story.text("What each of them could see", style="bold")
    for name, view in views:
        story.fact(name, view, style="dim")
    at = as_datetime(message.broker_ts).astimezone()
    told = f"from Bob, {at:%H:%M:%S}: “{message.body.decode()}”"
    story.fact("Alice's phone", told, style="bold green")
    in_server = _server_seconds() - in_server
    outside = push.received - sent_at - in_server
    return [
        ("SEND, NMSG, push", "Bob → router → notification server → provider", outside),
        ("store, encrypt", "inside the notification server", in_server),
        ("wake", "phone: opens its file", woken - started),
        ("GET, ACK", "phone ↔ router, push and message opened", finished - opening),
    ]


async def _read(alice: DuplexAgent, push: RecordedPush) -> list[MessageReceived]:
    """What a phone does with a push: exactly the new messages, then it may sleep again."""
    messages: list[MessageReceived] = []
    reading = await alice.notifications.on_push(push.body)
    async with asyncio.timeout(PUSH_DEADLINE):
        while reading:
            event = await alice.next_event()
            if isinstance(event, Fetched):
                break
            if isinstance(event, MessageReceived):
                messages.append(event)
                await alice.ack(event.connection_id, event.message_id)
    return messages


async def _views(world: Playground, alice: DuplexAgent, push: RecordedPush) -> list[tuple[str, str]]:
    """What lies at the three servers before the phone reads it: from where they keep it."""
    queue = next(queue for queue in world.router.state.queues if _last_body(queue.messages) is not None)
    body = _last_body(queue.messages)
    assert body is not None
    token = await alice.notifications.token()
    assert token is not None
    assert token.token_id is not None
    (record,) = await world.server.store.tokens([token.token_id])
    assert record is not None
    (known,) = await world.server.store.pushes([record.key])
    entry = known.entries[-1]
    boxed = json.loads(push.body)["notificationData"]["message"]
    return [
        ("SMP router", f"queue {_excerpt(queue.sender_id)}, {len(body):,} bytes, sealed: {_excerpt(body)}"),
        (
            "notification server",
            f"its notifier {_excerpt(entry.notifier_id)}, {len(entry.meta)} bytes, "
            f"sealed: {_excerpt(entry.meta)}",
        ),
        (
            "push provider",
            f"device {push.token[:EXCERPT]}…, {len(boxed):,} characters, sealed: {boxed[:EXCERPT]}…",
        ),
    ]


def _last_body(messages: Sequence[object]) -> bytes | None:
    """The body of the newest message, if it is one that notifies."""
    content = getattr(messages[-1], "content", None) if messages else None
    return content.body if isinstance(content, RcvMessage) and content.notification else None


async def _burst(
    story: Story, world: Playground, asleep: DuplexConfig, bob: DuplexAgent, to_alice: int
) -> None:
    story.chapter("It sleeps again, and Bob has more to say")
    seen = len(world.accepted())
    for text in BURST:
        await bob.send(to_alice, text.encode())
    received: list[MessageReceived] = []
    handled = seen
    while len(received) < len(BURST):
        push = await _next_push(world, handled)
        handled += 1
        async with open_duplex(asleep) as alice:
            received += await _read(alice, push)
    for message in received:
        story.step("read", f"“{message.body.decode()}”", f"number {message.sender_message_id}")
    story.step("push", f"{handled - seen} for {len(received)} messages", "what is new is read, nothing else")


def _show_legs(story: Story, legs: Sequence[Leg]) -> None:
    story.chapter("How long the first message took")
    longest = max(seconds for _, _, seconds in legs)
    for words, way, seconds in legs:
        story.leg(words, way, seconds, "█" * max(1, round(BAR_WIDTH * seconds / longest)))
    story.leg("", "together", sum(seconds for _, _, seconds in legs), "")


async def _keep(story: Story, world: Playground, folder: Path, pushes: Path) -> None:
    device = secrets.token_hex(DEVICE_TOKEN_SIZE)
    agent, analytics = _program("ntf-agent"), _program("ntf-analytics")
    alice, bob = (f"{agent} --folder {quote(str(folder / name))}" for name in ("alice", "bob"))
    story.chapter("It keeps running until Ctrl-C. In another terminal:")
    for command in (
        f"{alice} notifications register {world.server.address} {device} --provider test --pushes {pushes}",
        f"{alice} create --short --name Alice --router {world.router.address}",
        f"{bob} join 'LINK' --name Bob --router {world.router.address}",
        f"{alice} notifications listen --name Alice --pushes {pushes}",
        f"{bob} send 1 'Hello from another terminal'",
    ):
        story.plain(f"    {command}")
    story.chapter(f"What it writes to its journal can be reported on, {JOURNAL_SECONDS:.0f} s later:")
    journal, report = folder / "data" / setup.JOURNAL_FOLDER, folder / "report"
    story.plain(f"    {analytics} report all --journal {journal} --out {report}")
    await stop_signal().wait()


def _program(name: str) -> str:
    """How to call a program that was installed with this one, also from another terminal."""
    return name if shutil.which(name) else quote(str(Path(sys.executable).with_name(name)))


async def _next(agent: DuplexAgent, kind: type[E]) -> E:
    """The next event of this kind; the others are for applications that do more."""
    async with asyncio.timeout(PUSH_DEADLINE):
        while not isinstance(event := await agent.next_event(), kind):
            pass
    return event


async def _next_push(world: Playground, seen: int) -> RecordedPush:
    await until(lambda: len(world.accepted()) > seen)
    return world.accepted()[seen]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PUSH_DEADLINE):
        while not condition():  # noqa: ASYNC110  # servers of their own: they do not signal anybody here
            await asyncio.sleep(LOOK_AGAIN)


def _server_seconds() -> float:
    """Time that notifications have spent inside the server so far, by its own measure."""
    return REGISTRY.get_sample_value(f"{PREFIX}nmsg_to_push_seconds_sum") or 0.0


def _shortened(address: str) -> str:
    identity, at, where = address.partition("@")
    return f"{identity[: len('smp://') + 8]}…{at}{where}"


def _excerpt(data: bytes) -> str:
    return b64(data[:EXCERPT]).decode()[:EXCERPT] + "…"
