"""The guard against endpoints inside our own network."""

from __future__ import annotations

import asyncio
import ipaddress
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext

import pytest

from tests.waiting import until
from transport import address_guard
from transport.address_guard import (
    MAX_ADDRESSES,
    AddressGuard,
    ForbiddenAddressError,
    IpAddress,
    UnresolvedError,
    is_public,
    parse_address,
)


class Names:
    """A resolver that counts."""

    def __init__(self, **names: list[str]) -> None:
        self.names = names
        self.asked: list[str] = []

    def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        if host not in self.names:
            raise OSError
        return self.names[host]


@pytest.fixture
def names() -> Names:
    return Names(good=["93.184.216.34"], bad=["127.0.0.1", "10.1.2.3"], mixed=["192.168.0.1", "8.8.4.4"])


@pytest.fixture
async def guard(names: Names) -> AsyncIterator[AddressGuard]:
    guard = AddressGuard(resolve=names)
    yield guard
    guard.close()


@pytest.mark.parametrize(
    "text",
    [
        *("0.0.0.0", "10.0.0.1", "100.64.0.1", "127.0.0.1", "169.254.169.254", "172.16.0.1", "192.0.2.1"),
        *("192.168.1.1", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255"),
        *(
            "::",
            "::1",
            "fe80::1",
            "fc00::1",
            "fec0::1",
            "ff02::1",
            "4000::1",
            "2001:db8::1",
            "::ffff:10.0.0.1",
        ),
        *("64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::", "2001:0:4136:e378:8000:63bf:3fff:fdd2"),
    ],
)
def test_addresses_that_are_not_public(text: str) -> None:
    assert not is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize("text", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


async def test_names_are_checked_and_cached(guard: AddressGuard, names: Names) -> None:
    assert await guard.address("good", 1.0) == "93.184.216.34"
    assert await guard.address("mixed", 1.0) == "8.8.4.4"
    assert await guard.address("good", 1.0) == "93.184.216.34"
    assert names.asked == ["good", "mixed"]
    guard.forget("good")
    await guard.address("good", 1.0)
    assert names.asked == ["good", "mixed", "good"]


async def test_few_addresses_of_a_name_are_used(names: Names, guard: AddressGuard) -> None:
    names.names["many"] = ["10.0.0.1", *(f"8.8.{number // 250}.{number % 250}" for number in range(4000))]
    assert await guard.addresses("many", 1.0) == names.names["many"][1 : 1 + MAX_ADDRESSES]


async def test_refused_names(guard: AddressGuard) -> None:
    with pytest.raises(ForbiddenAddressError):
        await guard.address("bad", 1.0)
    with pytest.raises(ForbiddenAddressError):
        await guard.address("127.0.0.1", 1.0)
    with pytest.raises(UnresolvedError):
        await guard.address("unknown", 1.0)


async def test_what_is_no_address_is_left_out(names: Names) -> None:
    names.names["odd"] = ["nonsense", "8.8.8.8"]
    for allow_private in (False, True):
        guard = AddressGuard(allow_private=allow_private, resolve=names)
        assert await guard.addresses("odd", 1.0) == ["8.8.8.8"]
        guard.close()


async def test_names_that_resolve_slowly_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_guard, "MAX_LOOKUPS", 1)
    answer, asked = threading.Event(), list[str]()

    def resolve(host: str) -> Sequence[str]:
        asked.append(host)
        answer.wait()
        return ["8.8.8.8"]

    guard = AddressGuard(resolve=resolve)
    try:
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            first = tasks.create_task(guard.address("slow", 60.0))
            await until(lambda: asked)
            same = tasks.create_task(guard.address("slow", 60.0))
            with pytest.raises(UnresolvedError, match="too many"):
                await guard.address("other", 60.0)
            answer.set()
        assert first.result() == same.result() == "8.8.8.8"
        assert asked == ["slow"]
    finally:
        answer.set()
        guard.close()


async def test_private_addresses_if_allowed(names: Names) -> None:
    guard = AddressGuard(allow_private=True, resolve=names)
    assert await guard.address("bad", 1.0) == "127.0.0.1"
    assert await guard.address("::1", 1.0) == "::1"
    assert guard.permits("localhost")
    assert guard.permits("127.0.0.1")
    guard.close()


async def test_slow_resolver() -> None:
    """Waiting ends at the limit, and one lookup serves all who wait for the name."""
    proceed = threading.Event()
    asked: list[str] = []

    def resolve(host: str) -> Sequence[str]:
        asked.append(host)
        proceed.wait(10)
        return ["8.8.8.8"]

    guard = AddressGuard(resolve=resolve)
    with pytest.raises(UnresolvedError):
        await guard.address("slow", 0.01)
    waiting = asyncio.gather(*(guard.address("slow", 10.0) for _ in range(5)))
    proceed.set()
    assert await waiting == ["8.8.8.8"] * 5
    assert asked == ["slow"]
    guard.close()


@pytest.mark.parametrize("host", ["127.1", "0x7f000001", "2130706433", "localhost", "a.LocalHost."])
async def test_odd_ways_to_write_our_own_network(guard: AddressGuard, names: Names, host: str) -> None:
    assert not guard.permits(host)
    with pytest.raises(ForbiddenAddressError):
        await guard.addresses(host, 1.0)
    assert names.asked == []


@pytest.mark.parametrize("host", ["93.184.216.34", "[2606:4700::1111]", "2606:4700::1111"])
async def test_addresses_are_not_looked_up(guard: AddressGuard, names: Names, host: str) -> None:
    assert guard.permits(host)
    assert await guard.addresses(host, 1.0) == [host.strip("[]")]
    assert names.asked == []


@pytest.mark.parametrize("host", ["abc.onion", "ABC.ONION", "abc.Onion."])
async def test_onion_names_are_never_looked_up(guard: AddressGuard, names: Names, host: str) -> None:
    with pytest.raises(UnresolvedError):
        await guard.addresses(host, 1.0)
    assert names.asked == []


async def test_every_allowed_address_and_a_fresh_look_each_time(names: Names) -> None:
    guard = AddressGuard(resolve=names, cache_time=0)
    names.names["two"] = ["8.8.8.8", "10.0.0.1", "8.8.4.4", "8.8.8.8"]
    for _ in range(2):
        assert await guard.addresses("two", 1.0) == ["8.8.8.8", "8.8.4.4"]
    assert names.asked == ["two", "two"]
    guard.close()


@pytest.mark.parametrize(
    ("prefix", "allowed"), [("8.8", ["8.8.0.0", "8.8.0.1", "8.8.0.2", "8.8.0.3"]), ("10.0", [])]
)
async def test_a_name_with_thousands_of_addresses_costs_little(
    names: Names, monkeypatch: pytest.MonkeyPatch, prefix: str, allowed: list[str]
) -> None:
    """Whether they are public or private: each check takes time from all other peers."""
    checked: list[str] = []

    def count(address: str) -> IpAddress | None:
        checked.append(address)
        return parse_address(address)

    monkeypatch.setattr(address_guard, "parse_address", count)
    guard = AddressGuard(resolve=names)
    names.names["many"] = [f"{prefix}.{number // 256}.{number % 256}" for number in range(4000)]
    with nullcontext() if allowed else pytest.raises(ForbiddenAddressError):
        assert await guard.addresses("many", 1.0) == allowed
    assert len(checked) <= address_guard.MAX_CHECKED + 2  # the name itself is checked, too
    guard.close()
