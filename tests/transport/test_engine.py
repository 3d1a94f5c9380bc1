"""The TLS machine with twins in memory: any cut of the byte stream, any damage to it."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transport.chains import ALPN, make_chain
from tests.transport.key_updates import UpdatingClient
from transport.engine import (
    DATA_PER_SLIGHT_RECORD,
    ENCRYPTED_AT_ONCE,
    MAX_PLAINTEXT,
    RECORD_OVERHEAD,
    SLIGHT_RECORDS,
    TlsEngine,
)
from transport.errors import ConnectionClosed, TlsFailed
from transport.tls import client_context, server_context

SERVER = server_context(make_chain(2), ALPN)
NO_LIMIT = 1 << 30


def give(engine: TlsEngine, data: bytes) -> None:
    """Deliver ciphertext as an event loop does."""
    engine.lend()[: len(data)] = data
    engine.feed(len(data))


def twins() -> tuple[TlsEngine, TlsEngine, bytes]:
    """A client that is done, a server that is not, and the client's last flight."""
    client = TlsEngine(client_context(ALPN), client_side=True)
    server = TlsEngine(SERVER, client_side=False)
    assert not client.shake_hands()
    give(server, client.take_outgoing())
    assert not server.shake_hands()
    give(client, server.take_outgoing())
    assert client.shake_hands()
    return client, server, client.take_outgoing()


def connected() -> tuple[TlsEngine, TlsEngine]:
    """Two machines that can exchange data."""
    client, server, flight = twins()
    give(server, flight)
    assert server.shake_hands()
    give(client, server.take_outgoing())
    assert client.decrypt(NO_LIMIT) == (b"", False)
    for engine in (client, server):
        assert engine.finish_handshake().alpn == ALPN[0]
    return client, server


def test_data_right_behind_the_last_flight() -> None:
    client, server, flight = twins()
    give(server, flight + client.encrypt(b"first") + client.encrypt(b"second") + client.close())
    assert server.shake_hands()
    assert server.decrypt(NO_LIMIT) == (b"firstsecond", True)
    assert server.finish_handshake().session_id == client.finish_handshake().session_id != b""


def test_byte_by_byte() -> None:
    client, server, flight = twins()
    finished = []
    for number in flight:
        give(server, bytes([number]))
        finished.append(server.shake_hands())
    assert finished == [False] * (len(flight) - 1) + [True]
    received = b""
    for number in client.encrypt(b"slow"):
        give(server, bytes([number]))
        received += server.decrypt(NO_LIMIT)[0]
    assert received == b"slow"


def test_limit_leaves_whole_records_for_later() -> None:
    client, server = connected()
    give(server, b"".join(client.encrypt(bytes([number]) * 100) for number in range(5)))
    assert server.decrypt(150) == (b"\0" * 100 + b"\1" * 100, False)
    assert server.has_waiting
    assert server.decrypt(0) == (b"", False)
    assert server.decrypt(NO_LIMIT)[0] == b"".join(bytes([number]) * 100 for number in (2, 3, 4))
    assert not server.has_waiting


def test_largest_record() -> None:
    client, server = connected()
    give(server, client.encrypt(b"x" * MAX_PLAINTEXT))
    assert server.decrypt(NO_LIMIT) == (b"x" * MAX_PLAINTEXT, False)


def test_several_records_at_once() -> None:
    client, server = connected()
    data = random.Random(1).randbytes(ENCRYPTED_AT_ONCE)
    for part in (data, memoryview(data)[1:]):
        records = client.encrypt(part)
        assert len(records) == len(part) + 4 * RECORD_OVERHEAD
        give(server, records)
        assert server.decrypt(NO_LIMIT) == (part, False)


def test_nothing_goes_on_after_a_forged_record() -> None:
    _, server = connected()
    give(server, b"\x17\x03\x03\0\x20" + bytes(32))
    with pytest.raises(ConnectionClosed, match=r"^[a-z ;]*bad record mac[a-z ;]*$"):
        server.decrypt(NO_LIMIT)
    assert server.take_outgoing()  # the alert
    with pytest.raises(ConnectionClosed):
        server.encrypt(b"to nobody")
    assert server.close() == b""


def test_writing_after_goodbye() -> None:
    client, _ = connected()
    assert client.close()
    with pytest.raises(ConnectionClosed):
        client.encrypt(b"late")


def handler(garbage: list[object], engine: TlsEngine, seen: list[object]) -> Iterator[None]:
    """One that the garbage collector ends together with its connection."""
    garbage.append(engine)
    try:
        yield
    finally:
        seen += [engine.close(), engine.take_outgoing()]
        for use in (lambda: engine.encrypt(b"late"), engine.shake_hands):
            try:
                seen.append(use())
            except ConnectionClosed as error:
                seen.append(str(error))


@pytest.mark.parametrize("side", [0, 1])
def test_a_connection_is_not_used_after_the_collector_freed_it(side: int) -> None:
    seen: list[object] = []
    garbage: list[object] = []
    garbage.append(handler(garbage, connected()[side], seen))
    next(garbage[0])  # type: ignore[call-overload]
    del garbage
    gc.collect()  # older ones first: the engine, then the handler
    assert seen == [b"", b"", "the connection is closed", "the connection is closed"]


def test_goodbye_before_the_handshake() -> None:
    assert TlsEngine(SERVER, client_side=False).close() == b""


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_record(data: st.DataObject) -> None:
    client, server = connected()
    record = bytearray(client.encrypt(b"secret block"))
    record[data.draw(st.integers(0, len(record) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    give(server, bytes(record))
    with contextlib.suppress(ConnectionClosed):
        assert server.decrypt(NO_LIMIT) == (b"", False)
        assert server.has_waiting  # a longer record was announced: it waits for the rest


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 3))
def test_noise_instead_of_a_handshake(noise: bytes, kind: int) -> None:
    server = TlsEngine(SERVER, client_side=False)
    header = bytes([20 + kind, 3, 1]) + len(noise).to_bytes(2, "big")
    give(server, header + noise)
    with contextlib.suppress(TlsFailed):
        assert not server.shake_hands()


def updating(client: UpdatingClient) -> TlsEngine:
    """Its server."""
    server = TlsEngine(SERVER, client_side=False)
    give(server, client.shake_hands())
    while not server.shake_hands():
        give(server, client.shake_hands(server.take_outgoing()))
    server.finish_handshake()
    return server


def test_keys_may_change_now_and_then() -> None:
    client = UpdatingClient()
    server = updating(client)
    for _ in range(SLIGHT_RECORDS):
        give(server, client.update())
        assert server.decrypt(NO_LIMIT) == (b"", False)
    assert server.take_outgoing()  # its own keys change too


def test_a_peer_that_only_changes_keys_is_given_up() -> None:
    """Each costs an answer that nobody has to take, and arithmetic that nothing counts."""
    client = UpdatingClient()
    server = updating(client)
    give(server, b"".join(client.update() for _ in range(10 * SLIGHT_RECORDS)))
    with pytest.raises(ConnectionClosed, match="hardly any data"):
        server.decrypt(NO_LIMIT)


def test_nor_may_it_send_a_byte_at_a_time() -> None:
    client, server = connected()
    for record in [client.encrypt(b"x") for _ in range(SLIGHT_RECORDS)]:
        give(server, record)
        assert server.decrypt(NO_LIMIT) == (b"x", False)
    give(server, client.encrypt(b"x"))
    with pytest.raises(ConnectionClosed, match="hardly any data"):
        server.decrypt(NO_LIMIT)


def test_data_makes_up_for_records_without() -> None:
    client = UpdatingClient()
    server = updating(client)
    for _ in range(3):
        for _ in range(SLIGHT_RECORDS):
            give(server, client.update())
            assert server.decrypt(NO_LIMIT) == (b"", False)
        for _ in range(SLIGHT_RECORDS * DATA_PER_SLIGHT_RECORD // MAX_PLAINTEXT):
            give(server, client.data(b"x" * MAX_PLAINTEXT))
            assert server.decrypt(NO_LIMIT) == (b"x" * MAX_PLAINTEXT, False)
