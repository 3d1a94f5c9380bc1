"""The device's token: a state machine over (has an id?, next action); keys are stored before they are used.

no id,  REGISTER          the first TNEW was not answered: again, with the same keys
id,     nothing           waiting for the verification push: TNEW again makes the server repeat it
id,     VERIFY code       the push came, TVFY was not answered: again
id,     CHECK             verified: TCHK, then subscriptions as the mode says
id,     any; other device TRPL, and wait for a new verification push
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from agent import rows
from agent.errors import BadPush, Misused, Refused, Unreachable
from agent.records import MAX_PERIOD, MIN_PERIOD, Mode, Token, TokenAction
from agent.sessions import Sessions
from agent.store import AgentStore
from protocol.addresses import NtfServer
from protocol.crypto import Ed25519PrivateKey, X25519PrivateKey
from protocol.device_token import DeviceToken
from protocol.encoding import NO_ENTITY
from protocol.errors import AUTH, DecodeError
from protocol.ntf_commands import IdTkn, NtfCommand, NtfResponse, Tchk, Tcrn, Tdel, Tkn, Tnew, Trpl, Tvfy
from protocol.push_messages import open_push
from protocol.statuses import TokenStatus
from smp_client.requests import Request

KEY_SIZE = 32

OnActive = Callable[[Token], Awaitable[None]]
"Called when the token is active, each time the mode may have changed; and with the mode that now holds."


class Tokens:
    """The one token of this agent. Calls wait for each other."""

    def __init__(
        self,
        store: AgentStore,
        sessions: Sessions,
        random: Callable[[int], bytes],
        on_active: OnActive,
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._random = random
        self._on_active = on_active
        self._lock = asyncio.Lock()

    async def register(
        self, device_token: DeviceToken, mode: Mode, server: NtfServer, period: int = MIN_PERIOD
    ) -> TokenStatus:
        """Make the server know this device, in this mode. Safe to call at every start of an app."""
        if not MIN_PERIOD <= period <= MAX_PERIOD:
            raise Misused(f"the period is {MIN_PERIOD} to {MAX_PERIOD} minutes")
        async with self._lock:
            saved = await self._store.token()
            if saved is not None and saved.server != server:
                await self._store.write(rows.give_up_token(saved))
                saved = None
            if saved is None:
                return await self._create(device_token, mode, server, period)
            same_device = saved.device_token == device_token
            token = replace(saved, mode=mode, period=period)
            if token.token_id is None:
                return await self._register(replace(token, device_token=device_token))
            if not same_device:
                return await self._replace(token, device_token)
            if token.action is TokenAction.VERIFY:
                return await self._verify(token)
            if token.action is TokenAction.CHECK:
                return await self._check(token)
            return await self._register(token)

    async def verify(self, nonce: bytes, boxed_code: bytes) -> TokenStatus:
        """The verification push has come: open it and send its code back."""
        async with self._lock:
            token = await self._registered()
            assert token.dh_secret is not None
            try:
                code = open_push(token.dh_secret, nonce, boxed_code)
            except DecodeError:
                raise BadPush("the verification push is not for this token") from None
            if token.action is TokenAction.CHECK:
                return token.status  # a repeated push
            changed = replace(token, status=TokenStatus.CONFIRMED, action=TokenAction.VERIFY, code=code)
            await self._store.write([rows.put_token(changed)])
            return await self._verify(changed)

    async def check(self) -> TokenStatus:
        """Ask the server for the token's status; what it says is kept."""
        async with self._lock:
            token = await self._registered()
            if token.action is TokenAction.CHECK:
                return await self._check(token)
            status = await self._ask_status(token)
            await self._store.write([rows.put_token(replace(token, status=status))])
            return status

    async def delete(self) -> None:
        """Give the token up. Its server is told now or, after `Temporary`, later."""
        async with self._lock:
            token = await self._store.token()
            if token is None:
                raise Misused("there is no token")
            await self._store.write(rows.give_up_token(token))
            await self._delete_given_up()

    async def resume(self) -> None:
        """Finish what a previous run began."""
        async with self._lock:
            await self._delete_given_up()
            token = await self._store.token()
            if token is None:
                return
            if token.action is TokenAction.REGISTER:
                await self._register(token)
            elif token.action is TokenAction.VERIFY:
                await self._verify(token)
            elif token.action is TokenAction.CHECK:
                await self._activate(token)

    async def _registered(self) -> Token:
        token = await self._store.token()
        if token is None or token.token_id is None:
            raise Misused("the device is not registered")
        return token

    # Steps; each stores its result

    async def _create(
        self, device_token: DeviceToken, mode: Mode, server: NtfServer, period: int
    ) -> TokenStatus:
        token = Token(
            server=server,
            device_token=device_token,
            mode=mode,
            period=period,
            auth_key=Ed25519PrivateKey(self._random(KEY_SIZE)),
            dh_key=X25519PrivateKey(self._random(KEY_SIZE)),
        )
        return await self._register(token)

    async def _register(self, token: Token) -> TokenStatus:
        await self._store.write([rows.put_token(token)])
        command = Tnew(token.device_token, token.auth_key.public, token.dh_key.public)
        answer = await self._ask(token, command, about_token=False)
        if not isinstance(answer, IdTkn):
            raise Unreachable("the server did not answer TNEW with IDTKN")
        try:
            secret = token.dh_key.exchange(answer.dh_key)
        except DecodeError:
            raise Unreachable("the server's key is of no use") from None
        registered = replace(
            token,
            token_id=answer.token_id,
            dh_secret=secret,
            status=TokenStatus.REGISTERED,
            action=None,
        )
        await self._store.write([rows.put_token(registered)])
        return registered.status

    async def _verify(self, token: Token) -> TokenStatus:
        assert token.code is not None
        try:
            await self._ask(token, Tvfy(token.code))
        except Refused:
            # The code is not the current one: register again to get the push repeated.
            await self._store.write([rows.put_token(replace(token, action=None, code=None))])
            raise
        active = replace(token, status=TokenStatus.ACTIVE, action=TokenAction.CHECK, code=None)
        await self._store.write([rows.put_token(active)])
        await self._activate(active)
        return active.status

    async def _check(self, token: Token) -> TokenStatus:
        try:
            status = await self._ask_status(token)
        except Refused as refused:
            if refused.error != AUTH:
                raise
            # The server does not know the token any more.
            await self._store.write([rows.drop_token()])
            return await self._create(token.device_token, token.mode, token.server, token.period)
        action = TokenAction.CHECK if status is TokenStatus.ACTIVE else None
        checked = replace(token, status=status, action=action)
        await self._store.write([rows.put_token(checked)])
        if status is TokenStatus.ACTIVE:
            await self._activate(checked)
        return status

    async def _replace(self, token: Token, device_token: DeviceToken) -> TokenStatus:
        try:
            await self._ask(token, Trpl(device_token))
        except Refused:
            await self._store.write(rows.give_up_token(token))
            return await self._create(device_token, token.mode, token.server, token.period)
        replaced = replace(
            token, device_token=device_token, status=TokenStatus.REGISTERED, action=None, code=None
        )
        await self._store.write([rows.put_token(replaced)])
        return replaced.status

    async def _activate(self, token: Token) -> None:
        """Bring server and subscriptions in line with the mode."""
        await self._on_active(token)
        cron = token.period if token.mode is Mode.PERIODIC else 0
        if cron != (token.cron or 0):
            await self._ask(token, Tcrn(cron))
            await self._store.write([rows.put_token(replace(token, cron=cron))])

    async def _delete_given_up(self) -> None:
        for deleted in await self._store.deleted_tokens():
            request: Request[NtfCommand] = Request(deleted.token_id, Tdel(), deleted.auth_key)
            try:
                await self._sessions.ntf.ask(deleted.server, request)
            except Refused as refused:
                if refused.error != AUTH:  # AUTH: it is gone already
                    raise
            await self._store.write([rows.drop_deleted_token(deleted.key)])

    async def _ask_status(self, token: Token) -> TokenStatus:
        answer = await self._ask(token, Tchk())
        if not isinstance(answer, Tkn):
            raise Unreachable("the server did not answer TCHK with TKN")
        return answer.status

    async def _ask(self, token: Token, command: NtfCommand, *, about_token: bool = True) -> NtfResponse:
        entity = token.token_id if about_token and token.token_id is not None else NO_ENTITY
        return await self._sessions.ntf.ask(token.server, Request(entity, command, token.auth_key))
