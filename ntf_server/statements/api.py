"""The gateway's HTTP API: who is pushed to, for whose statements about what."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from aiohttp import web

from ntf_server.clock import Clock
from ntf_server.config import ConfigError, StatementsConfig
from ntf_server.limits import AddressLimits
from ntf_server.metrics import counter
from ntf_server.statements import bodies
from ntf_server.statements.bodies import BadBody
from ntf_server.statements.http_server import (
    ADDRESS_PART,
    LONG_BODIES,
    MAX_BODY,
    HttpServer,
    json_error,
    send,
    whole_body,
)
from ntf_server.statements.openapi import RULES, SPEC_PATH, SUBSCRIPTIONS, document
from ntf_server.statements.signed_requests import SCHEME, Caller, Unauthenticated, authenticate
from protocol.device_token import ApnsToken, FcmToken, Provider
from store.interface import GatewayStore, StoreError
from store.statement_records import (
    GatewayCaps,
    GatewaySubscription,
    NewGatewaySubscription,
    Refusal,
    RuleEdit,
    TokenTaken,
)
from transport.cancellation import raise_if_cancelled
from transport.limits import UNLIMITED, ConnectionCounter, Rate, RateLimiter, source_of

log = logging.getLogger(__name__)

ADDRESS_SHARE = 20
"An address may ask so much more often than a client: phones share addresses."
UUID_SIZE = 16

REQUESTS = counter("statements_requests", "Requests to the statement gateway", ["status"])

APPLE = {
    "production": Provider.APNS_PROD,
    "development": Provider.APNS_DEV,
    "test": Provider.APNS_TEST,
}
REFUSED: dict[Refusal, tuple[HTTPStatus, str]] = {
    Refusal.REPLAYED: (HTTPStatus.UNAUTHORIZED, "replayed"),
    Refusal.UNKNOWN: (HTTPStatus.NOT_FOUND, "unknown_subscription"),
    Refusal.QUOTA: (HTTPStatus.FORBIDDEN, "too_many"),
}
EDITED = {
    RuleEdit.REPLACE: (HTTPStatus.NO_CONTENT, ""),
    RuleEdit.ADD: (HTTPStatus.CREATED, "added"),
    RuleEdit.REMOVE: (HTTPStatus.OK, "removed"),
}
"The answer's status, and its word for the rules that it counts."
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class GatewayApi:
    """Serves between `open` and `close`; `rules_changed` is set whenever they were."""

    def __init__(
        self,
        store: GatewayStore,
        config: StatementsConfig,
        clock: Clock,
        random: Callable[[int], bytes],
        *,
        addresses: AddressLimits,
        most_connections: int = 0,
        reuse_port: bool = False,
    ) -> None:
        """`most_connections`: at once; 0 is no limit. `reuse_port`: other daemons of this machine serve on it
        too."""
        self._store = store
        self._config = config
        self._clock = clock
        self._random = random
        self.rules_changed = asyncio.Event()
        self._reuse_port = reuse_port
        self._caps = GatewayCaps(
            subscriptions_per_client=config.subscriptions_per_client,
            rules_per_subscription=config.rules_per_subscription,
        )
        self._clients = RateLimiter(Rate.over(config.requests_per_minute, 60))
        # A proxy that names its clients has one address for all of them.
        by_address = (
            UNLIMITED if config.client_header else Rate.over(config.requests_per_minute * ADDRESS_SHARE, 60)
        )
        self._requests = RateLimiter(by_address)
        self._addresses = addresses
        self._listing: set[bytes] = set()
        self._one_list = asyncio.Lock()
        self._tls = _tls(config)
        self._spec = json.dumps(document(config)).encode()
        part = 0 if config.client_header else ADDRESS_PART
        self._long_bodies = ConnectionCounter(LONG_BODIES, part and LONG_BODIES // part)
        per_address = part and -(-most_connections // part)
        self._server = HttpServer(self.application(), ConnectionCounter(most_connections, per_address))

    async def open(self) -> int:
        """Returns the port."""
        where = self._config.listen or None, self._config.port
        return await self._server.open(*where, self._tls, reuse_port=self._reuse_port)

    async def close(self) -> None:
        await self._server.close()

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._answered], client_max_size=MAX_BODY)
        application.add_routes(
            [
                web.post(SUBSCRIPTIONS, self._subscribe),
                web.delete(SUBSCRIPTIONS, self._unsubscribe),
                web.get(SUBSCRIPTIONS, self._list, allow_head=False),
                web.put(RULES, partial(self._edit, RuleEdit.REPLACE)),
                web.post(RULES, partial(self._edit, RuleEdit.ADD)),
                web.delete(RULES, partial(self._edit, RuleEdit.REMOVE)),
                web.get(SPEC_PATH, self._serve_spec, allow_head=False),
            ]
        )
        return application

    @web.middleware
    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await self._answer(request, handler)
        REQUESTS.labels(str(response.status)).inc()
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not self._requests.allows(source_of(request.remote or ""), self._clock.monotonic()):
            return _too_often()
        try:
            return await handler(request)
        except BadBody as bad:
            return json_error(HTTPStatus.BAD_REQUEST, "bad_request", str(bad))
        except Unauthenticated as unknown:
            return _unauthenticated("unauthenticated", str(unknown))
        except Refused as refused:
            return refused.response
        except web.HTTPException as error:
            return _http_error(error)
        except StoreError as error:
            log.error("the statement gateway waits for the store: %s", error)
            return json_error(HTTPStatus.SERVICE_UNAVAILABLE, "unavailable")
        except Exception as error:
            raise_if_cancelled()
            log.error("a request to the statement gateway failed with %s", type(error).__name__)
            return json_error(HTTPStatus.INTERNAL_SERVER_ERROR, "internal")

    async def _read(self, request: web.Request) -> tuple[bytes, Caller]:
        """The body, and who sent it."""
        body = await whole_body(request, self._long_bodies)
        if self._config.client_header:
            named = request.headers.getall(self._config.client_header, [])
            caller = Caller(_named_by_proxy(named), None)
        else:
            header = request.headers.get("Authorization")
            caller = authenticate(header, request.method, request.raw_path, body, self._clock.now())
        if not self._clients.allows(caller.client_id, self._clock.monotonic()):
            raise web.HTTPTooManyRequests
        return body, caller

    def _check_address(self, request: web.Request, limiter: RateLimiter, amount: int = 1) -> None:
        """What is added counts for the address: keys cost nothing. A proxy answers for its own."""
        source = source_of(request.remote or "")
        if not (self._config.client_header or limiter.allows(source, self._clock.monotonic(), amount)):
            raise web.HTTPTooManyRequests

    async def _subscribe(self, request: web.Request) -> web.StreamResponse:
        body, (client_id, once) = await self._read(request)
        asked = bodies.registration(bodies.json_object(body), APPLE[self._config.apns])
        self._check_address(request, self._addresses.tokens)
        subscription_id = uuid.UUID(bytes=self._random(UUID_SIZE), version=4)
        new = NewGatewaySubscription(
            subscription_id=subscription_id.bytes,
            client_id=client_id,
            channel=asked.channel,
            device_token=asked.device_token,
            is_call=asked.is_call,
            created_at=int(self._clock.now()),
        )
        taken = _allowed(await self._store.add_gateway_subscription(new, once, self._caps))
        if taken is not None:
            return _token_taken(taken)
        return web.json_response({"subscription_id": str(subscription_id)}, status=HTTPStatus.CREATED)

    async def _unsubscribe(self, request: web.Request) -> web.StreamResponse:
        body, (client_id, once) = await self._read(request)
        ids = bodies.subscription_ids(bodies.json_object(body))
        _allowed(await self._store.delete_gateway_subscriptions(client_id, ids, once))
        self.rules_changed.set()
        return web.Response(status=HTTPStatus.NO_CONTENT)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        """One at a time for each client: a list may be long, and is in memory until the client took it."""
        _, caller = await self._read(request)
        if caller.client_id in self._listing:
            raise web.HTTPTooManyRequests
        self._listing.add(caller.client_id)
        try:
            response = await self._listed(caller)
            await send(request, response)
        finally:
            self._listing.remove(caller.client_id)
        return response

    async def _listed(self, caller: Caller) -> web.Response:
        async with self._one_list:  # its rules are in memory as objects
            shown = []
            for one in _allowed(await self._store.gateway_subscriptions(*caller)):
                shown.append(json.dumps(_shown(one)))
                await asyncio.sleep(0)  # one may have thousands of rules: others have a turn
            return web.json_response(text=f"[{','.join(shown)}]")

    async def _edit(self, edit: RuleEdit, request: web.Request) -> web.StreamResponse:
        body, (client_id, once) = await self._read(request)
        subscription_id, rules = bodies.rules(bodies.json_object(body), self._caps.rules_per_subscription)
        if edit is not RuleEdit.REMOVE:
            self._check_address(request, self._addresses.rules, len(rules))
        now = int(self._clock.now())
        edited = _allowed(
            await self._store.edit_rules(
                client_id, subscription_id, edit, rules, once, now=now, caps=self._caps
            )
        )
        self.rules_changed.set()
        status, word = EDITED[edit]
        if not word:
            return web.Response(status=status)
        return web.json_response({word: edited.changed, "total_rules": edited.total}, status=status)

    async def _serve_spec(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._spec, content_type="application/json")


def _shown(subscription: GatewaySubscription) -> dict[str, Any]:
    token = subscription.device_token
    assert isinstance(token, ApnsToken | FcmToken)
    return {
        "subscription_id": str(uuid.UUID(bytes=subscription.subscription_id)),
        "notificationType": subscription.channel.value,
        "token": token.token.decode(),
        "call": subscription.is_call,
        "created_at": subscription.created_at,
        "updated_at": subscription.updated_at,
        "rules": [
            {"sender_pubkey": rule.sender.hex(), "topic": rule.topic.hex()} for rule in subscription.rules
        ],
    }


def _named_by_proxy(values: list[str]) -> bytes:
    try:
        (value,) = values
        key = bytes.fromhex(value.removeprefix("0x"))
    except ValueError:
        key = b""
    if len(key) != bodies.KEY_SIZE:
        raise Unauthenticated("the proxy named no client")
    return key


def _unauthenticated(code: str, message: str = "") -> web.Response:
    response = json_error(HTTPStatus.UNAUTHORIZED, code, message)
    response.headers["WWW-Authenticate"] = SCHEME
    return response


def _too_often() -> web.Response:
    response = json_error(HTTPStatus.TOO_MANY_REQUESTS, "too_often")
    response.headers["Retry-After"] = "60"
    return response


def _http_error(error: web.HTTPException) -> web.Response:
    """What aiohttp says by itself, in JSON."""
    if error.status == HTTPStatus.TOO_MANY_REQUESTS:
        return _too_often()
    response = json_error(error.status)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


class Refused(Exception):
    """The store said no."""

    def __init__(self, refusal: Refusal) -> None:
        status, code = REFUSED[refusal]
        if status is HTTPStatus.UNAUTHORIZED:
            self.response = _unauthenticated(code, refusal.value)
        else:
            self.response = json_error(status, code, refusal.value)


def _allowed(result: T | Refusal) -> T:
    if isinstance(result, Refusal):
        raise Refused(result)
    return result


def _token_taken(taken: TokenTaken) -> web.Response:
    more = {}
    if taken.subscription_id is not None:
        more["subscription_id"] = str(uuid.UUID(bytes=taken.subscription_id))
    return json_error(HTTPStatus.CONFLICT, "token_registered", **more)


def _tls(config: StatementsConfig) -> ssl.SSLContext | None:
    if config.cert_file is None or config.key_file is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.cert_file, config.key_file)
    except (OSError, ssl.SSLError):
        raise ConfigError(
            f"[STATEMENTS] cert_file and key_file: {config.cert_file} and {config.key_file} are no"
            " certificate with its key"
        ) from None
    return context
