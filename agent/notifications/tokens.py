"""The device's token: a state machine over (has an id?, next action); keys are stored before they are used.

no id,  REGISTER          the first TNEW was not answered: again, with the same keys
id,     nothing           waiting for the verification push: TNEW again makes the server repeat it
id,     VERIFY code       the push came, TVFY was not answered: again
id,     CHECK             verified: TCHK, then subscriptions as the mode says
id,     REPLACE device    TRPL was not answered: again; then wait for a new verification push
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from agent.duplex.replies import RouterRefused
from agent.duplex.store import Transact, Tx
from agent.errors import BadPush, Prohibited
from agent.notifications.records import MAX_PERIOD, MIN_PERIOD, GivenUpToken, Mode, Token, TokenAction
from agent.notifications.rows import (
    delete_at_server,
    drop_deleted_token,
    drop_token,
    follow_wishes,
    give_up_token,
    put_token,
    token_of,
)
from agent.notifications.sessions import NtfSessions
from protocol.addresses import NtfServer
from protocol.crypto import Ed25519PrivateKey
from protocol.device_token import DeviceToken
from protocol.encoding import NO_ENTITY
from protocol.errors import AUTH, INTERNAL, DecodeError
from protocol.ntf_commands import IdTkn, NtfCommand, NtfResponse, Tchk, Tcrn, Tdel, Tkn, Tnew, Trpl, Tvfy
from protocol.push_messages import open_push
from protocol.statuses import TokenStatus
from smp_client.requests import Request


class Superseded(Exception):
    """Something else was decided about the token while a server was asked."""


class Tokens:
    """The one token of this agent. What is begun here and not answered is gone on with by `resume`."""

    def __init__(self, transact: Transact, sessions: NtfSessions) -> None:
        self._transact = transact
        self._sessions = sessions

    async def register(
        self, device_token: DeviceToken, mode: Mode, server: NtfServer, period: int = MIN_PERIOD
    ) -> TokenStatus:
        """Make the server know this device, in this mode. Safe to call at every start of an app."""
        if not MIN_PERIOD <= period <= MAX_PERIOD:
            raise Prohibited(f"the period is {MIN_PERIOD} to {MAX_PERIOD} minutes")
        token: Token = await self._transact(Wish(device_token, mode, server, period).store)
        if token.action is TokenAction.CHECK:
            return await self._checked(token)
        return await self._next(token)

    async def verify(self, nonce: bytes, boxed_code: bytes) -> TokenStatus:
        """The verification push has come: open it and send its code back."""
        token: Token = await self._transact(lambda tx: _code_received(tx, nonce, boxed_code))
        return await self._verified(token) if token.action is TokenAction.VERIFY else token.status

    async def check(self) -> TokenStatus:
        """Ask the server for the token's status; what it says is kept."""
        token: Token = await self._transact(lambda tx: registered(tx.db))
        if token.action is TokenAction.CHECK:
            return await self._checked(token)
        status = await self._status(token)
        await self._advance(token, status=status)
        return status

    async def resume(self, token: Token) -> None:
        """Finish what was begun. A server that refuses is not asked again until somebody wants it."""
        with suppress(Superseded):
            try:
                await self._next(token)
            except RouterRefused:
                await self._advance(token, action=None)

    async def delete(self, token: GivenUpToken) -> None:
        """At its server. What that refuses is gone there."""
        with suppress(RouterRefused):
            token_id, registration = token.token_id, token.registration
            if registration is not None:
                token_id = (await self._ask_id(token.server, registration, token.auth_key)).token_id
            assert token_id is not None
            await self._sessions.ask(token.server, Request(token_id, Tdel(), token.auth_key))
        await self._transact(lambda tx: drop_deleted_token(tx, token.key))

    # Steps; each stores its result

    async def _next(self, token: Token) -> TokenStatus:
        if token.action is TokenAction.REGISTER:
            return await self._registered(token)
        if token.action is TokenAction.REPLACE:
            return await self._replaced(token)
        if token.action is TokenAction.VERIFY:
            return await self._verified(token)
        return await self._activated(token)

    async def _registered(self, token: Token) -> TokenStatus:
        answer = await self._ask_id(token.server, token.registration, token.auth_key)
        try:
            secret = token.dh_key.exchange(answer.dh_key)
        except DecodeError:
            raise RouterRefused(INTERNAL) from None
        values = {"token_id": answer.token_id, "dh_secret": secret, "status": TokenStatus.REGISTERED}
        return (await self._advance(token, action=None, **values)).status

    async def _ask_id(self, server: NtfServer, registration: Tnew, key: Ed25519PrivateKey) -> IdTkn:
        answer = await self._sessions.ask(server, Request(NO_ENTITY, registration, key))
        if not isinstance(answer, IdTkn):
            raise RouterRefused(INTERNAL)
        return answer

    async def _verified(self, token: Token) -> TokenStatus:
        assert token.code is not None
        try:
            await self._ask(token, Tvfy(token.code))
        except RouterRefused:
            # The code is not the current one: register again to get the push repeated.
            await self._advance(token, action=None, code=None)
            raise
        active = await self._advance(token, status=TokenStatus.ACTIVE, action=TokenAction.CHECK, code=None)
        return await self._activated(active)

    async def _checked(self, token: Token) -> TokenStatus:
        try:
            status = await self._status(token)
        except RouterRefused as refused:
            if refused.error != AUTH:
                raise
            # The server does not know the token any more.
            return await self._made_anew(token, token.device_token, keep=False)
        if status is not TokenStatus.ACTIVE:
            return (await self._advance(token, status=status, action=None)).status
        return await self._activated(await self._advance(token, status=status))

    async def _replaced(self, token: Token) -> TokenStatus:
        device_token = token.replacement
        assert device_token is not None
        try:
            await self._ask(token, Trpl(device_token))
        except RouterRefused:
            return await self._made_anew(token, device_token, keep=True)
        return (await self._advance(token, device_token=device_token, replacement=None, action=None)).status

    async def _made_anew(self, token: Token, device_token: DeviceToken, *, keep: bool) -> TokenStatus:
        """Another token in the place of one that its server refuses; with `keep` it is deleted there too."""

        def change(tx: Tx) -> Token:
            _unchanged(tx, token)
            if keep:
                give_up_token(tx, token)
            else:
                drop_token(tx)
            return Wish(device_token, token.mode, token.server, token.period).store(tx)

        return await self._registered(await self._transact(change))

    async def _activated(self, token: Token) -> TokenStatus:
        """Tell the server how often it shall push by itself."""
        if token.cron != token.wanted_cron:
            await self._ask(token, Tcrn(token.wanted_cron))
            await self._advance(token, cron=token.wanted_cron)
        return token.status

    async def _status(self, token: Token) -> TokenStatus:
        answer = await self._ask(token, Tchk())
        if not isinstance(answer, Tkn):
            raise RouterRefused(INTERNAL)
        return answer.status

    async def _ask(self, token: Token, command: NtfCommand) -> NtfResponse:
        assert token.token_id is not None
        return await self._sessions.ask(token.server, Request(token.token_id, command, token.auth_key))

    async def _advance(self, token: Token, **changes: Any) -> Token:
        def advance(tx: Tx) -> Token:
            _unchanged(tx, token)
            after = replace(token, **changes)
            put_token(tx, after)
            follow_wishes(tx)
            return after

        result: Token = await self._transact(advance)
        return result


@dataclass(frozen=True, slots=True)
class Wish:
    """What the application asks for, and what that makes of the token that is there."""

    device_token: DeviceToken
    mode: Mode
    server: NtfServer
    period: int

    def store(self, tx: Tx) -> Token:
        """If the server knows another device token, or may know one, it is to be replaced there."""
        saved = token_of(tx.db)
        if saved is not None and saved.server != self.server:
            give_up_token(tx, saved)
            saved = None
        token = self._new(tx) if saved is None else replace(saved, mode=self.mode, period=self.period)
        if token.token_id is None:
            if token.device_token != self.device_token:
                delete_at_server(tx, token)
            token = replace(token, device_token=self.device_token, action=TokenAction.REGISTER)
        elif (token.replacement or token.device_token) != self.device_token:
            token = replace(token, replacement=self.device_token, action=TokenAction.REPLACE)
            token = replace(token, status=TokenStatus.REGISTERED, code=None)
        elif token.action is None:
            token = replace(token, action=TokenAction.REGISTER)
        put_token(tx, token)
        follow_wishes(tx)
        return token

    def _new(self, tx: Tx) -> Token:
        return Token(
            server=self.server,
            device_token=self.device_token,
            mode=self.mode,
            period=self.period,
            auth_key=tx.secrets.ed25519(),
            dh_key=tx.secrets.x25519(),
        )


def registered(db: Any) -> Token:
    token = token_of(db)
    if token is None or token.token_id is None:
        raise Prohibited("the device is not registered")
    return token


def _code_received(tx: Tx, nonce: bytes, boxed_code: bytes) -> Token:
    token = registered(tx.db)
    assert token.dh_secret is not None
    try:
        code = open_push(token.dh_secret, nonce, boxed_code)
    except DecodeError:
        raise BadPush("the verification push is not for this token") from None
    if token.action in (TokenAction.CHECK, TokenAction.REPLACE):
        return token  # a repeated push, or one for the device token that is being replaced
    token = replace(token, status=TokenStatus.CONFIRMED, action=TokenAction.VERIFY, code=code)
    put_token(tx, token)
    return token


def _unchanged(tx: Tx, token: Token) -> None:
    if token_of(tx.db) != token:
        raise Superseded


def delete_token(tx: Tx) -> None:
    """No more notifications on this device; the servers are told in the background."""
    token = token_of(tx.db)
    if token is None:
        raise Prohibited("there is no token")
    give_up_token(tx, token)
    follow_wishes(tx)
