"""One handler per NTF command. A handler sees only authorised commands and returns the answer."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any

import prometheus_client

from ntf_server.authentication import DENIED, Authenticator, Denied, Entity, Request
from ntf_server.clock import Clock, day
from ntf_server.housekeeping import Deletions
from ntf_server.interfaces import Subscriber, VerificationSink
from ntf_server.journal import EventSink
from ntf_server.metrics import counter
from ntf_server.periodic import first_due
from ntf_server.push.verification_limits import VerificationLimits
from protocol.crypto import X25519PrivateKey
from protocol.device_token import DeviceToken, Provider
from protocol.encoding import EntityId
from protocol.errors import AUTH, CMD_PROHIBITED, INTERNAL, QUOTA, ErrorType, ProtocolError, store_error
from protocol.ntf_commands import (
    MIN_CRON_MINUTES,
    Err,
    IdSub,
    IdTkn,
    NtfResponse,
    Ok,
    Ping,
    Pong,
    Schk,
    Sdel,
    Snew,
    Sub,
    Tchk,
    Tcrn,
    Tdel,
    Tkn,
    Tnew,
    Trpl,
    Tvfy,
)
from protocol.session_params import SessionParams
from protocol.statuses import TokenInput, TokenStatus
from store.interface import CommandStore, StoreError
from store.journal_schema import DeletionReason, JournalEvent
from store.records import (
    CreatedSubscription,
    NewSubscription,
    NewToken,
    SnewRefusal,
    SubscriptionRecord,
    TokenRecord,
)
from transport.budget import CpuBudget
from transport.cancellation import raise_if_cancelled

logger = logging.getLogger(__name__)

ID_SIZE = 24
CODE_SIZE = 32

STORE_FAILED = store_error("unavailable")
"All that a client learns: what went wrong, and where, is the operator's business."

TNEW_ATTEMPTS = 3
"A record that is deleted or replaced under the hands of TNEW is looked for again."

TOKENS_CREATED = counter("tokens_created", "Tokens registered")
TOKENS_VERIFIED = counter("tokens_verified", "Tokens verified")
TOKENS_REPLACED = counter("tokens_replaced", "Device tokens replaced")
TOKENS_DELETED = counter("tokens_deleted", "Tokens deleted by their clients")
SUBSCRIPTIONS_CREATED = counter("subscriptions_created", "Subscriptions created")
SUBSCRIPTIONS_DELETED = counter("subscriptions_deleted", "Subscriptions deleted by their clients")
COMMANDS = counter("commands", "Commands by tag and outcome", ["command", "outcome"])


class Commands:
    """Runs commands against the store. One for the whole server; connections have no state here."""

    def __init__(
        self,
        store: CommandStore,
        subscriber: Subscriber,
        push: VerificationSink,
        *,
        clock: Clock,
        random: Callable[[int], bytes],
        providers: frozenset[Provider],
        verifications: VerificationLimits,
        journal: EventSink,
        deletions: Deletions,
        budget: CpuBudget,
    ) -> None:
        self._store = store
        self._subscriber = subscriber
        self._push = push
        self._clock = clock
        self._random = random
        self._providers = providers
        self._verifications = verifications
        self._journal = journal
        self._deletions = deletions
        self._authenticator = Authenticator(store, budget)

    async def run(self, params: SessionParams, requests: Sequence[Request], source: str) -> list[NtfResponse]:
        """Answers in the order of `requests`: of one connection, and fit to run together (`RUN_KINDS`).

        `source` is where they come from, as limits count it.
        """
        try:
            entities = await self._authenticator.authenticate(params, requests, source)
            responses = await self._answer(requests, entities, source)
        except StoreError as error:
            logger.error("store: %s", error)
            responses = [Err(STORE_FAILED)] * len(requests)
        _count(requests, responses)
        return responses

    async def _answer(
        self, requests: Sequence[Request], entities: Sequence[Entity | Denied], source: str
    ) -> list[NtfResponse]:
        if isinstance(requests[0].message, Snew):
            return await self._create_subscriptions(requests, entities, source)
        if type(requests[0].message) in READS:
            return [_read(request, entity) for request, entity in zip(requests, entities, strict=True)]
        return [await self._one(request, entity) for request, entity in zip(requests, entities, strict=True)]

    async def _one(self, request: Request, entity: Entity | Denied) -> NtfResponse:
        if entity is DENIED:
            return Err(AUTH)
        try:
            return await HANDLERS[type(request.message)](self, entity, request.message)
        except ProtocolError as error:
            return Err(error.error)
        except StoreError:
            raise
        except Exception as error:
            raise_if_cancelled()
            # Its text may hold what the client sent: only the kind is logged.
            logger.error("%s failed: %s", type(request.message).__name__, type(error).__name__)
            return Err(INTERNAL)

    # Tokens

    async def tnew(self, entity: None, command: Tnew) -> NtfResponse:
        self._check_device(command.device_token)
        for _ in range(TNEW_ATTEMPTS):
            record = await self._store.token_by_device(command.device_token, command.auth_key.der)
            if record is None:
                new = self._new_token(command)
                record = await self._store.create_token(new)
                if record.token_id == new.token_id:
                    TOKENS_CREATED.inc()
                    self._record(JournalEvent.TOKEN_REGISTERED, record)
                    break
            if not _same_secret(record, command):
                return Err(AUTH)
            move = await self._store.move_token(record, TokenInput.REGISTERED, self._today())
            if move is not None:
                if move.before is not move.after:
                    self._record(JournalEvent.TOKEN_REGISTERED, record)
                break
        else:
            return Err(INTERNAL)
        self._push.verify(record.key)
        return _id_tkn(record)

    def _new_token(self, command: Tnew) -> NewToken:
        dh_private = X25519PrivateKey(self._random(32))
        return NewToken(
            token_id=EntityId(self._random(ID_SIZE)),
            device_token=command.device_token,
            verify_key=command.auth_key.der,
            dh_private=dh_private.raw,
            dh_secret=dh_private.exchange(command.dh_key),
            code=self._random(CODE_SIZE),
            updated_on=self._today(),
        )

    async def tvfy(self, token: TokenRecord, command: Tvfy) -> NtfResponse:
        if not hmac.compare_digest(command.code, token.code):
            return Err(AUTH)
        if token.status is TokenStatus.ACTIVE:
            return Ok()
        move = await self._store.move_token(token, TokenInput.CODE_MATCHED, self._today())
        if move is None:
            return Err(AUTH)
        self._deletions.note(move.deletion, DeletionReason.SUPERSEDED)
        if move.before is not move.after:
            TOKENS_VERIFIED.inc()
            self._record(JournalEvent.TOKEN_VERIFIED, token)
        return Ok()

    async def trpl(self, token: TokenRecord, command: Trpl) -> NtfResponse:
        self._check_device(command.device_token)
        code = self._random(CODE_SIZE)
        if not await self._store.replace_device_token(token.key, command.device_token, code, self._today()):
            return Err(AUTH)
        TOKENS_REPLACED.inc()
        self._journal.record(
            JournalEvent.TOKEN_REPLACED, token=token.token_id, provider=command.device_token.provider.tag
        )
        self._push.verify(token.key)
        return Ok()

    async def tdel(self, token: TokenRecord, command: Tdel) -> NtfResponse:
        deletion = await self._store.delete_token(token.key)
        if deletion is None:
            return Err(AUTH)
        TOKENS_DELETED.inc()
        self._deletions.note(deletion, DeletionReason.REQUESTED)
        return Ok()

    async def tcrn(self, token: TokenRecord, command: Tcrn) -> NtfResponse:
        if 0 < command.minutes < MIN_CRON_MINUTES:
            return Err(QUOTA)
        due = first_due(self._clock.now(), command.minutes, self._random) if command.minutes else None
        return Ok() if await self._store.set_cron(token.key, command.minutes, due) else Err(AUTH)

    def _check_device(self, device_token: DeviceToken) -> None:
        if device_token.provider not in self._providers:
            raise ProtocolError(CMD_PROHIBITED)
        if not self._verifications.allows(device_token, self._clock.monotonic()):
            raise ProtocolError(QUOTA)

    # Subscriptions

    async def _create_subscriptions(
        self, requests: Sequence[Request], entities: Sequence[Entity | Denied], source: str
    ) -> list[NtfResponse]:
        """A burst of SNEW is one write."""
        responses: list[NtfResponse] = [Err(AUTH)] * len(requests)
        allowed: dict[int, tuple[TokenRecord, NewSubscription]] = {}
        for index, (request, token) in enumerate(zip(requests, entities, strict=True)):
            command = request.message
            if isinstance(token, TokenRecord) and isinstance(command, Snew) and token.may_subscribe:
                allowed[index] = token, self._new_subscription(token, command)
        with self._subscriber.admission({new.server for _, new in allowed.values()}, source) as refused:
            for index, (_, new) in list(allowed.items()):
                if (error := refused.get(new.server)) is not None:
                    responses[index] = Err(error)
                    del allowed[index]
            rows = [new for _, new in allowed.values()]
            created = await self._store.create_subscriptions(rows) if rows else []
            for (index, (token, new)), result in zip(allowed.items(), created, strict=True):
                responses[index] = self._created(token, new, result)
        return responses

    def _created(
        self, token: TokenRecord, new: NewSubscription, result: CreatedSubscription | SnewRefusal
    ) -> NtfResponse:
        if isinstance(result, SnewRefusal):
            return Err(QUOTA if result is SnewRefusal.QUOTA else AUTH)
        if result.created:
            SUBSCRIPTIONS_CREATED.inc()
            self._journal.record(
                JournalEvent.SUB_CREATED,
                subscription=result.subscription_id,
                token=token.token_id,
                server=new.server.host_port,
            )
        if result.handed_over:
            self._subscriber.subscribe(result.server_key, new.server, result.queue)
        return IdSub(result.subscription_id)

    def _new_subscription(self, token: TokenRecord, command: Snew) -> NewSubscription:
        named = command.queue.server
        server = named.canonical
        return NewSubscription(
            subscription_id=EntityId(self._random(ID_SIZE)),
            token_key=token.key,
            server=server,
            spelling="" if named is server else named.spelling,
            notifier_id=command.queue.notifier_id,
            notifier_key=command.notifier_key.der,
        )

    async def sdel(self, subscription: SubscriptionRecord, command: Sdel) -> NtfResponse:
        deleted = await self._store.delete_subscription(subscription.key)
        if deleted is None:
            return Err(AUTH)
        SUBSCRIPTIONS_DELETED.inc()
        self._subscriber.forget([deleted])
        self._journal.record(
            JournalEvent.SUB_DELETED,
            subscription=deleted.subscription_id,
            token=deleted.token_id,
            server=deleted.server.host_port,
            error=DeletionReason.REQUESTED,
        )
        return Ok()

    def _today(self) -> int:
        return day(self._clock.now())

    def _record(self, event: JournalEvent, token: TokenRecord) -> None:
        self._journal.record(event, token=token.token_id, provider=token.device_token.provider.tag)


def _same_secret(record: TokenRecord, command: Tnew) -> bool:
    secret = X25519PrivateKey(record.dh_private).exchange(command.dh_key)
    return hmac.compare_digest(secret, record.dh_secret)


def _id_tkn(record: TokenRecord) -> IdTkn:
    return IdTkn(record.token_id, X25519PrivateKey(record.dh_private).public)


Handler = Callable[[Commands, Any, Any], Awaitable[NtfResponse]]

HANDLERS: Mapping[type, Handler] = {
    Tnew: Commands.tnew,
    Tvfy: Commands.tvfy,
    Trpl: Commands.trpl,
    Tdel: Commands.tdel,
    Tcrn: Commands.tcrn,
    Sdel: Commands.sdel,
}

READS: Mapping[type, Callable[[Any], NtfResponse]] = {
    Schk: lambda subscription: Sub(subscription.status),
    Tchk: lambda token: Tkn(token.status),
    Ping: lambda _: Pong(),
}
"Commands that are answered from what was read to authorise them."
RUN_KINDS: Mapping[type, object] = {**dict.fromkeys(READS, READS), Snew: Snew, Sdel: Sdel}
"Commands in a row of one kind are authorised together: none changes what another would find. Others: alone."


def _read(request: Request, entity: Entity | Denied) -> NtfResponse:
    return Err(AUTH) if entity is DENIED else READS[type(request.message)](entity)


def _count(requests: Sequence[Request], responses: Sequence[NtfResponse]) -> None:
    """Once per kind of outcome, not per command: a counter costs more than a lookup."""
    outcomes: dict[tuple[type, ErrorType | None], int] = {}
    for request, response in zip(requests, responses, strict=True):
        outcome = type(request.message), response.error if type(response) is Err else None
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    for (command, error), count in outcomes.items():
        _outcomes(command.__name__, error).inc(count)


@cache
def _outcomes(command: str, error: ErrorType | None) -> prometheus_client.Counter:
    """The counter with these labels; of few, as both are from tables."""
    outcome = "ok" if error is None else str(error).partition(" ")[0]
    return COMMANDS.labels(command.upper(), outcome)
