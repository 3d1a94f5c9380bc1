"""One server has one name, however its address is written."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

from protocol.addresses import (
    NtfServer,
    SmpServer,
    SmpServerWithPassword,
    canonical_host,
    parse_smp_server_with_password,
)
from protocol.errors import DecodeError

KEY = bytes(range(32))


@pytest.mark.parametrize(
    ("host", "canonical"),
    [
        ("Smp.Example.ORG", "smp.example.org"),
        ("smp.example.org.", "smp.example.org"),
        ("ABC.Onion.", "abc.onion"),
        ("192.0.2.1", "192.0.2.1"),
        ("[2001:DB8:0:0:0:0:0:1]", "[2001:db8::1]"),
        ("[::ffff:192.0.2.1]", "192.0.2.1"),
        ("[::FFFF:c000:201]", "192.0.2.1"),
        ("[:::]", "[:::]"),
        (".", "."),
    ],
)
def test_a_host_has_one_spelling(host: str, canonical: str) -> None:
    assert canonical_host(host) == canonical
    assert canonical_host(canonical) == canonical


@pytest.mark.parametrize(
    ("hosts", "port"),
    [
        (("a.example",), "5223"),
        (("a.example",), "05223"),
        (("A.Example.",), ""),
        (("a.example", "A.example"), ""),
    ],
)
def test_one_router_however_it_is_written(hosts: tuple[str, ...], port: str) -> None:
    server = SmpServer(hosts, port, KEY)
    assert server.canonical == SmpServer(("a.example",), "", KEY)
    assert server.host_port == "a.example:5223"
    assert isinstance(server.canonical, SmpServer)


def test_what_is_canonical_stays_as_it_is() -> None:
    server = SmpServer(("b.example", "a.example"), "444", KEY)
    assert server.canonical is server
    assert server.host_port == "b.example:444"
    assert server.spelling == "b.example,a.example:444"


def test_the_default_port_is_the_protocols() -> None:
    assert NtfServer(("a.example",), "443", KEY).canonical.port == ""
    assert NtfServer(("a.example",), "5223", KEY).canonical.port == "5223"
    assert SmpServer(("[2001:DB8::1]",), "", KEY).host_port == "[2001:db8::1]:5223"


def test_an_address_in_another_process_is_the_same_key() -> None:
    here = SmpServer(("a.example",), "", KEY)
    program = (
        "import pickle, sys; from protocol.addresses import SmpServer;"
        f" known = {{SmpServer(('a.example',), '', {KEY!r})}};"
        " sys.exit(pickle.load(sys.stdin.buffer) not in known)"
    )
    env = os.environ | {"PYTHONHASHSEED": "1"}
    subprocess.run([sys.executable, "-c", program], env=env, input=pickle.dumps(here), check=True)


@pytest.mark.parametrize("password", [None, b"secret", b"with,=;[signs]!"])
def test_a_password_stands_behind_the_fingerprint(password: bytes | None) -> None:
    server = SmpServer(("a.example", "b.onion"), "5224", KEY)
    given = SmpServerWithPassword(server, password)
    assert parse_smp_server_with_password(given.text) == given
    assert (":secret@" in given.text) is (password == b"secret")
    assert "secret" not in repr(given)
    assert "secret" not in str(given.server)


@pytest.mark.parametrize("password", ["", "a:b", "a/b", "a@b", "a b", "\u00e4", "x" * 256])
def test_no_password(password: str) -> None:
    identity, where = str(SmpServer(("a.example",), "", KEY)).split("@")
    with pytest.raises(DecodeError):
        parse_smp_server_with_password(f"{identity}:{password}@{where}")
