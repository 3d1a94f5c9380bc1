"""Accepting: connections count from the start, handshakes are paced, and a lack of files is survived."""

from __future__ import annotations

import asyncio
import errno
import gc
import resource
import socket
import time
from collections import Counter
from typing import Any, cast

import pytest

from tests.transport.chains import echo, make_chain, reach, running
from tests.waiting import until
from transport import accepting, tls
from transport import server as serving
from transport.budget import BudgetConfig, CpuBudget
from transport.engine import TlsEngine
from transport.errors import TransportError
from transport.limits import Rate
from transport.server import AcceptedStream, Handshakes, Server, serve
from transport.tls import client_context, server_context


class Gate:
    """Counts who is inside."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.inside: Counter[str] = Counter()

    def admit(self, address: str) -> bool:
        if self.inside.total() >= self.limit:
            return False
        self.inside[address] += 1
        return True

    def release(self, address: str) -> None:
        self.inside[address] -= 1


def tcp(port: int) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setblocking(False)
    return sock


async def test_connections_count_from_accept_until_their_socket_is_closed() -> None:
    gate = Gate(2)
    async with running(make_chain(2), admit=gate.admit, release=gate.release) as server:
        silent = [tcp(server.port), tcp(server.port)]
        await until(lambda: gate.inside.total() == 2)
        with pytest.raises((TransportError, OSError)):
            await reach(server, None)
        silent[0].close()
        await until(lambda: gate.inside.total() == 1)
        stream = await reach(server, None)
        stream.write(b"hello")
        assert await stream.receive() == b"hello"
        stream.close()
        silent[1].close()
        await until(lambda: gate.inside.total() == 0)


async def test_who_is_refused_does_not_cost_others_their_place() -> None:
    """Neither when there are none, nor before they had time enough."""
    gate, problems = Gate(0), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    async with running(make_chain(2), admit=gate.admit, release=gate.release) as server:
        with pytest.raises((TransportError, OSError)):
            await reach(server, None)
        gate.limit = 1
        slow = tcp(server.port)
        await until(lambda: gate.inside.total() == 1)
        with pytest.raises((TransportError, OSError)):
            await reach(server, None)
        stream = await reach(server, None, sock=slow)
        stream.write(b"hello")
        assert await stream.receive() == b"hello"
        stream.close()
    assert not problems


def test_a_tls_library_that_cannot_what_is_needed_is_refused() -> None:
    tls._require(1)
    with pytest.raises(RuntimeError):
        tls._require(0)


async def test_suspect_sources_connect_slowly() -> None:
    config = BudgetConfig(
        failures=Rate(per_second=1, burst=1), suspicion=3600, admissions=Rate(per_second=0.001, burst=1)
    )
    budget = CpuBudget(config)
    async with running(make_chain(2), budget=budget) as server:
        assert not budget.authorised("127.0.0.1", succeeded=0, failed=2)
        stream = await reach(server, None)
        with pytest.raises((TransportError, OSError)):
            await reach(server, None)
        stream.close()


async def test_a_slow_handshake_makes_room_where_room_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "GRACE", 0.2)
    gate = Gate(1)
    async with running(make_chain(2), admit=gate.admit, release=gate.release) as server:
        silent = tcp(server.port)
        await until(lambda: gate.inside.total() == 1)
        async with asyncio.timeout(60):
            while True:
                try:
                    stream = await reach(server, None)
                    break
                except (TransportError, OSError):
                    await asyncio.sleep(0.05)
        stream.abort()
        silent.close()


async def test_handshakes_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that begins and does not go on holds up others for the grace period at most."""
    monkeypatch.setattr(serving, "GRACE", 0.3)
    monkeypatch.setattr(serving, "LOOK_FOR_ROOM", 0.05)
    async with running(make_chain(2), max_handshakes=1) as server:
        stuck = tcp(server.port)
        started = time.monotonic()
        stuck.sendall(bytes.fromhex("1603010200 01"))  # the head of a ClientHello of 512 bytes
        await until(lambda: len(server._handshakes._begun) == 1)
        stream = await reach(server, None)
        assert time.monotonic() - started >= serving.GRACE
        await until(lambda: not server._handshakes._begun)
        stream.abort()
        stuck.close()


async def test_handshakes_take_part_of_a_turn_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "HANDSHAKE_TURN", 0.0)
    steps, take_turn, shake_hands = list[int](), Handshakes._take_turn, Handshakes._shake_hands

    def counted_turn(self: Handshakes) -> None:
        steps.append(0)
        take_turn(self)

    def counted_step(self: Handshakes, stream: AcceptedStream) -> None:
        steps[-1] += 1
        shake_hands(self, stream)

    monkeypatch.setattr(Handshakes, "_take_turn", counted_turn)
    monkeypatch.setattr(Handshakes, "_shake_hands", counted_step)
    async with running(make_chain(2)) as server:
        for stream in await asyncio.gather(*(reach(server, None) for _ in range(20))):
            stream.close()
    assert sum(steps) >= 40, "two flights of each client"
    assert max(steps) == 1


def begin(server: Server, address: str) -> socket.socket:
    """A client that sends the head of a ClientHello of 512 bytes, and no more."""
    sock = socket.create_connection(("127.0.0.1", server.port), source_address=(address, 0))
    sock.sendall(bytes.fromhex("1603010200 01"))
    return sock


async def test_places_are_taken_from_the_network_that_has_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "GRACE", 3600.0)
    async with running(make_chain(2), max_handshakes=4) as server:
        begun, stuck = server._handshakes._begun_by, []
        for address in ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.4"):
            stuck.append(begin(server, address))
            await until(lambda: begun.total() == len(stuck))
        stuck.append(begin(server, "127.0.0.5"))
        await until(lambda: begun["127.0.0.5"])
        assert begun == {f"127.0.0.{number}": 1 for number in (2, 3, 4, 5)}
        stuck.append(begin(server, "127.0.0.6"))
        await until(lambda: "127.0.0.6" in server._handshakes._waiting)
        assert begun.total() == 4
        for sock in stuck:
            sock.close()


async def test_one_timer_looks_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait for it; and it ends nobody's handshake if nobody waits any more."""
    monkeypatch.setattr(serving, "GRACE", -1.0)
    monkeypatch.setattr(serving, "LOOK_FOR_ROOM", 4321.0)
    loop, timers = asyncio.get_running_loop(), list[float]()
    later = loop.call_later

    def counted(delay: float, *arguments: Any) -> asyncio.TimerHandle:
        timers.append(delay)
        return later(delay, *arguments)

    monkeypatch.setattr(loop, "call_later", counted)
    async with running(make_chain(2), max_handshakes=1) as server:
        handshakes, stuck = server._handshakes, list[socket.socket]()
        for number in range(5):
            stuck.append(begin(server, "127.0.0.1"))
            await until(lambda: len(server._unfinished) == len(stuck))
            await until(lambda: handshakes._begun)
            assert timers.count(4321.0) == min(number, 1)
        for sock in stuck[1:]:
            sock.close()
        await until(lambda: not handshakes._waiting)
        handshakes._look_for_room()
        assert handshakes._begun
        stuck[0].close()


async def test_handshakes_that_a_server_breaks_off_are_not_the_peers_failures() -> None:
    errors = list[TransportError]()
    async with running(make_chain(2), on_handshake_error=errors.append) as server:
        gone, silent = tcp(server.port), tcp(server.port)
        await until(lambda: len(server._unfinished) == 2)
        gone.close()
        await until(lambda: len(errors) == 1)
    assert len(errors) == 1
    silent.close()


async def test_nothing_is_spent_on_a_connection_that_is_over() -> None:
    async with running(make_chain(2)) as server:
        sock = tcp(server.port)
        await until(lambda: server._unfinished)
        (stream,) = server._unfinished
        await until(lambda: not stream.is_closing)
        stream.abort()
        stream.shake_hands()
        assert not stream._started
        sock.close()


class Peer:
    """What handshakes know of a stream."""

    network = source = "192.0.2.1"
    is_closing = False
    steps = 0

    def shake_hands(self) -> None:
        self.steps += 1


async def test_a_turn_that_leaves_something_over_leads_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that wait to begin, and of those that can go on."""
    monkeypatch.setattr(serving, "HANDSHAKE_TURN", 0.0)
    handshakes, peers = Handshakes(0, None), [Peer() for _ in range(3)]
    for steps in (1, 2):
        for peer in peers:
            handshakes.add(cast("AcceptedStream", peer))
        for _ in peers:
            assert min(peer.steps for peer in peers) == steps - 1
            await asyncio.sleep(0)
        assert [peer.steps for peer in peers] == [steps] * 3


async def test_handshakes_of_one_source_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "GRACE", 60.0)
    async with running(make_chain(2), max_handshakes=2) as server:
        handshakes, stuck = server._handshakes, []
        for _ in range(3):
            stuck.append(
                socket.create_connection(("127.0.0.1", server.port), source_address=("127.0.0.2", 0))
            )
            stuck[-1].sendall(bytes.fromhex("1603010200 01"))
        await until(
            lambda: len(handshakes._begun) == 1 and len(handshakes._waiting.get("127.0.0.2", ())) == 2
        )
        stream = await reach(server, None)
        stream.abort()
        for sock in stuck:  # what waited and is gone is forgotten
            sock.close()
        await until(lambda: not (handshakes._begun or handshakes._waiting or handshakes._begun_by))


async def test_sources_of_one_network_have_one_part_of_the_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has a /48 of IPv6 has 65,536 sources."""
    monkeypatch.setattr(serving, "GRACE", 60.0)
    monkeypatch.setattr(serving, "source_of", _neighbour)
    async with running(make_chain(2), max_handshakes=4) as server:
        handshakes, stuck = server._handshakes, []
        for number in range(2, 8):
            sock = socket.create_connection(
                ("127.0.0.1", server.port), source_address=(f"127.0.0.{number}", 0)
            )
            sock.sendall(bytes.fromhex("1603010200 01"))
            stuck.append(sock)
        await until(lambda: len(handshakes._begun) == 2 and len(server._unfinished) == 6)
        assert handshakes._begun_by == {"2001:db8:1::/48": 2}
        stream = await reach(server, None)
        stream.abort()
        for sock in stuck:
            sock.close()
        await until(lambda: not (handshakes._begun or handshakes._waiting or handshakes._begun_by))


def _neighbour(address: str) -> str:
    """One that this machine has for a neighbour in a network; 127.0.0.1 is elsewhere."""
    number = address.rpartition(".")[2]
    return address if number == "1" else f"2001:db8:1:{number}::/64"


async def test_sources_that_have_all_places_give_some_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sources with half of the places each keep nobody out, and keep those that others do not want."""
    monkeypatch.setattr(serving, "GRACE", 60.0)
    async with running(make_chain(2), max_handshakes=8) as server:
        handshakes, stuck = server._handshakes, []
        for source in ("127.0.0.2", "127.0.0.3"):
            for _ in range(6):
                sock = socket.create_connection(("127.0.0.1", server.port), source_address=(source, 0))
                sock.sendall(bytes.fromhex("1603010200 01"))
                stuck.append(sock)
        await until(lambda: len(handshakes._begun) == 8 and len(server._unfinished) == 12)
        assert handshakes._begun_by == {"127.0.0.2": 4, "127.0.0.3": 4}
        stream = await reach(server, None)
        stream.abort()
        await until(lambda: len(server._unfinished) == 11)  # one gave up
        for sock in stuck:
            sock.close()
        await until(lambda: not (handshakes._begun or handshakes._waiting or handshakes._begun_by))


async def test_many_at_once_leave_the_loop_free() -> None:
    """However many peers arrive, the loop is never busy with them for long."""
    async with running(make_chain(2)) as server:
        longest, running_on = 0.0, True

        async def watch() -> None:
            nonlocal longest
            while running_on:
                before = time.thread_time()
                await asyncio.sleep(0)
                longest = max(longest, time.thread_time() - before)

        gc.collect()
        gc.disable()  # what other tests left would count as ours
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch())
            # Their first flights wait in the sockets before the server looks at any of them.
            hello = _client_hello()
            peers = [tcp(server.port) for _ in range(300)]
            for peer in peers:
                peer.send(hello)
            await until(lambda: all(_has_answer(peer) for peer in peers))
            running_on = False
        gc.enable()
        for peer in peers:
            peer.close()
    assert longest < 0.1  # all 300 in one go take several times as long


def _client_hello() -> bytes:
    engine = TlsEngine(client_context([]), client_side=True)
    engine.shake_hands()
    return engine.take_outgoing()


def _has_answer(peer: socket.socket) -> bool:
    try:
        return bool(peer.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


async def test_addresses_that_the_machine_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that is absent is left out; nothing to listen on at all is an error."""
    context = server_context(make_chain(2), [])
    with pytest.raises(OSError):
        await serve(echo, "192.0.2.1", 0, context=context)
    listen = accepting._listen

    def without_ipv6(family: int, address: tuple[object, ...], reuse_port: bool) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "no IPv6")
        return listen(family, address, reuse_port)

    monkeypatch.setattr(accepting, "_listen", without_ipv6)
    server = await serve(echo, None, 0, context=context)
    stream = await reach(server, None)
    stream.write(b"hello")
    assert await stream.receive() == b"hello"
    stream.close()
    server.close()
    await server.wait_closed()


async def test_no_files_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The server waits a little, says so, and goes on when there are files again."""
    monkeypatch.setattr(accepting, "ACCEPT_PAUSE", 0.3)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with running(make_chain(2)) as server:
        peer = socket.socket()
        peer.setblocking(False)
        used = peer.fileno() + 1
        taken = []
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
            while True:
                try:
                    taken.append(socket.socket())
                except OSError:
                    break
            peer.connect_ex(("127.0.0.1", server.port))
            await until(lambda: "cannot accept connections" in caplog.text)
            said, started = len(caplog.records), time.monotonic()
            await asyncio.sleep(0.1)
            pauses = (time.monotonic() - started) / accepting.ACCEPT_PAUSE
            assert len(caplog.records) - said <= pauses + 1  # not once per turn of the loop
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for sock in taken:
                sock.close()
        stream = await reach(server, None)
        stream.write(b"hello")
        assert await stream.receive() == b"hello"
        stream.abort()
        peer.close()


async def test_port_in_use_is_named() -> None:
    async with running(make_chain(2)) as server:
        with pytest.raises(OSError, match=f"cannot listen on .*{server.port}"):
            await serve(echo, "127.0.0.1", server.port, context=server_context(make_chain(2), []))


async def test_all_addresses_of_this_machine() -> None:
    server = await serve(echo, None, 0, context=server_context(make_chain(2), []))
    sock = tcp(server.port)
    await until(lambda: bool(server._streams))
    sock.close()
    server.close()
    await server.wait_closed()
