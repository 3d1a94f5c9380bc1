"""Keeps requests to client-chosen hosts out of our own network.

A host name is resolved here, its addresses are checked, and the request goes to a checked address: a name
that resolves differently a moment later changes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeAlias

IpAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve: TypeAlias = Callable[[str], Sequence[str]]

CACHE_TIME: Final = 60.0  # seconds
CACHE_SIZE: Final = 1024  # clients choose the names
RESOLVER_THREADS: Final = 8
MAX_LOOKUPS: Final = 256  # waiting and running; names that resolve slowly must not pile up
NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
NAT64_LOCAL: Final = ipaddress.ip_network("64:ff9b:1::/48")


class ForbiddenAddressError(Exception):
    """The host has no address that may be connected to."""


class UnresolvedError(Exception):
    """The host's address could not be found out now."""


def is_public(address: IpAddress) -> bool:
    """Whether an address belongs to the open internet, also when it is wrapped in an IPv6 one."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in NAT64_LOCAL or address.teredo is not None:
            return False
        inner = address.ipv4_mapped or address.sixtofour
        if address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def resolve_name(host: str) -> Sequence[str]:
    """Addresses of a host name; OSError if there are none."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class AddressGuard:
    """Finds the address to connect to for a host name or IP address."""

    def __init__(self, *, allow_private: bool = False, resolve: Resolve = resolve_name) -> None:
        self._allow_private = allow_private
        self._resolve = resolve
        self._cache: OrderedDict[str, tuple[float, str]] = OrderedDict()
        self._lookups: dict[str, asyncio.Future[Sequence[str]]] = {}
        self._threads = ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="push-resolver")

    async def address(self, host: str, timeout: float) -> str:
        """A checked address; ForbiddenAddressError or UnresolvedError if there is none."""
        literal = _parse(host)
        if literal is not None:
            return self._choose([host])
        now = time.monotonic()
        expires, address = self._cache.get(host, (0.0, ""))
        if expires <= now:
            address = self._choose(await self._look_up(host, timeout))
            self._cache[host] = (now + CACHE_TIME, address)
            if len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        return address

    def forget(self, host: str) -> None:
        """Resolve the name anew next time: its address did not answer."""
        self._cache.pop(host, None)

    def close(self) -> None:
        """Stop resolving."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _look_up(self, host: str, timeout: float) -> Sequence[str]:
        lookup = self._lookups.get(host)
        if lookup is None:
            if len(self._lookups) >= MAX_LOOKUPS:
                raise UnresolvedError("too many names are being resolved")
            lookup = asyncio.get_running_loop().run_in_executor(self._threads, self._resolve, host)
            self._lookups[host] = lookup
            lookup.add_done_callback(lambda done: self._end_lookup(host, done))
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(lookup)  # others may wait for the same name
        except (OSError, UnicodeError, TimeoutError) as error:
            raise UnresolvedError(f"cannot resolve the host: {type(error).__name__}") from None

    def _end_lookup(self, host: str, done: asyncio.Future[Sequence[str]]) -> None:
        del self._lookups[host]
        if not done.cancelled():
            done.exception()  # it is told to those who wait; if nobody does, it is no news

    def _choose(self, addresses: Sequence[str]) -> str:
        for text in addresses:
            address = _parse(text)
            if address is not None and (self._allow_private or is_public(address)):
                return str(address)
        raise ForbiddenAddressError


def _parse(text: str) -> IpAddress | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
