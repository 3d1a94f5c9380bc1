"""Which host, which address, through what."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from OpenSSL import SSL

from protocol.addresses import SmpServer
from protocol.encoding import EntityId
from protocol.smp_messages import Nsub, Sok
from protocol.versions import SMP_ALPN
from smp_client.dialer import MAX_ATTEMPTS, Dialer, NetworkConfig, hosts_to_try
from smp_client.errors import ConnectFailed, WrongIdentity
from smp_client.session import connect_smp
from tests.smp_client.peer import make_identity, scripted_router
from tests.smp_client.test_session import accept_all, new_key
from transport.address_guard import MAX_ADDRESSES, AddressGuard
from transport.tls import client_context

PROXY = "socks5://127.0.0.1:1080"


def guard(resolve: Callable[[str], Sequence[str]]) -> AddressGuard:
    return AddressGuard(allow_private=True, resolve=resolve, cache_time=0)


def context() -> SSL.Context:
    return client_context([SMP_ALPN])


@pytest.mark.parametrize(
    ("config", "tried"),
    [
        (NetworkConfig(), ["a.example", "b.example"]),
        (NetworkConfig(prefer_onion=True), ["a.example", "b.example"]),
        (NetworkConfig(socks_proxy=PROXY), ["a.example", "b.example", "x.onion"]),
        (NetworkConfig(socks_proxy=PROXY, prefer_onion=True), ["x.onion", "a.example", "b.example"]),
        (NetworkConfig(socks_proxy=PROXY, onion_only=True), ["x.onion"]),
    ],
)
def test_hosts_to_try(config: NetworkConfig, tried: list[str]) -> None:
    assert hosts_to_try(["a.example", "x.onion", "b.example"], config) == tried


def test_few_hosts_are_tried_and_each_once() -> None:
    hosts = ["a.example", "A.example.", *(f"h{number}.example" for number in range(250))]
    assert hosts_to_try(hosts, NetworkConfig()) == ["a.example", "h0.example", "h1.example", "h2.example"]


@pytest.mark.parametrize(("hosts", "attempts"), [(1, MAX_ADDRESSES), (2, MAX_ATTEMPTS), (9, MAX_ATTEMPTS)])
async def test_a_name_with_many_addresses_causes_few_connections(hosts: int, attempts: int) -> None:
    """Each dial again, however often it is repeated."""
    places = [f"127.1.{host}.{number}" for host in range(9) for number in range(1, 100)]
    connected: list[str] = []

    async def count(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.append(writer.get_extra_info("sockname")[0])
        writer.close()

    def resolve(host: str) -> list[str]:
        return [place for place in places if place.startswith(f"127.1.{host[1]}.")]

    victim = await asyncio.start_server(count, "0.0.0.0", 0)
    async with victim:
        port = str(victim.sockets[0].getsockname()[1])
        named = SmpServer(tuple(f"h{number}.example" for number in range(hosts)), port, bytes(32))
        dialer = Dialer(guard=guard(resolve))
        for dials in (1, 2):
            with pytest.raises(ConnectFailed):
                await dialer.dial(named, context(), 10.0)
            assert len(connected) == dials * attempts


async def test_onion_only_without_a_proxy() -> None:
    with pytest.raises(ConnectFailed, match="proxy"):
        await Dialer().dial(SmpServer(("x.onion",), "", bytes(32)), context(), 1.0)


async def test_every_host_and_every_address_is_tried_and_names_are_asked_for_each_time() -> None:
    asked: list[str] = []

    def resolve(host: str) -> list[str]:
        asked.append(host)
        if host == "gone.example":
            raise socket.gaierror("no such name")
        return ["127.0.0.9", "127.0.0.1"]  # nobody listens at the first

    async with scripted_router(accept_all) as server:
        named = SmpServer(("gone.example", "here.example"), server.port, server.key_hash)
        dialer = Dialer(guard=guard(resolve))
        for _ in range(2):
            async with await connect_smp(named, dialer) as session:
                assert await session.request(EntityId(b"q"), Nsub(), new_key()) == Sok()
    assert asked == ["gone.example", "here.example"] * 2


async def test_an_impostor_at_one_address_does_not_hide_the_router_at_another() -> None:
    impostor = make_identity()
    async with scripted_router(accept_all) as server, scripted_router(accept_all, identity=impostor) as other:

        def resolve(host: str) -> list[str]:
            return ["127.0.0.1"]

        dialer = Dialer(guard=guard(resolve))
        wrong = SmpServer(("impostor.example", "127.0.0.1"), other.port, server.key_hash)
        with pytest.raises(WrongIdentity):
            await dialer.dial(wrong, context(), 5.0)


async def test_a_silent_host_leaves_time_for_the_next() -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with scripted_router(accept_all) as server:
        silent = await asyncio.start_server(hang, "127.0.0.2", server.port_number)

        def resolve(host: str) -> list[str]:
            return ["127.0.0.2" if host == "silent.example" else "127.0.0.1"]

        named = SmpServer(("silent.example", "good.example"), server.port, server.key_hash)
        async with silent:
            stream = await Dialer(guard=guard(resolve)).dial(named, context(), 1.0)
            stream.abort()
            await stream.wait_closed()


class SocksProxy:
    """A SOCKS5 proxy that knows one place and connects every name to it."""

    def __init__(self, port: int, *, refuse: bool = False) -> None:
        self.port = port
        self.refuse = refuse
        self.asked: list[tuple[str, int]] = []
        self.users: list[bytes] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, methods = await reader.readexactly(2)
        if 2 in await reader.readexactly(methods):
            writer.write(b"\x05\x02")
            await self._log_in(reader, writer)
        else:
            writer.write(b"\x05\x00")
        head = await reader.readexactly(5)
        assert head[:4] == b"\x05\x01\x00\x03", "the name must be left to the proxy"
        name = await reader.readexactly(head[4])
        port = int.from_bytes(await reader.readexactly(2), "big")
        self.asked.append((name.decode(), port))
        if self.refuse:
            writer.write(b"\x05\x05\x00\x01" + bytes(6))
            writer.close()
            return
        writer.write(b"\x05\x00\x00\x01" + bytes(6))
        there, back = await asyncio.open_connection("127.0.0.1", self.port)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_copy(reader, back))
            tasks.create_task(_copy(there, writer))

    async def _log_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, size = await reader.readexactly(2)
        self.users.append(await reader.readexactly(size))
        await reader.readexactly((await reader.readexactly(1))[0])
        writer.write(b"\x01\x00")


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            target.write(data)
    except ConnectionError:
        pass
    finally:
        target.close()


@pytest.mark.parametrize(
    ("host", "proxy_all", "through_proxy"),
    [("abc.onion", False, True), ("127.0.0.1", False, False), ("public.example", True, True)],
)
async def test_socks(host: str, proxy_all: bool, through_proxy: bool) -> None:
    async with scripted_router(accept_all) as server:
        proxy = SocksProxy(server.port_number)
        listener = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        config = NetworkConfig(socks_proxy=f"socks5://127.0.0.1:{port}", proxy_all=proxy_all)
        async with listener:
            named = SmpServer((host,), server.port, server.key_hash)
            async with await connect_smp(named, Dialer(config)) as session:
                assert await session.request(EntityId(b"q"), Nsub(), new_key()) == Sok()
        assert proxy.asked == ([(host, server.port_number)] if through_proxy else [])


async def test_without_a_proxy_all_connections_are_direct() -> None:
    dialer = Dialer(NetworkConfig(proxy_all=True))
    async with scripted_router(accept_all) as server, await connect_smp(server, dialer) as session:
        assert await session.request(EntityId(b"q"), Nsub(), new_key()) == Sok()


@pytest.mark.parametrize(
    ("user", "isolated", "names"), [("", True, 2), ("", False, 0), ("me:word@", True, 1)]
)
async def test_isolated_connections_have_user_names_of_their_own(
    user: str, isolated: bool, names: int
) -> None:
    """Unless the proxy wants a certain one."""
    async with scripted_router(accept_all) as server:
        proxy = SocksProxy(server.port_number)
        listener = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        config = NetworkConfig(socks_proxy=f"socks5://{user}127.0.0.1:{port}", isolated=isolated)
        named = SmpServer(("abc.onion",), server.port, server.key_hash)
        async with listener:
            for _ in range(2):
                async with await connect_smp(named, Dialer(config)) as session:
                    assert await session.request(EntityId(b"q"), Nsub(), new_key()) == Sok()
        assert len(proxy.asked) == 2
        assert len(set(proxy.users)) == names


async def test_socks_refusal_is_a_failure_to_connect() -> None:
    proxy = SocksProxy(0, refuse=True)
    listener = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    config = NetworkConfig(socks_proxy=f"socks5://127.0.0.1:{port}")
    async with listener:
        with pytest.raises(ConnectFailed, match="the proxy: "):
            await Dialer(config).dial(SmpServer(("x.onion",), "", bytes(32)), context(), 2.0)


def open_sockets() -> set[str]:
    files = Path("/proc/self/fd")
    return {name for entry in files.iterdir() if (name := _target(entry)).startswith("socket:")}


def _target(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except FileNotFoundError:  # the listing's own
        return ""


@pytest.mark.parametrize("accepts", [False, True])
async def test_a_proxy_that_hangs_costs_no_socket_once_it_is_given_up(accepts: bool) -> None:
    """It does not accept the connection, or it says nothing afterwards."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as proxy:
        port = proxy.getsockname()[1]
        with contextlib.ExitStack() as queue:
            if (
                not accepts
            ):  # one waits to be accepted; the system leaves whoever comes next without an answer
                queue.enter_context(socket.create_connection(("127.0.0.1", port)))
            dialer = Dialer(NetworkConfig(socks_proxy=f"socks5://127.0.0.1:{port}"))
            before = open_sockets()
            dialling = asyncio.ensure_future(
                dialer.dial(SmpServer(("x.onion",), "", bytes(32)), context(), 60.0)
            )
            async with asyncio.timeout(10):
                while open_sockets() == before:
                    await asyncio.sleep(0.001)
            dialling.cancel()
            with pytest.raises(asyncio.CancelledError) as given_up:
                await dialling
            assert open_sockets() == before, given_up  # kept so far: what its frames hold is still open


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "10.1.2.3"])
async def test_a_proxy_is_not_asked_for_places_that_are_forbidden(host: str) -> None:
    """It may be on our machine, and connect to what listens there."""
    asked: list[bytes] = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.read(1))
        writer.close()
        await writer.wait_closed()
        done.set()

    done = asyncio.Event()
    proxy = await asyncio.start_server(note, "127.0.0.1", 0)
    async with proxy:
        port = proxy.sockets[0].getsockname()[1]
        network = NetworkConfig(socks_proxy=f"socks5://127.0.0.1:{port}", proxy_all=True)
        dialer = Dialer(network, guard=AddressGuard())
        with pytest.raises(ConnectFailed, match="no public address"):
            await dialer.dial(SmpServer((host,), "", bytes(32)), context(), 5.0)
        with pytest.raises(ConnectFailed, match="the proxy"):
            await dialer.dial(SmpServer(("public.example",), "", bytes(32)), context(), 5.0)
        await done.wait()
    assert len(asked) == 1


async def test_silence_is_named() -> None:
    gone = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()
        gone.set()

    silent = await asyncio.start_server(hang, "127.0.0.1", 0)
    async with silent:
        server = SmpServer(("127.0.0.1",), str(silent.sockets[0].getsockname()[1]), bytes(32))
        with pytest.raises(ConnectFailed, match="time"):
            await Dialer().dial(server, context(), 0.2)
        await gone.wait()


async def test_reasons_are_words() -> None:
    with pytest.raises(ConnectFailed, match=r"^Connection refused$"):
        await Dialer(NetworkConfig()).dial(SmpServer(("127.0.0.1",), "1", bytes(32)), context(), 2.0)


async def test_no_proxy_there() -> None:
    config = NetworkConfig(socks_proxy="socks5://127.0.0.1:1")
    with pytest.raises(ConnectFailed, match="the proxy: "):
        await Dialer(config).dial(SmpServer(("x.onion",), "", bytes(32)), context(), 2.0)


def test_a_proxy_that_is_none() -> None:
    with pytest.raises(ValueError):
        Dialer(NetworkConfig(socks_proxy="gopher://127.0.0.1"))
