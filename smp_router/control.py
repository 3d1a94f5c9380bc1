"""The local control socket: one JSON object a line asks for something, one JSON object a line answers."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from inspect import isawaitable
from pathlib import Path
from typing import Any

from protocol.blocking import blocking_info
from protocol.encoding import EntityId, b64, unb64
from protocol.error_codec import decode_error
from protocol.errors import DecodeError
from smp_router.load import LoadQueue
from smp_router.router import Router
from transport.certificates import load_server_files
from transport.errors import TransportError

logger = logging.getLogger(__name__)

MAX_LINE = 1024 * 1024
MAX_CREATED = 1_000_000
MAX_LISTED = 1000
"Queues whose keys are shown in the answer to create_queues."
MAX_BLOCKING_INFO = 1000
"Characters; clients get it in an answer, which must fit in a block."
IDLE_TIMEOUT = 3600.0
OWNER_ONLY = 0o600

Arguments = dict[str, Any]
Action = Callable[[Arguments], Any | Awaitable[Any]]


class ControlError(Exception):
    """A request that cannot be carried out; the message is the answer."""


class NotUnderstood(ControlError):
    """Whoever asks does not know what this socket is for, and is disconnected."""


class Control:
    """The requests. Queues made here stay known, so that `emit` can use them."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._made: list[LoadQueue] = []
        faults = router.faults
        self._actions: Mapping[str, Action] = {
            "status": self._status,
            "drop_connections": lambda _: faults.drop_connections(),
            "refuse": lambda a: faults.refuse(_flag(a)),
            "black_hole": lambda a: faults.black_hole(_flag(a)),
            "lose_answers": lambda a: faults.lose_answers(_flag(a)),
            "delay": lambda a: faults.delay(_number(a, "seconds")),
            "forget_services": lambda _: faults.forget_services(),
            "change_service_ids": lambda _: faults.change_service_ids(),
            "lose_associations": self._lose_associations,
            "delete_queues": lambda a: faults.delete_queues(_ids(a)),
            "send_end": lambda a: faults.send_end(_ids(a)),
            "send_ends": lambda _: faults.send_ends(),
            "send_deld": lambda a: faults.send_deld(_ids(a)),
            "answer_errors": self._answer_errors,
            "block": self._block,
            "unblock": lambda a: sum(router.block(entity_id, None) for entity_id in _ids(a)),
            "present_certificate": self._present_certificate,
            "create_queues": self._create_queues,
            "emit": self._emit,
        }

    async def respond(self, line: bytes) -> Arguments:
        """The answer; raises NotUnderstood for what is no request at all."""
        action, request = self._request(line)
        try:
            result = action(request)
            return {"ok": True, "result": await result if isawaitable(result) else result}
        except (ControlError, ValueError, TransportError) as error:
            return {"ok": False, "error": str(error)}
        except DecodeError:
            return {"ok": False, "error": "an id or an error does not parse"}

    def _request(self, line: bytes) -> tuple[Action, Arguments]:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            raise NotUnderstood("a request is a JSON object") from None
        if not isinstance(request, dict):
            raise NotUnderstood("a request is a JSON object")
        action = self._actions.get(str(request.pop("do", None)))
        if action is None:
            raise NotUnderstood("do: one of " + ", ".join(sorted(self._actions)))
        return action, request

    def _status(self, _arguments: Arguments) -> Arguments:
        services = [
            {
                "role": service.role.name.lower(),
                "queues": service.queues.count,
                "hash": service.ids_hash.hex(),
            }
            for service in self._router.services
        ]
        return {
            "address": str(self._router.address),
            "connections": self._router.connections,
            "queues": len(self._router.state.queues),
            "subscribed_notifiers": len(self._router.subscribed_notifiers()),
            "services": services,
        }

    def _lose_associations(self, arguments: Arguments) -> int:
        part = (
            int(_number(arguments, "count")) if "count" in arguments else float(_number(arguments, "share"))
        )
        return len(self._router.faults.lose_associations(part))

    def _answer_errors(self, arguments: Arguments) -> None:
        error, count = arguments.get("error"), None
        if arguments.get("count") is not None:
            count = int(_number(arguments, "count"))
        parsed = None if error is None else decode_error(str(error).encode())
        self._router.faults.answer_errors(str(arguments.get("command")), parsed, count)

    def _block(self, arguments: Arguments) -> int:
        """For everybody who asks, not a fault: how many of these queues there are."""
        notice = arguments.get("notice")
        if notice is not None and not isinstance(notice, dict):
            raise ControlError("notice: a JSON object")
        try:
            info = blocking_info(str(arguments.get("reason")), notice)
        except DecodeError:
            raise ControlError("reason: spam or content") from None
        if len(info.text) > MAX_BLOCKING_INFO:
            raise ControlError(f"notice: at most {MAX_BLOCKING_INFO} characters of JSON")
        return sum(self._router.block(entity_id, info) for entity_id in _ids(arguments))

    def _present_certificate(self, arguments: Arguments) -> None:
        config_dir = arguments.get("config_dir")
        credentials = None if config_dir is None else load_server_files(Path(str(config_dir)))
        self._router.faults.present_certificate(credentials)

    def _create_queues(self, arguments: Arguments) -> list[dict[str, str]]:
        count = int(_number(arguments, "count"))
        if len(self._made) + count > MAX_CREATED:
            raise ControlError(f"at most {MAX_CREATED} queues")
        made = self._router.load.create_queues(count)
        self._made += made
        return [_listed(queue) for queue in made[:MAX_LISTED]]

    async def _emit(self, arguments: Arguments) -> int:
        count, rate = int(_number(arguments, "count")), None
        if arguments.get("rate") is not None:
            rate = _number(arguments, "rate")
            if rate <= 0:
                raise ControlError("rate: above 0")
        if not self._made:
            raise ControlError("create_queues first")
        await self._router.load.emit(self._made, count, rate)
        return count


def _listed(queue: LoadQueue) -> dict[str, str]:
    return {
        "notifier_id": b64(queue.notifier_id).decode(),
        "notifier_key": b64(queue.notifier_key.der).decode(),
        "recipient_id": b64(queue.recipient_id).decode(),
        "recipient_key": b64(queue.recipient_key.der).decode(),
        "sender_id": b64(queue.sender_id).decode(),
        "ntf_secret": b64(queue.rcv_ntf_dh_secret).decode(),
    }


def _flag(arguments: Arguments) -> bool:
    value = arguments.get("on", True)
    if not isinstance(value, bool):
        raise ControlError("on: true or false")
    return value


def _number(arguments: Arguments, name: str) -> float:
    value = arguments.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ControlError(f"{name}: a number, 0 or more")
    return value


def _ids(arguments: Arguments) -> list[EntityId]:
    values = arguments.get("ids")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ControlError("ids: a list of base64url strings")
    return [EntityId(unb64(value.encode())) for value in values]


@asynccontextmanager
async def control_socket(router: Router, path: Path) -> AsyncIterator[None]:
    """Listen on a Unix socket that only the owner can use, while the block runs."""
    control = Control(router)
    writers: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        try:
            async with asyncio.timeout(None) as idle:
                await _converse(control, reader, writer, idle)
        except (TimeoutError, ConnectionError):
            logger.debug("a control connection ended early")
        finally:
            writers.discard(writer)
            writer.close()

    _remove(path)
    mask = os.umask(0o777 & ~OWNER_ONLY)
    try:
        server = await asyncio.start_unix_server(serve, path, limit=MAX_LINE)
    finally:
        os.umask(mask)
    try:
        yield
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()  # a client that does not read is not waited for
        _remove(path)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


async def _converse(
    control: Control, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, idle: asyncio.Timeout
) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        idle.reschedule(clock() + IDLE_TIMEOUT)
        try:
            line = await reader.readline()
        except ValueError:  # longer than the limit
            return
        if not line.endswith(b"\n"):
            return
        idle.reschedule(None)
        try:
            answer, goes_on = await control.respond(line), True
        except NotUnderstood as error:
            answer, goes_on = {"ok": False, "error": str(error)}, False
        writer.write(json.dumps(answer).encode() + b"\n")
        idle.reschedule(clock() + IDLE_TIMEOUT)
        await writer.drain()
        if not goes_on:
            return


async def ask(path: Path, request: str) -> Arguments:
    """Send one request to a running router and return its answer."""
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=MAX_LINE)
    except OSError as error:
        raise ControlError(f"{path}: {error.strerror}; a router with this --control must run") from None
    try:
        writer.write(request.encode() + b"\n")
        async with asyncio.timeout(IDLE_TIMEOUT):
            line = await reader.readline()
        if not line:
            raise ControlError("the router closed the connection")
        answer: Arguments = json.loads(line)
        return answer
    finally:
        writer.close()
