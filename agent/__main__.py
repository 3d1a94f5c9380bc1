"""`ntf-agent`: the command line of the agent."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from agent.agent import Agent, AgentConfig, open_agent
from agent.duplex.cli import act, add_commands
from agent.errors import AgentError, BadPush, Misused, Temporary
from agent.push_file import PushFile
from agent.records import MIN_PERIOD, Message, Mode
from agent.store import STATE_FILE
from protocol.addresses import NtfServer, SmpServer, parse_ntf_server, parse_smp_server
from protocol.device_token import ApnsToken, DeviceToken, FcmToken, Provider
from protocol.encoding import unb64
from protocol.errors import DecodeError
from protocol.statuses import TokenStatus
from smp_client.requests import SessionConfig

SETTLE_TIMEOUT = 30.0
VERIFY_TIMEOUT = 30.0
PROVIDERS = {
    "apns": Provider.APNS_PROD,
    "apns-dev": Provider.APNS_DEV,
    "test": Provider.APNS_TEST,
    "null": Provider.APNS_NULL,
    "fcm": Provider.FCM,
}

Action = Callable[[Agent, argparse.Namespace], Awaitable[None]]


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    work = act(args) if "talk" in args else _act(_config(args), args)
    try:
        asyncio.run(work)
    except AgentError as error:
        print(f"ntf-agent: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _config(args: argparse.Namespace) -> AgentConfig:
    return AgentConfig(folder=args.folder, session=SessionConfig(connect=args.timeout, answer=args.timeout))


async def _act(config: AgentConfig, args: argparse.Namespace) -> None:
    action: Action = args.action
    if action not in FIRST and not (config.folder / STATE_FILE).exists():
        raise Misused(f"there is no device in {config.folder}: register, create or join makes one")
    async with open_agent(config) as agent:
        await action(agent, args)


# Arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ntf-agent",
        description="A messaging device on the command line: registers for notifications, makes connections,"
        " sends, and reads what a push tells about. Try it with the addresses of `ntf-server demo --keep`.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {metadata.version('ntf-server')}")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(os.environ.get("NTF_AGENT_PATH", "~/.local/state/ntf-agent")).expanduser(),
        help="where this device keeps its keys and state (%(default)s; env NTF_AGENT_PATH)",
    )
    parser.add_argument(
        "--timeout", type=float, default=15.0, help="seconds to wait for a server (%(default)s)"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _token_commands(commands)
    _connection_commands(commands)
    _notification_commands(commands)
    add_commands(commands.add_parser("talk", help="conversations: a command of its own for each step"))
    return parser


def _token_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    register = commands.add_parser(
        "register", help="register this device, or change its mode or device token"
    )
    register.add_argument("server", type=_ntf_server, metavar="NTF_ADDRESS")
    register.add_argument("device", metavar="DEVICE_TOKEN", help="what the push provider knows the device by")
    register.add_argument("--provider", choices=PROVIDERS, default="apns", help="(%(default)s)")
    register.add_argument("--mode", type=Mode, choices=list(Mode), default=Mode.INSTANT, help="(%(default)s)")
    register.add_argument(
        "--period", type=int, default=MIN_PERIOD, help="minutes, in periodic mode (%(default)s)"
    )
    _add_pushes(register, "verify at once, with the push that appears in this file")
    register.set_defaults(action=_register)
    verify = commands.add_parser("verify", help="answer the verification push")
    verify.add_argument("nonce", help="as in the push")
    verify.add_argument("code", metavar="VERIFICATION", help="as in the push")
    verify.set_defaults(action=_verify)
    commands.add_parser("check", help="ask the server for the token's status").set_defaults(action=_check)
    commands.add_parser("unregister", help="give the token up").set_defaults(action=_unregister)


def _connection_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    create = commands.add_parser("create", help="make a queue to receive from, and a link for its sender")
    create.add_argument("router", type=_smp_server, metavar="SMP_ADDRESS")
    create.add_argument("--quiet", action="store_true", help="without notifications")
    create.set_defaults(action=_create)
    join = commands.add_parser("join", help="connect to somebody's link")
    join.add_argument("link")
    join.add_argument(
        "--reply-at", type=_smp_server, metavar="SMP_ADDRESS", help="also receive, at this router"
    )
    join.set_defaults(action=_join)
    send = commands.add_parser("send", help="send a message")
    send.add_argument("connection", type=int)
    send.add_argument("text")
    send.add_argument("--quiet", action="store_true", help="without a notification")
    send.set_defaults(action=_send)
    commands.add_parser("fetch", help="read all queues").set_defaults(action=_fetch)


def _notification_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, wanted, text in (
        ("subscribe", True, "switch notifications on"),
        ("unsubscribe", False, "switch notifications off"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("connections", type=int, nargs="*", help="all, if none is named")
        command.set_defaults(action=_switch, wanted=wanted)
    commands.add_parser("status", help="token, connections, subscriptions").set_defaults(action=_status)
    push = commands.add_parser("push", help="do what a push asks for; its payload comes on standard input")
    push.set_defaults(action=_push)
    listen = commands.add_parser("listen", help="stay, keep subscriptions well, react to pushes")
    _add_pushes(listen, "file to which a fake push provider writes")
    listen.set_defaults(action=_listen)


def _add_pushes(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--pushes", type=Path, metavar="FILE", help=text)


def _ntf_server(text: str) -> NtfServer:
    try:
        return parse_ntf_server(text)
    except DecodeError:
        raise argparse.ArgumentTypeError("an address looks like ntf://IDENTITY@HOST:PORT") from None


def _smp_server(text: str) -> SmpServer:
    try:
        return parse_smp_server(text)
    except DecodeError:
        raise argparse.ArgumentTypeError("an address looks like smp://IDENTITY@HOST:PORT") from None


def _device(args: argparse.Namespace) -> DeviceToken:
    provider = PROVIDERS[args.provider]
    token = args.device.encode("utf-8")
    if not 0 < len(token) < 256:
        raise Misused("a device token has 1 to 255 bytes")
    return FcmToken(token) if provider is Provider.FCM else ApnsToken(provider, token)


# Actions


async def _register(agent: Agent, args: argparse.Namespace) -> None:
    device = _device(args)
    file = None if args.pushes is None else PushFile(args.pushes)
    status = await agent.register(device, args.mode, args.server, args.period)
    if file is not None and status is not TokenStatus.ACTIVE:
        status = await _await_verification(agent, file, device)
    await _settle(agent)
    print(f"Token: {status}")
    if status is not TokenStatus.ACTIVE:
        print("The server sends a push with nonce and verification: ntf-agent verify NONCE VERIFICATION")


async def _await_verification(agent: Agent, file: PushFile, device: DeviceToken) -> TokenStatus:
    try:
        async with asyncio.timeout(VERIFY_TIMEOUT):
            async for payload in file.pushes(device):
                await agent.on_push(payload)
                token = await agent.token()
                if token is not None and token.status is TokenStatus.ACTIVE:
                    return token.status
    except TimeoutError:
        pass
    raise Temporary("no verification push came; register again to have it repeated")


async def _verify(agent: Agent, args: argparse.Namespace) -> None:
    try:
        nonce, code = unb64(args.nonce.encode()), unb64(args.code.encode())
    except DecodeError:
        raise Misused("nonce and verification are base64url texts, as in the push") from None
    print(f"Token: {await agent.verify(nonce, code)}")
    await _settle(agent)


async def _check(agent: Agent, args: argparse.Namespace) -> None:
    print(f"Token: {await agent.check()}")


async def _unregister(agent: Agent, args: argparse.Namespace) -> None:
    await agent.delete_token()
    await _settle(agent)
    print("Token given up.")


async def _create(agent: Agent, args: argparse.Namespace) -> None:
    connection_id = await agent.create_connection(args.router, wants_notifications=not args.quiet)
    await _settle(agent)
    print(f"Connection {connection_id}. Whoever has this link first can write to it:")
    print(await agent.link(connection_id))


async def _join(agent: Agent, args: argparse.Namespace) -> None:
    connection_id = await agent.join(args.link, args.reply_at)
    await _settle(agent)
    print(f"Connection {connection_id}.")


async def _send(agent: Agent, args: argparse.Namespace) -> None:
    await agent.send(args.connection, args.text.encode("utf-8"), notification=not args.quiet)
    print("Sent.")


async def _fetch(agent: Agent, args: argparse.Namespace) -> None:
    _show(await agent.fetch_all())


async def _switch(agent: Agent, args: argparse.Namespace) -> None:
    known = [c.connection_id for c in await agent.connections() if c.can_receive]
    for connection_id in args.connections or known:
        await agent.set_notifications(connection_id, args.wanted)
    await _settle(agent)
    await _status(agent, args)


async def _status(agent: Agent, args: argparse.Namespace) -> None:
    token = await agent.token()
    if token is None:
        print("Token: none")
    else:
        print(f"Token: {token.status}, {token.mode}, at {token.server}")
    rows = {row.connection_id: row for row in await agent.subscriptions()}
    for connection in await agent.connections():
        ways = [
            way for way, can in (("receives", connection.can_receive), ("sends", connection.can_send)) if can
        ]
        row = rows.get(connection.connection_id)
        if row is None:
            notifications = "none"
        else:
            notifications = " ".join(
                filter(None, (row.status, f"(next: {row.action})" if row.action else ""))
            )
        print(f"Connection {connection.connection_id}: {' and '.join(ways)}; notifications: {notifications}")


async def _push(agent: Agent, args: argparse.Namespace) -> None:
    payload = await asyncio.to_thread(sys.stdin.read)
    _show(await agent.on_push(payload))
    await _settle(agent)


async def _listen(agent: Agent, args: argparse.Namespace) -> None:
    token = await agent.token()
    if token is None:
        raise Misused("the device is not registered")
    file = None if args.pushes is None else PushFile(args.pushes)
    print("Listening. Ctrl-C ends it.", flush=True)
    _show(await agent.fetch_all())
    if file is None:
        await asyncio.get_running_loop().create_future()
        return
    async for payload in file.pushes(token.device_token):
        try:
            _show(await agent.on_push(payload))
        except (BadPush, Temporary) as error:
            print(f"ntf-agent: {error}", file=sys.stderr, flush=True)


async def _settle(agent: Agent) -> None:
    """Give the background some time; what is not done then is done by the next command."""
    with suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_TIMEOUT):
            await agent.settled()


def _show(messages: Sequence[Message]) -> None:
    for message in messages:
        text = message.body.decode("utf-8", "backslashreplace")
        # Whoever sent it must not be able to steer this terminal.
        safe = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
        print(f"Connection {message.connection_id}: {safe}", flush=True)


FIRST: frozenset[Action] = frozenset({_register, _create, _join})
"What makes a device; everything else asks one that is there, and leaves nothing behind if it is not."


if __name__ == "__main__":
    sys.exit(main())
