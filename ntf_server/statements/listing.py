"""Lists of a client's subscriptions, sent page by page: a list may be long, and its client slow."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from protocol.device_token import ApnsToken, FcmToken
from store.interface import GatewayStore, StoreError
from store.statement_records import DeviceRegistration, GatewaySubscription, MadeRule, Rule
from transport.budget import CpuBudget
from transport.limits import ConnectionCounter

LISTS, LISTS_PER_SOURCE = 128, 32
"At once. Each has a page in memory, and what the system and TLS buffer of it."
PAGE = 500
"Rules."
SEND_TIMEOUT = 60.0
"Seconds in which a client takes its list."

log = logging.getLogger(__name__)


class Lists:
    """Sends them, to each client one at a time."""

    def __init__(self, store: GatewayStore, budget: CpuBudget) -> None:
        self._store = store
        self._budget = budget
        self._clients: set[bytes] = set()
        self._under_way = ConnectionCounter(LISTS, LISTS_PER_SOURCE)

    @contextmanager
    def begun(self, client_id: bytes, source: str) -> Iterator[bool]:
        """Whether the client may have a list now; it counts until the end of the block."""
        if client_id in self._clients or not self._under_way.admit(source):
            yield False
            return
        self._clients.add(client_id)
        try:
            yield True
        finally:
            self._clients.remove(client_id)
            self._under_way.release(source)

    async def send(
        self,
        request: web.Request,
        found: Sequence[GatewaySubscription],
        pending: Sequence[DeviceRegistration],
        source: str,
    ) -> web.StreamResponse:
        """Returns when the client has taken it, but for what the system buffers. One that does not in time is
        disconnected, so that it knows that the list is not complete; also if the store fails meanwhile."""
        response = web.StreamResponse(headers={"Content-Type": "application/json; charset=utf-8"})
        try:
            async with asyncio.timeout(SEND_TIMEOUT):
                await response.prepare(request)
                await response.write(b"[")
                for number, subscription in enumerate(found):
                    await response.write(b"," * bool(number) + _head(subscription))
                    await self._send_rules(response, subscription, source)
                    await response.write(b"]}")
                for number, device in enumerate(pending, len(found)):
                    await response.write(b"," * bool(number) + _head(device) + b"]}")
                await response.write(b"]")
                await response.write_eof()
        except TimeoutError:
            _cut_off(request)
        except StoreError as error:
            log.error("the statement gateway waits for the store: %s", error)
            _cut_off(request)
        except ConnectionError:
            pass  # it is gone
        return response

    async def _send_rules(
        self, response: web.StreamResponse, subscription: GatewaySubscription, source: str
    ) -> None:
        after: Rule | None = None
        while page := await self._store.gateway_rules(subscription.key, after, PAGE):
            with await self._budget.take(source):
                text = json.dumps([_shown(rule, subscription.subscription_id) for rule in page])[1:-1]
            await response.write(b"," * (after is not None) + text.encode())
            after = Rule(page[-1].sender, page[-1].topic)
            if len(page) < PAGE:
                break


def _cut_off(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _head(subscription: GatewaySubscription | DeviceRegistration) -> bytes:
    """What is shown of it, up to its rules."""
    token = subscription.device_token
    assert isinstance(token, ApnsToken | FcmToken)
    shown: dict[str, Any] = {
        "subscription_id": str(uuid.UUID(bytes=subscription.subscription_id)),
        "notificationType": subscription.channel.value,
        "token": token.token.decode(),
        "call": subscription.is_call,
        "created_at": subscription.created_at,
    }
    if isinstance(subscription, GatewaySubscription):
        shown |= {"updated_at": subscription.updated_at, "state": "active"}
    else:
        shown |= {"updated_at": subscription.created_at, "state": "pending"}
    return f'{json.dumps(shown)[:-1]}, "rules": ['.encode()


def _shown(rule: MadeRule, subscription_id: bytes) -> dict[str, str | int]:
    return {
        "id": str(uuid.UUID(bytes=rule.rule_id(subscription_id))),
        "sender_pubkey": rule.sender.hex(),
        "topic": rule.topic.hex(),
        "created_at": int(rule.created_at),
        "state": "active" if rule.is_settled else "pending",
    }
