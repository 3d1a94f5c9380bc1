"""Conversations on the command line."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from contextlib import suppress

from agent.cli.running import agent, answer, output, raw
from agent.duplex.agent import DuplexAgent
from agent.errors import AgentError

QUIET_TIME = 2.0
"Seconds without news after which `receive` ends."


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    create = add("create", _create, "make a link for one person, or an address for many")
    create.add_argument("--address", action="store_true", help="an address")
    create.add_argument("--short", action="store_true", help="a short link; its data is kept by the router")
    join = add("join", _join, "connect to somebody's link or address")
    join.add_argument("link", metavar="LINK")
    for name, action, text in (
        ("accept", _accept, "let in who wrote to the address"),
        ("reject", _reject, "do not; who wrote is not told"),
    ):
        add(name, action, text).add_argument("request", metavar="REQUEST", type=int)
    send = add("send", _send, "send a message")
    send.add_argument("connection", metavar="CONNECTION", type=int)
    send.add_argument("text", metavar="TEXT", type=raw)
    send.add_argument("--quiet", action="store_true", help="without a notification")
    send_many = add("send-many", _send_many, "send the same message to several connections")
    send_many.add_argument("text", metavar="TEXT", type=raw)
    send_many.add_argument("connections", metavar="CONNECTION", type=int, nargs="+")
    link_data = add("set-link-data", _set_link_data, "change what the short link of a connection shows")
    link_data.add_argument("connection", metavar="CONNECTION", type=int)
    link_data.add_argument("text", metavar="TEXT", type=raw)
    delete_link = add("delete-link", _delete_link, "delete the short link of a connection")
    delete_link.add_argument("connection", metavar="CONNECTION", type=int)
    receive = add("receive", _receive, "show what has come, and let in who joined")
    receive.add_argument("--follow", action="store_true", help="stay until Ctrl-C")
    receive.add_argument("--receipts", action="store_true", help="tell senders that their messages were read")
    switch = add("switch", _switch, "move the connection to another router")
    switch.add_argument("--abort", action="store_true", help="do not, if the other side has not begun")
    sync = add("sync", _sync, "make a new ratchet, if messages cannot be read")
    sync.add_argument("--force", action="store_true", help="in any case, as after a backup was restored")
    delete = add("delete", _delete, "delete the connection, when its messages are sent")
    for command in (switch, sync, delete):
        command.add_argument("connection", metavar="CONNECTION", type=int)


async def _create(args: argparse.Namespace) -> None:
    async with agent(args, begins=True, needs_router=True) as opened:
        connection_id, link = await _new_link(opened, args)
        text = f"Connection {connection_id}. Give away this link:\n{link}"
        output(args).say({"connection": connection_id, "link": link}, text)


async def _new_link(opened: DuplexAgent, args: argparse.Namespace) -> tuple[int, str]:
    if args.address and args.short:
        prepared = opened.prepare_address(opened.new_root_key())
        return await opened.create_prepared(prepared, args.name)
    if args.address:
        return await opened.create_address()
    if args.short:
        return await opened.create_short_invitation(args.name)
    return await opened.create_invitation()


async def _join(args: argparse.Namespace) -> None:
    async with agent(args, begins=True, needs_router=True) as opened:
        _tell(args, await opened.join(args.link, args.name))


async def _accept(args: argparse.Namespace) -> None:
    async with agent(args) as opened:
        _tell(args, await opened.accept(args.request, args.name))


def _tell(args: argparse.Namespace, connection_id: int) -> None:
    output(args).say({"connection": connection_id}, f"Connection {connection_id}.")


async def _reject(args: argparse.Namespace) -> None:
    async with agent(args, settles=False) as opened:
        await opened.reject(args.request)


async def _send(args: argparse.Namespace) -> None:
    async with agent(args) as opened:
        message_id = await opened.send(args.connection, args.text, notification=not args.quiet)
        output(args).say({"message": message_id}, f"Message {message_id}.")


async def _send_many(args: argparse.Namespace) -> None:
    async with agent(args) as opened:
        sent = await opened.send_many([(connection, args.text) for connection in args.connections])
        for connection, result in zip(args.connections, sent, strict=True):
            values = {"connection": connection}
            if isinstance(result, AgentError):
                output(args).say(values | {"error": str(result)}, f"Connection {connection}: {result}")
            else:
                output(args).say(values | {"message": result}, f"Connection {connection}: message {result}")


async def _set_link_data(args: argparse.Namespace) -> None:
    async with agent(args, settles=False) as opened:
        await opened.set_link_data(args.connection, args.text)


async def _delete_link(args: argparse.Namespace) -> None:
    async with agent(args, settles=False) as opened:
        await opened.delete_link(args.connection)


async def _receive(args: argparse.Namespace) -> None:
    async with agent(args) as opened:
        with suppress(TimeoutError):
            while True:
                async with asyncio.timeout(None if args.follow else QUIET_TIME):
                    event = await opened.next_event()
                await answer(opened, event, args)


async def _switch(args: argparse.Namespace) -> None:
    async with agent(args) as opened:
        await (opened.abort_switch if args.abort else opened.switch)(args.connection)


async def _sync(args: argparse.Namespace) -> None:
    async with agent(args) as opened:
        await opened.sync(args.connection, force=args.force)


async def _delete(args: argparse.Namespace) -> None:
    async with agent(args) as opened:
        await opened.delete(args.connection, wait=True)
