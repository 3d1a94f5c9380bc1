"""One session with a notification server: TLS, handshake, then requests.

async with await connect_ntf(server, Dialer()) as session:
    answer = await session.request(token_id, Tchk(), auth_key)
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from protocol.addresses import NtfServer
from protocol.connection import Connection
from protocol.ntf_commands import NTF_COMMANDS, NTF_RESPONSES, NtfCommand, NtfResponse, Ping
from protocol.ntf_handshake import NtfClientHandshake
from protocol.versions import NTF_ALPN, NTF_VERSIONS, VersionRange
from smp_client.dialer import Dialer
from smp_client.errors import ClientError, ConnectFailed
from smp_client.requests import RequestSession, SessionTiming
from transport.tls import client_context

CONNECT_TIMEOUT = 45.0


class NtfSession(RequestSession[NtfResponse, NtfCommand]):
    """Requests over one connection to a notification server."""


async def connect_ntf(
    server: NtfServer,
    dialer: Dialer,
    *,
    timing: SessionTiming | None = None,
    timeout: float = CONNECT_TIMEOUT,
    random: Callable[[int], bytes] = os.urandom,
    versions: VersionRange = NTF_VERSIONS,
) -> NtfSession:
    """Connect and agree on a session within `timeout`. Raises `ClientError`; nothing stays open then."""
    deadline = asyncio.get_running_loop().time() + timeout
    stream = await dialer.dial(server, client_context([NTF_ALPN]), timeout)
    try:
        handshake = NtfClientHandshake(stream.session_id, server.key_hash, stream.peer_chain[0], versions)
        connection = Connection(handshake, NTF_RESPONSES, NTF_COMMANDS, checks_credentials=False)
        session = NtfSession(stream, connection, ping=Ping(), timing=timing, random=random)
        async with asyncio.timeout_at(deadline):
            await session.start()
    except TimeoutError:
        stream.abort()
        raise ConnectFailed("the server did not finish the handshake in time") from None
    except ClientError:
        stream.abort()
        raise
    return session
