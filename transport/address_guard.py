"""Finds the addresses of hosts that clients name, and keeps us from connecting to our own network for them.

A host name is resolved here, its addresses are checked, and the connection goes to a checked address: a name
that resolves differently a moment later changes nothing. Neither addresses nor `.onion` names are looked up.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final, TypeAlias

from transport.shared_attempts import SharedAttempts

IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve: TypeAlias = Callable[[str], Sequence[str]]

ONION: Final = ".onion"
LOCALHOST: Final = "localhost"
CACHE_TIME: Final = 60.0  # seconds
CACHE_SIZE: Final = 1024  # clients choose the names
RESOLVER_THREADS: Final = 64
"Made as needed. More than names that never resolve can block for one client: 60 a minute, 30 s each."
MAX_LOOKUPS: Final = 256  # waiting and running; names that resolve slowly must not pile up
MAX_ADDRESSES: Final = 4
"Addresses of one name that are connected to: the owner of a name may list thousands of victims."
MAX_CHECKED: Final = 64
"Addresses of one name that are looked at: checking thousands would hold up the event loop for 50 ms or more."
NAT64: Final = ipaddress.ip_network("64:ff9b::/96")


class ForbiddenAddressError(OSError):
    """The host has no address that may be connected to."""

    def __init__(self) -> None:
        super().__init__("the host has no public address")


class UnresolvedError(OSError):
    """The host's address could not be found out now."""


def is_public(address: IpAddress) -> bool:
    """Whether an address belongs to the open internet, also when it is wrapped in an IPv6 one."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


def resolve_name(host: str) -> Sequence[str]:
    """Addresses of a host name; OSError if there are none."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class AddressGuard:
    """Finds the addresses to connect to for a host name or IP address. Lookups run in threads of its own."""

    def __init__(
        self,
        *,
        allow_private: bool = False,
        resolve: Resolve = resolve_name,
        cache_time: float = CACHE_TIME,
        threads: int = RESOLVER_THREADS,
    ) -> None:
        self._allow_private = allow_private
        self._resolve = resolve
        self._cache_time = cache_time
        self._cache: OrderedDict[str, tuple[float, list[str]]] = OrderedDict()
        self._lookups = SharedAttempts[str, Sequence[str]]("lookup")
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="resolver")

    async def address(self, host: str, timeout: float) -> str:
        """The first of `addresses`."""
        return (await self.addresses(host, timeout))[0]

    async def addresses(self, host: str, timeout: float) -> list[str]:
        """One to `MAX_ADDRESSES` checked addresses, or ForbiddenAddressError or UnresolvedError."""
        if (literal := parse_address(host)) is not None:
            return self._allowed([literal])
        now = time.monotonic()
        expires, addresses = self._cache.get(host, (0.0, []))
        if expires <= now:
            addresses = self._allowed(map(parse_address, await self._look_up(host, timeout)))
            if self._cache_time:
                self._cache[host] = (now + self._cache_time, addresses)
                if len(self._cache) > CACHE_SIZE:
                    self._cache.popitem(last=False)
        return addresses

    def permits(self, host: str) -> bool:
        """False if it is clear without a lookup that the host has no allowed address."""
        literal = parse_address(host)
        if literal is None:
            return self._allow_private or not (_looks_like_a_number(host) or _is_local_name(host))
        return self._allow_private or is_public(literal)

    def forget(self, host: str) -> None:
        """Resolve the name anew next time: its address did not answer."""
        self._cache.pop(host, None)

    def close(self) -> None:
        """Stop resolving."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _look_up(self, host: str, timeout: float) -> Sequence[str]:
        if is_onion(host):
            raise UnresolvedError("an onion host can only be reached through a proxy")
        if not self.permits(host):
            raise ForbiddenAddressError
        if host not in self._lookups and len(self._lookups) >= MAX_LOOKUPS:
            raise UnresolvedError("too many names are being resolved")
        try:
            async with asyncio.timeout(timeout):
                return await self._lookups.share(host, lambda: self._in_a_thread(host))
        except (OSError, UnicodeError, TimeoutError) as error:
            raise UnresolvedError(f"cannot resolve the host: {type(error).__name__}") from None

    async def _in_a_thread(self, host: str) -> Sequence[str]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._resolve, host)

    def _allowed(self, addresses: Iterable[IpAddress | None]) -> list[str]:
        allowed = (
            str(address)
            for address in islice(addresses, MAX_CHECKED)
            if address is not None and (self._allow_private or is_public(address))
        )
        found = list(islice(dict.fromkeys(allowed), MAX_ADDRESSES))
        if not found:
            raise ForbiddenAddressError
        return found


def parse_address(host: str) -> IpAddress | None:
    """An IP address, with or without brackets; None for a name."""
    try:
        return ipaddress.ip_address(host[1:-1] if host.startswith("[") else host)
    except ValueError:
        return None


def is_onion(host: str) -> bool:
    return host.lower().rstrip(".").endswith(ONION)


def _looks_like_a_number(host: str) -> bool:
    """What a resolver takes for an IPv4 address although it is written oddly: `127.1`, `0x7f000001`."""
    last = host.lower().rstrip(".").rpartition(".")[2]
    return last.isdecimal() or last.startswith("0x")


def _is_local_name(host: str) -> bool:
    name = host.lower().rstrip(".")
    return name == LOCALHOST or name.endswith(f".{LOCALHOST}")
