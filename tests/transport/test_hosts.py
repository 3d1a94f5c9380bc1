"""Hosts and ports as people and HTTP clients write them."""

from __future__ import annotations

import argparse

import pytest

from transport.hosts import (
    any_port_option,
    bracketed,
    check_host,
    client_port_option,
    host_option,
    is_address,
    is_own_host,
    named_host,
)

HOSTS = ["example.org", "a_b.example", "localhost", "192.0.2.1", "2001:db8::1", "bücher.example"]
NO_HOSTS = ["", "a b", "a..example", "-a.example", "a-.example", ".".join(["a" * 60] * 5), "[::1", "a:1"]


@pytest.mark.parametrize("host", HOSTS)
def test_hosts(host: str) -> None:
    assert check_host(host) == host


@pytest.mark.parametrize("text", NO_HOSTS)
def test_what_is_no_host(text: str) -> None:
    with pytest.raises(ValueError):
        check_host(text)
    with pytest.raises(argparse.ArgumentTypeError):
        host_option(f"{text}!")


def test_options_name_hosts_as_clients_know_them() -> None:
    assert host_option("[2001:db8::1]") == host_option("2001:db8::1") == "2001:db8::1"
    assert host_option("bücher.example") == "xn--bcher-kva.example"


def test_addresses_of_version_6_stand_in_brackets() -> None:
    assert bracketed("2001:db8::1") == "[2001:db8::1]"
    assert bracketed("192.0.2.1") == "192.0.2.1"


@pytest.mark.parametrize(
    ("header", "host"),
    [(" Example.ORG.:80 ", "example.org"), ("[2001:DB8::1]:80", "[2001:db8::1]"), ("192.0.2.1", "192.0.2.1")],
)
def test_host_headers(header: str, host: str) -> None:
    assert named_host(header) == host


@pytest.mark.parametrize(
    ("host", "local", "is_own"),
    [
        ("localhost", "192.0.2.1", True),
        ("192.0.2.1", "192.0.2.1", True),
        ("[fe80::1]", "fe80::1%eth0", True),
        ("127.0.0.1", "192.0.2.1", False),
        ("127.0.0.1", "", False),
        ("rebound.example", "127.0.0.1", False),
    ],
)
def test_own_hosts(host: str, local: str, is_own: bool) -> None:
    assert is_own_host(host, local) is is_own
    assert is_address(host) is (host not in ("localhost", "rebound.example"))


def test_ports() -> None:
    assert [client_port_option(text) for text in ("1", "65535")] == [1, 65535]
    assert any_port_option("0") == 0
    for text in ("0", "65536", "-1", "x", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            client_port_option(text)
