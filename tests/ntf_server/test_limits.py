"""Limits without a clock and without a network."""

from __future__ import annotations

import pytest

from ntf_server.config import LimitsConfig
from ntf_server.limits import AddressLimits
from smp_router.client_limits import ClientLimits
from smp_router.config import RouterConfig
from transport.limits import (
    NETWORK_PART,
    UNLIMITED,
    Bucket,
    ConnectionCounter,
    Rate,
    RateLimiter,
    network_of,
    source_of,
)


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::1", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("/run/socket", "/run/socket"),
    ],
)
def test_sources(address: str, source: str) -> None:
    assert source_of(address) == source


def test_a_bucket_refills() -> None:
    rate = Rate.over(10, seconds=100)
    bucket = Bucket(rate, now=0)
    assert [bucket.take(rate, 0) for _ in range(11)] == [True] * 10 + [False]
    assert [bucket.take(rate, 20) for _ in range(3)] == [True, True, False]
    assert bucket.take(rate, 10_000, amount=10)
    assert not bucket.take(rate, 10_000)


def test_counting_without_a_limit() -> None:
    assert Bucket(UNLIMITED, now=0).take(UNLIMITED, 0, amount=1_000_000)
    without, in_all, per_source = ConnectionCounter(0, 0), ConnectionCounter(2, 0), ConnectionCounter(0, 2)
    assert [without.admit("a") for _ in range(3)] == [True] * 3
    assert [in_all.admit("a") for _ in range(3)] == [True, True, False]
    assert [per_source.admit("a") for _ in range(3)] == [True, True, False]
    assert per_source.admit("b")


def test_connections_in_all_and_of_a_source() -> None:
    counter = ConnectionCounter(40, 2)
    assert [counter.admit("192.0.2.1") for _ in range(3)] == [True, True, False]
    assert all(counter.admit(f"192.0.2.{2 + number // 2}") for number in range(38))
    assert not counter.admit("192.0.2.99")


def test_sources_have_buckets_of_their_own_and_memory_is_bounded() -> None:
    devices = RateLimiter(Rate(per_second=0.001, burst=1))
    assert [devices.allows(device, 0) for device in (b"one", b"one", b"other")] == [True, False, True]
    limiter = RateLimiter(Rate(per_second=0.001, burst=1), capacity=3)
    assert [limiter.allows(source, 0) for source in "abc"] == [True] * 3
    assert not limiter.allows("a", 0)
    assert limiter.allows("d", 0)  # forgets "b", the one not seen for longest
    assert not limiter.allows("a", 0)
    assert limiter.allows("b", 0)


@pytest.mark.parametrize(
    ("source", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2::/64", "2001:db8:1::/48"),
        ("2001:db8:1::/64", "2001:db8:1::/48"),
        ("client of a proxy/64", "client of a proxy/64"),
    ],
)
def test_network_of(source: str, network: str) -> None:
    assert network_of(source) == network


def sources(network: int) -> list[str]:
    return [source_of(f"2001:db8:{network}:{number:x}::1") for number in range(100)]


def test_a_network_may_do_no_more_than_some_sources() -> None:
    limiter = RateLimiter(Rate(per_second=0.001, burst=2))
    assert all(limiter.allows(source, 0) for source in sources(1)[:NETWORK_PART])
    assert all(limiter.allows(source, 0) for source in sources(1)[:NETWORK_PART])
    assert not any(limiter.allows(source, 0) for source in sources(1))
    assert limiter.take_at_most(sources(1)[-1], 0, 2) == 0
    assert limiter.allows(sources(2)[0], 0)
    limiter.give_back(sources(1)[0], 1)
    assert limiter.take_at_most(sources(1)[-1], 0, 2) == 1


def test_giving_back_what_nobody_counted() -> None:
    """To a source that was forgotten, and where there is no limit."""
    limiter = RateLimiter(Rate(per_second=0.001, burst=2), capacity=1)
    assert limiter.take_at_most("a", 0, 3) == 2
    assert limiter.allows("b", 0)
    limiter.give_back("a", 2)
    assert limiter.take_at_most("b", 0, 3) == 1
    assert RateLimiter(UNLIMITED).take_at_most("a", 0, 3) == 3


async def test_a_network_has_one_share_of_a_routers_storage() -> None:
    limits = ClientLimits(RouterConfig())
    assert limits.creator(sources(1)[0]) == limits.creator(sources(1)[1]) != limits.creator(sources(2)[0])


def test_a_network_has_no_more_than_half_of_the_connections() -> None:
    counter = ConnectionCounter(40, 2)
    assert sum(counter.admit(source) for source in sources(1)) == 20
    assert counter.admit(sources(2)[0])
    for source in sources(1)[:20]:
        counter.release(source)
    assert counter.total == 1
    assert counter.admit(sources(1)[-1])


def test_no_limit() -> None:
    limits = AddressLimits(
        LimitsConfig(
            address_commands_per_second=0, address_tokens_per_day=0, address_verifications_per_hour=0
        )
    )
    for _ in range(10_000):
        assert limits.commands.allows("a", 0, 500)
        assert limits.tokens.allows("a", 0)
        assert limits.verifications.allows("a", 0)


def test_defaults_leave_room_for_a_carrier() -> None:
    limits = AddressLimits(LimitsConfig())
    assert all(limits.verifications.allows("carrier", 0) for _ in range(1000))
    assert all(limits.tokens.allows("carrier", 0) for _ in range(1000))


def test_connections_are_counted_in_all_and_per_source() -> None:
    counter = ConnectionCounter(3, 2)
    assert [counter.admit(source) for source in ("a", "a", "a", "b", "c")] == [True, True, False, True, False]
    counter.release("a")
    assert counter.admit("c")
    assert counter.total == 3
