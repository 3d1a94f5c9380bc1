"""The gateway's HTTP API: who is pushed to, for whose statements about what."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import NamedTuple, Protocol, TypeVar

from aiohttp import web
from OpenSSL import SSL

from ntf_server.clock import SECONDS_PER_DAY, Clock
from ntf_server.config import ConfigError, StatementsConfig
from ntf_server.limits import AddressLimits
from ntf_server.metrics import counter
from ntf_server.push.verification_limits import VerificationLimits
from ntf_server.statements import bodies
from ntf_server.statements.bodies import BadBody, RulesBody
from ntf_server.statements.http_server import (
    ADDRESS_PART,
    LONG_BODIES,
    SHORT_BODY,
    Bodies,
    HttpServer,
    json_error,
)
from ntf_server.statements.listing import Lists
from ntf_server.statements.openapi import RULES, SPEC_PATH, SUBSCRIPTIONS, VERIFY, document
from ntf_server.statements.signed_requests import SCHEME, Caller, Request, Unauthenticated, authenticate
from protocol.device_token import Provider
from store.interface import GatewayStore, StoreError
from store.statement_records import (
    GatewayCaps,
    NewGatewaySubscription,
    Refusal,
    RegistrationKey,
    RuleEdit,
    SignedRequest,
    TokenTaken,
)
from transport.budget import CpuBudget
from transport.cancellation import raise_if_cancelled
from transport.errors import CertificateFileError
from transport.hosts import is_own_host, named_host
from transport.limits import UNLIMITED, ConnectionCounter, Rate, RateLimiter, source_of
from transport.tls import web_context

log = logging.getLogger(__name__)

ADDRESS_SHARE = 20
"An address may ask so much more often than a client: phones share addresses."
UUID_SIZE = 16
RULES_WAIT = 3.0
"Seconds that the answer to new rules waits, so that statements made after it are pushed."
RULES_LOOK = 0.1
"Seconds between looks whether another daemon has read what the node stored before them."
MAX_NAME = 80
"Characters of what a proxy calls a client."
REQUEST_SECONDS = 0.0004
"CPU time of a request besides what is measured: reading its head, finding its handler, answering."

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
    Refusal.WRONG_CODE: (HTTPStatus.FORBIDDEN, "wrong_code"),
    Refusal.TOPICS: (HTTPStatus.TOO_MANY_REQUESTS, "too_many_topics"),
}
EDITED = {
    RuleEdit.REPLACE: (HTTPStatus.NO_CONTENT, ""),
    RuleEdit.ADD: (HTTPStatus.CREATED, "added"),
    RuleEdit.REMOVE: (HTTPStatus.OK, "removed"),
}
"The answer's status, and its word for the rules that it counts."
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class DeviceSink(Protocol):
    """The push side."""

    def verify_device(self, registration_key: RegistrationKey) -> None:
        """Push its code to a device."""


class Devices(NamedTuple):
    """Which devices can be reached, and how they are asked for their code."""

    sink: DeviceSink
    providers: frozenset[Provider]
    limits: VerificationLimits


@dataclass
class Reserved:
    most: int
    used: int = 0


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
        budget: CpuBudget,
        devices: Devices | None = None,
        most_connections: int = 0,
        reuse_port: bool = False,
    ) -> None:
        """`devices`: None if any device is taken as it is. `most_connections`: at once; 0 is no limit.
        `reuse_port`: other daemons of this machine serve on it too."""
        self._devices = devices
        self._settled = asyncio.Event()
        self.are_rules_read: Callable[[], bool] = lambda: False
        "Whether what the node stored before new rules is being read, so that it is worth to wait for it."
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
        self._topics = RateLimiter(Rate.over(config.topics_per_day, SECONDS_PER_DAY))
        # A proxy that names its clients has one address for all of them.
        by_address = (
            UNLIMITED if config.client_header else Rate.over(config.requests_per_minute * ADDRESS_SHARE, 60)
        )
        self._requests = RateLimiter(by_address)
        self._addresses = addresses
        self._budget = budget
        self._hosts = frozenset(host.lower() for host in config.hosts)
        self._one_body = asyncio.Lock()
        self._tls = _tls(config)
        self._spec = json.dumps(document(config)).encode()
        part = 0 if config.client_header else ADDRESS_PART
        self._bodies = Bodies(per_source=part and LONG_BODIES // part)
        self._lists = Lists(store, budget)
        per_address = part and -(-most_connections // part)
        connections = ConnectionCounter(most_connections, per_address)
        self._server = HttpServer(self.application(), connections, budget)

    async def open(self) -> int:
        """Returns the port."""
        where = self._config.listen or None, self._config.port
        return await self._server.open(*where, self._tls, reuse_port=self._reuse_port)

    async def close(self) -> None:
        await self._server.close()

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._answered])
        application.add_routes(
            [
                web.post(SUBSCRIPTIONS, self._subscribe),
                web.delete(SUBSCRIPTIONS, self._unsubscribe),
                web.get(SUBSCRIPTIONS, self._list, allow_head=False),
                web.post(VERIFY, self._verify),
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
        source = self._source(request)
        with await self._budget.take(source):
            is_allowed = self._requests.allows(source_of(request.remote or ""), self._clock.monotonic())
        self._budget.charge(source, REQUEST_SECONDS)
        if not is_allowed:
            return _too_often()
        try:
            self._check_host(request)
            return await handler(request)
        except BadBody as bad:
            return json_error(HTTPStatus.BAD_REQUEST, "bad_request", str(bad))
        except Unauthenticated as unknown:
            return _unauthenticated("unauthenticated", str(unknown))
        except WrongHost:
            text = "this gateway does not answer to this host name: its operator sets [STATEMENTS] hosts"
            return json_error(HTTPStatus.MISDIRECTED_REQUEST, "wrong_host", text)
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

    def _source(self, request: web.Request) -> str:
        """Whom a request is counted for: the client that a proxy names, or the address."""
        named = request.headers.get(self._config.client_header) if self._config.client_header else None
        return source_of(request.remote or "") if named is None else f"client {named[:MAX_NAME].lower()}"

    def _check_host(self, request: web.Request) -> None:
        """Whether the request is for this gateway: one that was signed for another, or that a page of another
        site makes (DNS rebinding), is not."""
        host = named_host(request.headers.get("Host", ""))  # the library refuses a second one
        own = request.transport.get_extra_info("sockname") if request.transport is not None else None
        if not (host in self._hosts if self._hosts else is_own_host(host, own[0] if own else "")):
            raise WrongHost

    async def _read(self, request: web.Request, limit: int = 0) -> tuple[bytes, Caller]:
        """The body, which has at most `limit` bytes, and who sent it."""
        source = self._source(request)
        body = await self._bodies.read(request, source, limit)
        if self._config.client_header:
            named = request.headers.getall(self._config.client_header, [])
            caller = Caller(_named_by_proxy(named), None)
        else:
            header = request.headers.get("Authorization")
            signed = Request(named_host(request.host), request.method, request.raw_path, body.digest)
            with await self._budget.take(source):
                caller = authenticate(header, signed, self._clock.now())
        if not self._clients.allows(caller.client_id, self._clock.monotonic()):
            raise web.HTTPTooManyRequests
        return body.content, caller

    def _check_address(self, request: web.Request, limiter: RateLimiter, amount: int = 1) -> None:
        """What is added counts for the address: keys cost nothing. A proxy answers for its own."""
        source = source_of(request.remote or "")
        if not (self._config.client_header or limiter.allows(source, self._clock.monotonic(), amount)):
            raise web.HTTPTooManyRequests

    async def _subscribe(self, request: web.Request) -> web.StreamResponse:
        body, (client_id, once) = await self._read(request, bodies.MAX_REGISTRATION)
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
        if self._devices is not None and new.device_token.provider not in self._devices.providers:
            return json_error(HTTPStatus.UNPROCESSABLE_ENTITY, "provider_not_configured")
        if self._devices is not None and self._config.verify_devices:
            return await self._register(new, once, self._devices)
        taken = _allowed(await self._store.add_gateway_subscription(new, once, self._caps))
        if taken is not None:
            return _token_taken(taken)
        return web.json_response({"subscription_id": str(subscription_id)}, status=HTTPStatus.CREATED)

    async def _register(
        self, new: NewGatewaySubscription, once: SignedRequest | None, devices: Devices
    ) -> web.StreamResponse:
        """A device that counts when it has shown its code."""
        if not devices.limits.allows(new.device_token, self._clock.monotonic()):
            raise web.HTTPTooManyRequests
        code = self._random(bodies.CODE_SIZE)
        registered = await self._store.register_device(new, code, once, self._caps)
        if isinstance(registered, Refusal):
            raise Refused(registered)
        if isinstance(registered, TokenTaken):
            return _token_taken(registered)
        devices.sink.verify_device(registered)
        answer = {"subscription_id": str(uuid.UUID(bytes=new.subscription_id)), "state": "pending"}
        return web.json_response(answer, status=HTTPStatus.CREATED)

    async def _verify(self, request: web.Request) -> web.StreamResponse:
        body, (client_id, once) = await self._read(request, bodies.MAX_REGISTRATION)
        subscription_id, code = bodies.verification(bodies.json_object(body))
        now = int(self._clock.now())
        _allowed(await self._store.verify_device(client_id, subscription_id, code, now, once))
        self.rules_changed.set()  # those of another client may be gone
        return web.json_response(
            {"subscription_id": str(uuid.UUID(bytes=subscription_id)), "state": "active"}
        )

    def rules_settled(self) -> None:
        """What the node stored before some new rules is known."""
        settled, self._settled = self._settled, asyncio.Event()
        settled.set()

    async def _wait_for_rules(self, subscription_id: bytes) -> None:
        """Return when whatever comes from now on is new for the rules; not later than after `RULES_WAIT`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RULES_WAIT):
                while self.are_rules_read() and await self._store.has_new_rules(subscription_id):
                    settled = self._settled
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(RULES_LOOK):
                            await settled.wait()

    async def _unsubscribe(self, request: web.Request) -> web.StreamResponse:
        body, (client_id, once) = await self._read(request, bodies.MAX_UNSUBSCRIBE)
        ids = bodies.subscription_ids(bodies.json_object(body))
        _allowed(await self._store.delete_gateway_subscriptions(client_id, ids, once))
        self.rules_changed.set()
        return web.Response(status=HTTPStatus.NO_CONTENT)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        _, caller = await self._read(request)
        source = self._source(request)
        with self._lists.begun(caller.client_id, source) as may_list:
            if not may_list:
                raise web.HTTPTooManyRequests
            now = int(self._clock.now())
            found = _allowed(await self._store.gateway_subscriptions(*caller, now=now))
            pending = await self._store.registrations_of(caller.client_id)
            return await self._lists.send(request, found, pending, source)

    async def _edit(self, edit: RuleEdit, request: web.Request) -> web.StreamResponse:
        limit = bodies.most_rule_bytes(self._caps.rules_per_subscription)
        content, (client_id, once) = await self._read(request, limit)
        body = await self._rules(content, self._source(request))
        if edit is not RuleEdit.REMOVE:
            self._check_address(request, self._addresses.rules, len(body.rules))
        now = self._clock.now()
        with self._new_topics(request, client_id, len(body.rules)) as topics:
            edited = _allowed(
                await self._store.edit_rules(
                    *(client_id, body.subscription_id, edit, body.rules, once),
                    now=now,
                    caps=self._caps,
                    most_new_topics=topics.most,
                )
            )
            topics.used = edited.new_topics
        self.rules_changed.set()
        if edit is not RuleEdit.REMOVE:
            await self._wait_for_rules(body.subscription_id)
        status, word = EDITED[edit]
        if not word:
            return web.Response(status=status)
        return web.json_response({word: edited.changed, "total_rules": edited.total}, status=status)

    @contextmanager
    def _new_topics(self, request: web.Request, client_id: bytes, wanted: int) -> Iterator[Reserved]:
        """Reserve what client and address may add of so many topics; what is not used is given back."""
        now, source = self._clock.monotonic(), source_of(request.remote or "")
        address = RateLimiter(UNLIMITED) if self._config.client_header else self._addresses.topics
        of_client = self._topics.take_at_most(client_id, now, wanted)
        topics = Reserved(address.take_at_most(source, now, of_client))
        try:
            yield topics
        finally:
            self._topics.give_back(client_id, of_client - topics.used)
            address.give_back(source, topics.most - topics.used)

    async def _rules(self, content: bytes, source: str) -> RulesBody:
        """Read a little in each turn of the event loop; of long bodies one after the other."""
        body = RulesBody(content, self._caps.rules_per_subscription)
        if len(content) <= SHORT_BODY:
            await self._read_rules(body, source)
        else:
            async with self._one_body:
                await self._read_rules(body, source)
        return body

    async def _read_rules(self, body: RulesBody, source: str) -> None:
        reading = iter(body)
        is_read = False
        while not is_read:
            with await self._budget.take(source) as work:
                is_read = all(not work.is_over for _ in reading)

    async def _serve_spec(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._spec, content_type="application/json")


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


class WrongHost(Exception):
    """The request is for another gateway."""


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


def _tls(config: StatementsConfig) -> SSL.Context | None:
    if config.cert_file is None or config.key_file is None:
        return None
    try:
        return web_context(config.cert_file, config.key_file)
    except CertificateFileError as error:
        raise ConfigError(f"[STATEMENTS] cert_file and key_file: {error}") from None
