"""Finding a server: which of its hosts, at which address (asked anew every time), through which proxy."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime

from OpenSSL import SSL
from python_socks import ProxyError, parse_proxy_url
from python_socks.async_.asyncio import Proxy

from protocol.addresses import NtfServer, SmpServer
from smp_client.errors import ConnectFailed, WrongIdentity
from transport.errors import IdentityMismatch, TransportError
from transport.streams import TlsStream, connect

ONION = ".onion"
RESOLVER_THREADS = (
    16  # dead name servers hold a thread for many seconds; they must not hold up everything else
)

Resolver = Callable[[str], Awaitable[Sequence[str]]]
"""The addresses of a host name, in the order to try them. Raises `OSError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """How servers are reached."""

    socks_proxy: str | None = field(default=None, repr=False)
    "`socks5://[user:password@]host:port`; used for .onion hosts."
    proxy_all: bool = False
    "Use the proxy for public hosts too; then names are resolved by the proxy."
    prefer_onion: bool = False
    "Try .onion hosts first. Without a proxy they are not tried at all."


class SystemResolver:
    """Asks the operating system, in threads of its own."""

    def __init__(self, threads: int = RESOLVER_THREADS) -> None:
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="resolver")

    async def __call__(self, host: str) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, _look_up, host)
        except (ValueError, OverflowError) as error:
            raise OSError(f"{host!r} is not a host name") from error
        return list(dict.fromkeys(found))


def _look_up(host: str) -> list[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


def hosts_to_try(hosts: Sequence[str], config: NetworkConfig) -> list[str]:
    """The reachable hosts, best first; within a kind the server's own order counts."""
    usable = [host for host in hosts if config.socks_proxy is not None or not host.endswith(ONION)]
    return sorted(usable, key=lambda host: host.endswith(ONION) is not config.prefer_onion)


class Dialer:
    """Connects to servers and checks who answers."""

    def __init__(
        self,
        config: NetworkConfig | None = None,
        *,
        resolver: Resolver | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._config = config or NetworkConfig()
        if self._config.socks_proxy is not None:
            parse_proxy_url(self._config.socks_proxy)  # a ValueError now, not at the first connection
        self._resolve = resolver or SystemResolver()
        self._now = now

    async def dial(self, server: SmpServer | NtfServer, context: SSL.Context, timeout: float) -> TlsStream:
        """A stream to the first host that answers with the right identity.

        Raises `WrongIdentity` if somebody else answered at one of them and no other host was right,
        `ConnectFailed` otherwise.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        hosts = hosts_to_try(server.hosts, self._config)
        failure: Exception = ConnectFailed("no host of the server can be reached without a proxy")
        for index, host in enumerate(hosts):
            share = (deadline - loop.time()) / (len(hosts) - index)
            try:
                async with asyncio.timeout(share):
                    return await self._dial_host(host, server, context, share)
            except IdentityMismatch as error:
                failure = WrongIdentity(str(error))
            except (OSError, TransportError, ProxyError) as error:
                if not isinstance(failure, WrongIdentity):
                    failure = ConnectFailed(_reason(error))
        raise failure

    async def _dial_host(
        self, host: str, server: SmpServer | NtfServer, context: SSL.Context, timeout: float
    ) -> TlsStream:
        port, identity = server.port_number, server.key_hash
        if self._config.socks_proxy is not None and (self._config.proxy_all or host.endswith(ONION)):
            proxy = Proxy.from_url(self._config.socks_proxy, rdns=True)
            sock = await proxy.connect(host, port, timeout)
            return await connect(
                host, port, context=context, identity=identity, now=self._now, sock=sock, timeout=timeout
            )
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        addresses = await self._resolve(host.strip("[]"))
        failure: Exception = OSError(f"{host} has no address")
        for index, address in enumerate(addresses):
            share = (deadline - loop.time()) / (len(addresses) - index)
            try:
                return await connect(
                    address, port, context=context, identity=identity, now=self._now, timeout=share
                )
            except IdentityMismatch as error:
                failure = error
            except (OSError, TransportError) as error:
                if not isinstance(failure, IdentityMismatch):
                    failure = error
        raise failure


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
