"""Finding a server: which of its hosts, at which address (asked anew every time), through which proxy."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

from OpenSSL import SSL
from python_socks import ProxyConnectionError, ProxyError, ProxyTimeoutError, parse_proxy_url
from python_socks.async_.asyncio import Proxy

from protocol.addresses import ServerAddress, canonical_host
from smp_client.errors import ConnectFailed, WrongIdentity
from transport.address_guard import AddressGuard, ForbiddenAddressError, is_onion
from transport.errors import IdentityMismatch, TransportError
from transport.streams import TlsStream, connect, connect_socket

MAX_HOSTS = 4
"Hosts of one server that are tried; an address may name 255."
MAX_ATTEMPTS = 8
"Connections for one dial, over all hosts and their addresses."


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """How servers are reached."""

    socks_proxy: str | None = field(default=None, repr=False)
    "`socks5://[user:password@]host:port`; used for .onion hosts."
    proxy_all: bool = False
    "Use the proxy for public hosts too; then names are resolved by the proxy."
    prefer_onion: bool = False
    "Try .onion hosts first. Without a proxy they are not tried at all."
    onion_only: bool = False
    "Try no other hosts."
    isolated: bool = False
    "Log in to the proxy under another name for each connection: then Tor takes another circuit for each."


def hosts_to_try(hosts: Sequence[str], config: NetworkConfig) -> list[str]:
    """At most `MAX_HOSTS` reachable hosts in canonical form, best first; within a kind in the given order."""
    names = dict.fromkeys(map(canonical_host, hosts))
    reachable = [host for host in names if config.socks_proxy or not is_onion(host)]
    if config.onion_only:
        reachable = list(filter(is_onion, reachable))
    return sorted(reachable, key=lambda host: is_onion(host) is not config.prefer_onion)[:MAX_HOSTS]


class Dialer:
    """Connects to servers and checks who answers."""

    def __init__(
        self,
        config: NetworkConfig | None = None,
        *,
        guard: AddressGuard | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Without a guard every address is allowed: for those who choose their servers themselves."""
        self._config = config or NetworkConfig()
        if self._config.socks_proxy is not None:
            parse_proxy_url(self._config.socks_proxy)  # a ValueError now, not at the first connection
        self._guard = guard or AddressGuard(allow_private=True, cache_time=0)
        self._now = now

    def permits(self, server: ServerAddress) -> bool:
        """False if it is clear without a lookup that a host of the server must not be connected to."""
        return all(map(self._guard.permits, map(canonical_host, server.hosts)))

    async def dial(self, server: ServerAddress, context: SSL.Context, timeout: float) -> TlsStream:
        """A stream to the first host that answers with the right identity.

        Raises `WrongIdentity` if somebody else answered at one of them and no other host was right,
        `ConnectFailed` otherwise.
        """

        async def dial_host(host: str, share: float) -> TlsStream:
            async with asyncio.timeout(share):
                return await self._dial_host(host, server, context, share, MAX_ATTEMPTS // len(hosts))

        hosts = hosts_to_try(server.hosts, self._config)
        if not hosts:
            raise ConnectFailed("no host of the server can be reached without a proxy")
        try:
            return await _first_of(hosts, timeout, dial_host)
        except IdentityMismatch as error:
            raise WrongIdentity(str(error)) from None
        except (OSError, TransportError, ProxyError) as error:
            raise ConnectFailed(_reason(error)) from None

    async def _dial_host(
        self, host: str, server: ServerAddress, context: SSL.Context, timeout: float, attempts: int
    ) -> TlsStream:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        port = server.port_number

        async def dial_address(address: str, share: float) -> TlsStream:
            return await connect(
                address, port, context=context, identity=server.key_hash, now=self._now, timeout=share
            )

        if self._config.socks_proxy is None or not (self._config.proxy_all or is_onion(host)):
            addresses = await self._guard.addresses(host, timeout)
            return await _first_of(addresses[:attempts], deadline - loop.time(), dial_address)
        if not self._guard.permits(host):
            raise ForbiddenAddressError
        proxy = _proxy(self._config.socks_proxy, isolated=self._config.isolated)
        sock = await proxy.connect(host.strip("[]"), port, timeout)
        return await connect(
            host, port, context=context, identity=server.key_hash, now=self._now, sock=sock, timeout=timeout
        )


def _proxy(url: str, *, isolated: bool) -> Proxy:
    kind, host, port, user, password = parse_proxy_url(url)
    if isolated and not user:
        user = password = os.urandom(8).hex()
    return Proxy(kind, host, port, user, password, rdns=True, forward=_ToProxy())


class _ToProxy(Proxy):
    """The way to the proxy itself. The library's own leaves its socket open when it is cancelled there."""

    def __init__(self) -> None:
        pass

    async def connect(
        self, dest_host: str, dest_port: int, timeout: float | None = None, **_kwargs: object
    ) -> socket.socket:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                dest_host, dest_port, type=socket.SOCK_STREAM
            )
            address = min(found)[4][0]  # IPv4 first
            return await connect_socket(str(address), dest_port)
        except OSError as error:
            raise ProxyConnectionError(error.errno, f"it cannot be reached: {error.strerror}") from None


def _reason(error: Exception) -> str:
    """A few words for operators."""
    if isinstance(error, (ProxyError, ProxyConnectionError, ProxyTimeoutError)):
        return f"the proxy: {error}"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error)


async def _first_of(
    places: Sequence[str], timeout: float, dial: Callable[[str, float], Awaitable[TlsStream]]
) -> TlsStream:
    """Try places in turn, sharing out the time so that a silent one does not use it up.

    If all fail, the last error; but somebody else at one of them is worth more than silence at another.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    failure: Exception = OSError("nowhere to connect to")
    for index, place in enumerate(places):
        try:
            return await dial(place, (deadline - loop.time()) / (len(places) - index))
        except (OSError, TransportError, ProxyError) as error:
            if not isinstance(failure, IdentityMismatch):
                failure = error
    try:
        raise failure
    finally:
        del failure  # it holds this frame


class DialSlots:
    """Who may dial now: so many in all, and so many for one `owner`; otherwise first come, first served."""

    def __init__(self, total: int, each: int) -> None:
        self._total = total
        self._each = each
        self._used: Counter[Hashable] = Counter()
        self._waiting: dict[asyncio.Future[None], Hashable] = {}

    @asynccontextmanager
    async def slot(self, owner: Hashable) -> AsyncIterator[None]:
        await self._take(owner)
        try:
            yield
        finally:
            self._release(owner)

    async def _take(self, owner: Hashable) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = owner
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if self._waiting.pop(turn, None) is None:  # it was given the slot at the same moment
                self._release(owner)
            raise

    def _release(self, owner: Hashable) -> None:
        self._used[owner] -= 1
        if not self._used[owner]:
            del self._used[owner]
        self._give()

    def _give(self) -> None:
        free, given = self._total - self._used.total(), list[asyncio.Future[None]]()
        for turn, owner in self._waiting.items():
            if len(given) >= free:
                break
            if self._used[owner] < self._each and not turn.done():  # nor cancelled just now
                self._used[owner] += 1
                given.append(turn)
        for turn in given:
            del self._waiting[turn]
            turn.set_result(None)
