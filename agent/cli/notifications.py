"""Notifications on the command line."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from agent.cli.running import address, agent, answer, output, raw
from agent.duplex.agent import DuplexAgent
from agent.duplex.events import Fetched
from agent.duplex.replies import RouterFailure
from agent.errors import AgentError, BadPush, Misused
from agent.notifications.push_file import PushFile
from agent.notifications.records import MIN_PERIOD, Mode
from protocol.addresses import parse_ntf_server
from protocol.device_token import ApnsToken, DeviceToken, FcmToken, Provider
from protocol.encoding import unb64
from protocol.errors import DecodeError
from protocol.statuses import TokenStatus
from transport.cancellation import TaskGroup

VERIFY_TIMEOUT = 30.0
FETCH_TIMEOUT = 30.0
ALL_QUEUES = {"checkMessages": True}
PROVIDERS = {
    "apns": Provider.APNS_PROD,
    "apns-dev": Provider.APNS_DEV,
    "test": Provider.APNS_TEST,
    "null": Provider.APNS_NULL,
    "fcm": Provider.FCM,
}


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    register = add("register", _register, "register this device, or change its mode, device token or server")
    register.add_argument("server", type=address("ntf", parse_ntf_server), metavar="NTF_ADDRESS")
    register.add_argument(
        "device", metavar="DEVICE_TOKEN", type=raw, help="what the push provider knows the device by"
    )
    register.add_argument("--provider", choices=PROVIDERS, default="apns", help="(%(default)s)")
    register.add_argument("--mode", type=Mode, choices=list(Mode), default=Mode.INSTANT, help="(%(default)s)")
    register.add_argument(
        "--period", type=int, default=MIN_PERIOD, help="minutes, in periodic mode (%(default)s)"
    )
    _add_pushes(register, "verify at once, with the push that appears in this file")
    verify = add("verify", _verify, "answer the verification push")
    verify.add_argument("nonce", metavar="NONCE", help="as in the push")
    verify.add_argument("code", metavar="VERIFICATION", help="as in the push")
    add("check", _check, "ask the server for the token's status")
    add("unregister", _unregister, "give the token up")
    for name, wanted, text in (("on", True, "notify about connections"), ("off", False, "do not")):
        command = add(name, _switch, text)
        command.add_argument("connections", metavar="CONNECTION", type=int, nargs="*", help="all, if none")
        command.set_defaults(wanted=wanted)
    add("push", _push, "do what a push asks for; its payload comes on standard input")
    listen = add("listen", _listen, "sleep, and read what pushes tell of, until Ctrl-C")
    _add_pushes(listen, "file to which a fake push provider writes", required=True)


def _add_pushes(parser: argparse.ArgumentParser, text: str, *, required: bool = False) -> None:
    parser.add_argument("--pushes", type=Path, metavar="FILE", help=text, required=required)


def _device(args: argparse.Namespace) -> DeviceToken:
    provider, token = PROVIDERS[args.provider], args.device
    if not 0 < len(token) < 256:
        raise Misused("a device token has 1 to 255 bytes")
    return FcmToken(token) if provider is Provider.FCM else ApnsToken(provider, token)


# The token


async def _register(args: argparse.Namespace) -> None:
    device = _device(args)
    file = None if args.pushes is None else PushFile(args.pushes)
    async with agent(args, begins=True, asleep=True) as opened:
        status = await opened.notifications.register(device, args.mode, args.server, args.period)
        if file is not None and status is not TokenStatus.ACTIVE:
            status = await _await_verification(opened, file, device)
    _tell(args, status)
    if status is not TokenStatus.ACTIVE and not args.json:
        print("A push brings nonce and verification: ntf-agent notifications verify -- NONCE VERIFICATION")


async def _await_verification(opened: DuplexAgent, file: PushFile, device: DeviceToken) -> TokenStatus:
    try:
        async with asyncio.timeout(VERIFY_TIMEOUT):
            async for payload in file.pushes(device):
                await opened.notifications.on_push(payload)
                token = await opened.notifications.token()
                if token is not None and token.status is TokenStatus.ACTIVE:
                    return token.status
    except TimeoutError:
        pass
    raise AgentError("no verification push came; register again to have it repeated")


async def _verify(args: argparse.Namespace) -> None:
    try:
        nonce, code = unb64(raw(args.nonce)), unb64(raw(args.code))
    except DecodeError:
        raise Misused("nonce and verification are base64url texts, as in the push") from None
    async with agent(args, asleep=True) as opened:
        _tell(args, await opened.notifications.verify(nonce, code))


async def _check(args: argparse.Namespace) -> None:
    async with agent(args, asleep=True, settles=False) as opened:
        _tell(args, await opened.notifications.check())


async def _unregister(args: argparse.Namespace) -> None:
    async with agent(args, asleep=True) as opened:
        await opened.notifications.delete()
    output(args).say({"token": None}, "Token given up.")


def _tell(args: argparse.Namespace, status: TokenStatus) -> None:
    output(args).say({"token": status}, f"Token: {status}")


# Connections


async def _switch(args: argparse.Namespace) -> None:
    async with agent(args, asleep=True) as opened:
        known = [connection.connection_id for connection in await opened.connections()]
        for connection_id in args.connections or known:
            await opened.notifications.set_wanted(connection_id, args.wanted)


# Pushes


async def _push(args: argparse.Namespace) -> None:
    payload = await asyncio.to_thread(sys.stdin.buffer.read)
    async with agent(args, asleep=True) as opened:
        if await opened.notifications.on_push(payload):
            async with asyncio.timeout(FETCH_TIMEOUT):
                while not isinstance(event := await opened.next_event(), Fetched):
                    await answer(opened, event, args)


async def _listen(args: argparse.Namespace) -> None:
    file = PushFile(args.pushes)
    async with agent(args, asleep=True) as opened, TaskGroup() as tasks:
        token = await opened.notifications.token()
        if token is None:
            raise Misused("the device is not registered")
        await opened.notifications.on_push(ALL_QUEUES)
        tasks.create_task(_follow(opened, args), name="events")
        output(args).say({"listening": True}, "Listening. Ctrl-C ends it.")
        async for payload in file.pushes(token.device_token):
            try:
                await opened.notifications.on_push(payload)
            except (BadPush, RouterFailure) as error:
                print(f"ntf-agent: {error}", file=sys.stderr, flush=True)


async def _follow(opened: DuplexAgent, args: argparse.Namespace) -> None:
    async for event in opened.events():
        await answer(opened, event, args)
