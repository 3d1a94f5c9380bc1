"""`ntf-agent talk`: connections on the command line."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent.duplex.agent import DuplexAgent, DuplexConfig, open_duplex
from agent.duplex.events import (
    Confirmed,
    Connected,
    ContactRequested,
    Event,
    Failed,
    MessageDelayed,
    MessageFailed,
    MessageReceived,
    ReceiptsReceived,
)
from agent.errors import AgentError, Misused
from protocol.addresses import SmpServer, parse_smp_server
from protocol.errors import DecodeError
from smp_client.requests import SessionConfig
from store.interface import StoreError

STATE_FILE = "connections.db"
ROUTERS_FILE = "routers"
SETTLE_TIMEOUT = 30.0
QUIET_TIME = 2.0
"Seconds without news after which `receive` ends."

Action = Callable[[DuplexAgent, argparse.Namespace], Awaitable[None]]


def add_commands(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--router",
        type=_router,
        action="append",
        metavar="SMP_ADDRESS",
        help="where to make queues (again for more); remembered",
    )
    parser.add_argument("--name", default="", help="what the other side is told about you")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    create = commands.add_parser("create", help="a link for one person, or an address for many")
    create.add_argument("--address", action="store_true", help="an address")
    create.add_argument("--short", action="store_true", help="a short link; its data is kept by the router")
    _set(create, _create)
    join = commands.add_parser("join", help="connect to somebody's link or address")
    join.add_argument("link")
    _set(join, _join)
    for name, text, action in (
        ("accept", "let in who wrote to the address", _accept),
        ("reject", "do not", _reject),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("request", type=int)
        _set(command, action)
    send = commands.add_parser("send", help="send a message")
    send.add_argument("connection", type=int)
    send.add_argument("text")
    send.add_argument("--quiet", action="store_true", help="without a notification")
    _set(send, _send)
    receive = commands.add_parser("receive", help="show what has come, and let in who joined")
    receive.add_argument("--follow", action="store_true", help="stay")
    receive.add_argument("--receipts", action="store_true", help="tell senders that their messages were read")
    _set(receive, _receive)
    for name, text, action in (
        ("switch", "move the connection to another router", _switch),
        ("sync", "make a new ratchet, if messages cannot be read", _sync),
        ("delete", "delete the connection, when its messages are sent", _delete),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("connection", type=int)
        _set(command, action)
    _set(commands.add_parser("status", help="all connections"), _status)


def _set(parser: argparse.ArgumentParser, action: Action) -> None:
    parser.set_defaults(talk=action)


def _router(text: str) -> SmpServer:
    try:
        return parse_smp_server(text)
    except DecodeError:
        raise argparse.ArgumentTypeError("not an address of an SMP router") from None


async def act(args: argparse.Namespace) -> None:
    """Raises AgentError with one line for people."""
    session = SessionConfig(connect=args.timeout, answer=args.timeout)
    try:
        routers = _routers(args.folder, args.router)
        config = DuplexConfig(path=args.folder / STATE_FILE, servers=routers, session=session)
        async with open_duplex(config) as agent:
            await args.talk(agent, args)
    except StoreError as error:
        raise AgentError(str(error)) from None


def _routers(folder: Path, given: list[SmpServer] | None) -> list[SmpServer]:
    file = folder / ROUTERS_FILE
    try:
        if given:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.write_text("".join(f"{router}\n" for router in given), encoding="ascii")
        return [parse_smp_server(line) for line in file.read_text(encoding="ascii").split()]
    except FileNotFoundError:
        raise Misused("name a router with --router the first time") from None
    except (OSError, DecodeError, UnicodeDecodeError):
        raise Misused(f"{file} cannot be used") from None


# Commands


async def _create(agent: DuplexAgent, args: argparse.Namespace) -> None:
    if args.address and args.short:
        prepared = agent.prepare_address(agent.new_root_key())
        connection_id, link = await agent.create_prepared(prepared, args.name.encode())
    elif args.address:
        connection_id, link = await agent.create_address()
    elif args.short:
        connection_id, link = await agent.create_short_invitation(args.name.encode())
    else:
        connection_id, link = await agent.create_invitation()
    _print(
        args,
        {"connection": connection_id, "link": link},
        f"Connection {connection_id}. Give away this link:\n{link}",
    )


async def _join(agent: DuplexAgent, args: argparse.Namespace) -> None:
    await _started(agent, args, await agent.join(args.link, args.name.encode()))


async def _accept(agent: DuplexAgent, args: argparse.Namespace) -> None:
    await _started(agent, args, await agent.accept(args.request, args.name.encode()))


async def _started(agent: DuplexAgent, args: argparse.Namespace, connection_id: int) -> None:
    _print(args, {"connection": connection_id}, f"Connection {connection_id}.")
    await _settle(agent, args)


async def _reject(agent: DuplexAgent, args: argparse.Namespace) -> None:
    await agent.reject(args.request)


async def _send(agent: DuplexAgent, args: argparse.Namespace) -> None:
    message_id = await agent.send(args.connection, args.text.encode(), notification=not args.quiet)
    _print(args, {"message": message_id}, f"Message {message_id}.")
    await _settle(agent, args)


async def _switch(agent: DuplexAgent, args: argparse.Namespace) -> None:
    await agent.switch(args.connection)
    await _settle(agent, args)


async def _sync(agent: DuplexAgent, args: argparse.Namespace) -> None:
    await agent.sync(args.connection)
    await _settle(agent, args)


async def _delete(agent: DuplexAgent, args: argparse.Namespace) -> None:
    await agent.delete(args.connection, wait=True)
    await _settle(agent, args)


async def _status(agent: DuplexAgent, args: argparse.Namespace) -> None:
    for conn in await agent.connections():
        values = {"connection": conn.connection_id, "kind": conn.kind, "ratchet": conn.sync_state.value}
        pq = ", post-quantum" if conn.pq_support else ""
        _print(args, values | {"pq": conn.pq_support}, f"Connection {conn.connection_id}: {conn.kind}{pq}")


async def _receive(agent: DuplexAgent, args: argparse.Namespace) -> None:
    with suppress(TimeoutError):
        while True:
            async with asyncio.timeout(None if args.follow else QUIET_TIME):
                event = await agent.next_event()
            _show(args, event)
            if isinstance(event, Confirmed):
                await agent.allow(event.connection_id, args.name.encode())
            elif isinstance(event, MessageReceived):
                await agent.ack(event.connection_id, event.message_id, b"" if args.receipts else None)
            elif isinstance(event, ReceiptsReceived):
                await agent.ack(event.connection_id, event.message_id)
    await _settle(agent, args)


async def _settle(agent: DuplexAgent, args: argparse.Namespace) -> None:
    """Give the background some time; what is not done then is done by the next command."""
    with suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_TIMEOUT):
            await agent.settled()
    for event in agent.unread():
        if isinstance(event, Failed | MessageFailed | MessageDelayed):
            raise AgentError(event.error)


# What people see


def _print(args: argparse.Namespace, values: dict[str, Any], text: str) -> None:
    print(json.dumps(values) if args.json else text, flush=True)


def _show(args: argparse.Namespace, event: Event) -> None:
    if args.json:
        print(json.dumps({"event": type(event).__name__} | asdict(event), default=_plain), flush=True)
        return
    match event:
        case MessageReceived():
            print(f"Connection {event.connection_id}: {_safe(event.body)}", flush=True)
        case Confirmed():
            print(f"Connection {event.connection_id}: {_safe(event.info)} joined", flush=True)
        case Connected():
            print(f"Connection {event.connection_id} is made", flush=True)
        case ContactRequested():
            print(f"Request {event.invitation_id} from {_safe(event.info)}", flush=True)
        case Failed():
            print(f"Connection {event.connection_id}: {event.error}", flush=True)


def _safe(body: bytes) -> str:
    """Whoever sent it must not be able to steer this terminal."""
    text = body.decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _plain(value: object) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
