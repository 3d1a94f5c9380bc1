"""What no server in Python can do without for a SCHK: a loop that does nothing else.

It takes blocks from sockets, decrypts them, reads the rows of all commands that came together with one
statement, verifies, and sends a block back. It has no tasks, threads and limits, finds one command at fixed
places of a block, and its answer was made beforehand.
"""

from __future__ import annotations

import os
import select
import socket
import sqlite3
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from OpenSSL import SSL

from bench.tls import socket_pair
from protocol.blocks import pack_batches, pad
from protocol.crypto import AuthPrivateKey, decode_public_key
from protocol.encoding import NO_CORR, CorrId, EntityId, short
from protocol.session_params import ntf_params
from protocol.transmission import authorize, body, encode_transmission
from protocol.versions import NTF_BLOCK_SIZE, NTF_VERSIONS
from store.sqlite_engine import select_in
from tests.ntf_server.ntf_client import Device
from transport.certificates import KeyAlgorithm, make_ca, make_online
from transport.engine import TlsEngine
from transport.tls import client_context, server_context

IN_FLIGHT = 4
ROUNDS = 5
PARAMS = ntf_params(NTF_VERSIONS.max, bytes(32))
ANSWER = pad(bytes(300), NTF_BLOCK_SIZE)
FIRST, SIZE = 5, 121
"Where the first command of a block begins, and how far the next is from it."
SIGNATURE, CONTENT, ENTITY = slice(1, 65), slice(65, 119), slice(91, 115)
ROWS = """
SELECT subscription_id, verify_key, state FROM subscriptions JOIN tokens USING (token_key)
WHERE subscription_id IN ({})
"""


class Pair(NamedTuple):
    """Both ends of a connection."""

    client: TlsEngine
    server: TlsEngine
    near: socket.socket
    far: socket.socket


def check_cost(database: Path, device: Device, ids: Sequence[EntityId], connections: int) -> float:
    """Microseconds of CPU for a SCHK, four in a block: the middle one of a few rounds."""
    with ExitStack() as stack:
        db = stack.enter_context(closing(sqlite3.connect(database)))
        contexts = _contexts()
        pairs = [_pair(contexts, *stack.enter_context(socket_pair())) for _ in range(connections)]
        poll = stack.enter_context(closing(select.epoll()))
        by_number = {pair.far.fileno(): pair for pair in pairs}
        for number in by_number:
            poll.register(number, select.EPOLLIN)
        costs = []
        for turn in range(ROUNDS):
            _send(pairs, device.key, ids[turn * 7 :])
            started = time.process_time()
            left = connections
            while left:
                left -= _turn(db, [by_number[number] for number, _ in poll.poll()])
            costs.append((time.process_time() - started) / connections / IN_FLIGHT * 1e6)
            _take(pairs)
    return sorted(costs)[ROUNDS // 2]


def _turn(db: sqlite3.Connection, ready: Sequence[Pair]) -> int:
    """The server's part, for all connections that have sent something."""
    items = []
    for pair in ready:
        block = _receive(pair.server, pair.far)
        items += [block[at : at + SIZE] for at in range(FIRST, FIRST + IN_FLIGHT * SIZE, SIZE)]
    rows = {row[0]: row for row in select_in(db, ROWS, [item[ENTITY] for item in items])}
    prefix = short(PARAMS.session_id)
    for item in items:
        key = decode_public_key(rows[item[ENTITY]][1])
        if not key.verify(item[SIGNATURE], prefix + item[CONTENT]):  # type: ignore[union-attr]
            raise RuntimeError("a signature does not fit")
    for pair in ready:
        pair.far.send(pair.server.encrypt(ANSWER))
    return len(ready)


def _receive(engine: TlsEngine, sock: socket.socket) -> bytes:
    engine.feed(sock.recv_into(engine.lend()))
    return engine.decrypt(NTF_BLOCK_SIZE)[0]


def _send(pairs: Sequence[Pair], key: AuthPrivateKey, ids: Sequence[EntityId]) -> None:
    for number, pair in enumerate(pairs):
        block = _block(key, [ids[(number * IN_FLIGHT + at) * 7919 % len(ids)] for at in range(IN_FLIGHT)])
        pair.near.send(pair.client.encrypt(block))


def _take(pairs: Sequence[Pair]) -> None:
    for pair in pairs:
        if _receive(pair.client, pair.near) != ANSWER:
            raise RuntimeError("a wrong answer")


def _block(key: AuthPrivateKey, ids: Sequence[EntityId]) -> bytes:
    contents = [body(CorrId(os.urandom(24)), subscription_id, b"SCHK") for subscription_id in ids]
    transmissions = []
    for content in contents:
        signature = authorize(PARAMS, key, NO_CORR, short(PARAMS.session_id) + content)
        transmissions.append(encode_transmission(PARAMS, signature, None, content))
    (packed,) = pack_batches(transmissions, NTF_BLOCK_SIZE)
    return pad(packed, NTF_BLOCK_SIZE)


def _contexts() -> tuple[SSL.Context, SSL.Context]:
    now = datetime.now(UTC)
    ca_cert, ca_key = make_ca(KeyAlgorithm.ED25519, "CA", now)
    online = make_online(ca_cert, ca_key, KeyAlgorithm.ED25519, "localhost", now)
    return client_context([]), server_context(online, [])


def _pair(contexts: tuple[SSL.Context, SSL.Context], near: socket.socket, far: socket.socket) -> Pair:
    client, server = TlsEngine(contexts[0], client_side=True), TlsEngine(contexts[1], client_side=False)
    for _ in range(2):
        client.shake_hands()
        _give(server, client.take_outgoing())
        server.shake_hands()
        _give(client, server.take_outgoing())
    client.decrypt(NTF_BLOCK_SIZE)  # what the server sent behind the handshake: no data
    for engine in (client, server):
        engine.finish_handshake()
    return Pair(client, server, near, far)


def _give(engine: TlsEngine, flight: bytes) -> None:
    engine.lend()[: len(flight)] = flight
    engine.feed(len(flight))
