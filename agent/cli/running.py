"""An agent for the time of one command."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from agent.cli.output import Output
from agent.duplex.agent import DuplexAgent, DuplexConfig, open_duplex
from agent.duplex.database_file import user_key
from agent.duplex.events import (
    Confirmed,
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
from smp_client.proxy import ProxyConfig
from smp_client.requests import SessionConfig

STATE_FILE = "connections.db"
FORMER_STATE_FILE = "agent.db"
ROUTERS_FILE = "routers"
SETTLE_TIMEOUT = 30.0

Server = TypeVar("Server")
Action = Callable[[argparse.Namespace], Awaitable[None]]


def raw(text: str) -> bytes:
    """What was typed, byte for byte: terminals need not speak UTF-8."""
    return os.fsencode(text)


def address(scheme: str, parse: Callable[[str], Server]) -> Callable[[str], Server]:
    """For an option that is an address."""

    def read(text: str) -> Server:
        try:
            return parse(text)
        except DecodeError:
            example = f"an address looks like {scheme}://IDENTITY@HOST:PORT"
            raise argparse.ArgumentTypeError(example) from None

    return read


def output(args: argparse.Namespace) -> Output:
    return Output(as_json=args.json)


def state_file(args: argparse.Namespace) -> Path:
    """Of a device that is there. Asking for one that is not leaves nothing behind."""
    path: Path = args.folder / STATE_FILE
    if not path.exists():
        found = _former_state(args.folder) or f"there is nothing in {args.folder}"
        raise Misused(f"{found}: create, join or notifications register begins")
    return path


def _new_state_file(args: argparse.Namespace) -> Path:
    path: Path = args.folder / STATE_FILE
    if not path.exists() and (found := _former_state(args.folder)):
        print(f"ntf-agent: {found}", file=sys.stderr)
    return path


def _former_state(folder: Path) -> str | None:
    """What to say of the state of agents that had no ratchets: nothing of it can be gone on with."""
    path = folder / FORMER_STATE_FILE
    return f"{path} is of an earlier version and is not taken over" if path.exists() else None


def key_of(args: argparse.Namespace) -> str | None:
    return user_key(args.key_file, os.environ)


@asynccontextmanager
async def agent(
    args: argparse.Namespace,
    *,
    begins: bool = False,
    needs_router: bool = False,
    asleep: bool = False,
    settles: bool = True,
) -> AsyncIterator[DuplexAgent]:
    """With `begins` the device is made if it is not there; one that is asleep subscribes to nothing.

    If it `settles`, the background has some time in the end; what is not done then is for the next command.
    """
    path = _new_state_file(args) if begins else state_file(args)
    session = SessionConfig(connect=args.timeout, answer=args.timeout)
    routers = _routers(args.folder, args.router)
    if needs_router and not routers:
        raise Misused("name a router with --router the first time")
    # One command needs few KEM pairs: another process to make them ahead would cost more than it saves.
    config = DuplexConfig(
        path=path,
        key=key_of(args),
        servers=routers,
        session=session,
        services=args.services,
        proxy=ProxyConfig(policy=args.proxy, proxies=tuple(routers), known=tuple(routers)),
        subscribe=not asleep,
        kem_pairs=0,
    )
    async with open_duplex(config) as opened:
        yield opened
        if settles:
            await _settle(opened)


def _routers(folder: Path, given: list[SmpServer] | None) -> list[SmpServer]:
    """Those of this call, or of the last call that named some."""
    file = folder / ROUTERS_FILE
    try:
        if given:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file.write_text("".join(f"{router}\n" for router in given), encoding="ascii")
        return [parse_smp_server(line) for line in file.read_text(encoding="ascii").split()]
    except FileNotFoundError:
        return []
    except (OSError, DecodeError, UnicodeDecodeError):
        raise Misused(f"{file} cannot be used") from None


async def _settle(agent: DuplexAgent) -> None:
    try:
        async with asyncio.timeout(SETTLE_TIMEOUT):
            await agent.settled()
    except TimeoutError:
        print("ntf-agent: not everything is done; the next command goes on with it", file=sys.stderr)
    for event in agent.unread():
        if isinstance(event, Failed | MessageFailed | MessageDelayed):
            raise AgentError(event.error)


async def answer(agent: DuplexAgent, event: Event, args: argparse.Namespace) -> None:
    """Show an event, and do what a person would: let in who joined, take what has come."""
    output(args).show(event)
    receipt = b"" if getattr(args, "receipts", False) else None
    if isinstance(event, Confirmed):
        await agent.allow(event.connection_id, args.name)
    elif isinstance(event, MessageReceived):
        await agent.ack(event.connection_id, event.message_id, receipt)
    elif isinstance(event, ReceiptsReceived):
        await agent.ack(event.connection_id, event.message_id)
