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
from protocol.addresses import SmpServerWithPassword, parse_smp_server_with_password
from protocol.errors import DecodeError
from smp_client.dialer import Dialer, NetworkConfig
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
    named = _routers(args.folder, args.router)
    routers = [each.server for each in named]
    passwords = {each.server: each.password for each in named if each.password is not None}
    if needs_router and not routers:
        raise Misused("name a router with --router the first time")
    # One command needs few KEM pairs: another process to make them ahead would cost more than it saves.
    config = DuplexConfig(
        path=path,
        key=key_of(args),
        servers=routers,
        passwords=passwords,
        network=_network(args),
        session=session,
        services=args.services,
        separate_sessions=args.separate_sessions,
        cover_traffic=args.cover_traffic,
        proxy=ProxyConfig(
            policy=args.proxy, proxies=tuple(routers), known=tuple(routers), passwords=passwords
        ),
        private_servers=args.private_servers,
        subscribe=not asleep,
        kem_pairs=0,
    )
    async with open_duplex(config) as opened:
        yield opened
        if settles:
            await _settle(opened)


def _network(args: argparse.Namespace) -> NetworkConfig:
    config = NetworkConfig(
        socks_proxy=args.socks_proxy,
        proxy_all=args.socks_proxy is not None,
        prefer_onion=args.onion is not None,
        onion_only=args.onion == "require",
    )
    if config.prefer_onion and args.socks_proxy is None:
        raise Misused("onion hosts need --socks-proxy")
    try:
        Dialer(config)
    except ValueError:
        raise Misused("a SOCKS proxy looks like socks5://HOST:PORT") from None
    return config


def _routers(folder: Path, given: list[SmpServerWithPassword] | None) -> list[SmpServerWithPassword]:
    """Those of this call, or of the last call that named some; the file has their passwords."""
    file = folder / ROUTERS_FILE
    try:
        if given:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write_private(file, "".join(f"{router.text}\n" for router in given))
        return [parse_smp_server_with_password(line) for line in file.read_text(encoding="ascii").split()]
    except FileNotFoundError:
        return []
    except (OSError, DecodeError, UnicodeDecodeError):
        raise Misused(f"{file} cannot be used") from None


def _write_private(file: Path, text: str) -> None:
    """For nobody but the user, also if the file was there before."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(os.open(file, flags, 0o600), "w", encoding="ascii") as out:
        os.fchmod(out.fileno(), 0o600)
        out.write(text)


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
