"""Routers with chains of 2, 3 and 4 certificates, and the identity at each place where it may stand."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from protocol.addresses import SmpServer
from protocol.smp_messages import Ping, Pong
from smp_client.dialer import Dialer
from smp_client.errors import WrongIdentity
from smp_client.proxy import Route, open_route
from smp_client.session import connect_smp
from smp_router.config import RouterConfig
from smp_router.router import Router
from tests.smp_router.wire import connected
from tests.transport.chains import make_certificate
from transport.certificates import (
    Credentials,
    KeyAlgorithm,
    fingerprint,
    load_server_files,
    write_server_files,
)
from transport.errors import CertificateFileError

START, END = datetime(2020, 1, 1, tzinfo=UTC), datetime(2120, 1, 1, tzinfo=UTC)
SHAPES = [(2, 1), (3, 1), (3, 2), (4, 1), (4, 2)]


def chain_of(length: int) -> Credentials:
    """Leaf first: (session,) online, offline(, operator)."""
    keys = [KeyAlgorithm.ED448.generate() for _ in range(length)]
    chain = tuple(
        make_certificate(f"{i}", key, f"{min(i + 1, length - 1)}", keys[min(i + 1, length - 1)], START, END)
        for i, key in enumerate(keys)
    )
    return Credentials(chain, keys[0])


def known_by(router: Router, credentials: Credentials, place: int) -> SmpServer:
    address = router.address
    return SmpServer(address.hosts, address.port, fingerprint(credentials.chain[place]))


@pytest.mark.parametrize(("length", "place"), SHAPES)
async def test_router_is_known_by(length: int, place: int) -> None:
    credentials = chain_of(length)
    async with (
        Router.start(credentials=credentials) as router,
        Router.start(RouterConfig(private_relays=True)) as proxy,
    ):
        server = known_by(router, credentials, place)
        async with connected(server) as client:
            assert await client.ask(Ping()) == Pong()
        async with await connect_smp(proxy.address, Dialer()) as session:
            route = await open_route(session, server, None, lambda: datetime.now(UTC))
            assert isinstance(route, Route)


@pytest.mark.parametrize(("length", "place"), [(2, 0), (3, 0), (4, 0), (4, 3)])
async def test_router_is_not_known_by(length: int, place: int) -> None:
    credentials = chain_of(length)
    async with Router.start(credentials=credentials) as router:
        with pytest.raises(WrongIdentity):
            await connect_smp(known_by(router, credentials, place), Dialer())


async def test_files_with_a_session_certificate(tmp_path: Path) -> None:
    """`ca.crt` stays the identity, whether the chain in `server.crt` ends before it or with it."""
    credentials = chain_of(3)
    write_server_files(tmp_path / "whole", credentials.chain[2], credentials.key, credentials)
    for name, certificates in (("whole", credentials.chain), ("short", credentials.chain[:2])):
        folder = tmp_path / name
        if not folder.exists():
            shutil.copytree(tmp_path / "whole", folder)
        pem = b"".join(x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM) for der in certificates)
        (folder / "server.crt").write_bytes(pem)
        loaded = load_server_files(folder)
        assert loaded.chain == credentials.chain
        async with Router.start(credentials=loaded) as router:
            assert router.address.key_hash == fingerprint(credentials.chain[2])
            async with connected(router.address) as client:
                assert await client.ask(Ping()) == Pong()


def test_files_of_which_the_identity_has_no_place(tmp_path: Path) -> None:
    """Clients would not know the router by the operator's certificate."""
    credentials = chain_of(4)
    write_server_files(tmp_path / "config", credentials.chain[3], credentials.key, credentials)
    with pytest.raises(CertificateFileError, match=r"neither second nor third in the chain of .*server\.crt"):
        load_server_files(tmp_path / "config")
