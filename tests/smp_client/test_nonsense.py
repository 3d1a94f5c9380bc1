"""How much nonsense is put up with."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from protocol.connection import Received
from protocol.encoding import CorrId, EntityId
from protocol.errors import ErrorType
from protocol.smp_messages import End, Err, Pong, SmpMessage
from smp_client.dialer import Dialer
from smp_client.errors import PeerMisbehaves
from smp_client.requests import MOST_NONSENSE as MOST
from smp_client.requests import NONSENSE_PER_SECOND as PER_SECOND
from smp_client.requests import Nonsense, NonsenseBudget
from smp_client.session import connect_smp
from tests.smp_client.peer import PeerSession, scripted_router
from transport.errors import TransportError


def test_some_at_once_and_little_for_ever() -> None:
    patience = NonsenseBudget(0.0)
    patience.lose(MOST, 0.0)
    patience.check()
    for second in range(1, 1000):
        patience.lose(int(PER_SECOND), second)
        patience.check()
    patience.lose(1, 1000.0 - 1)
    with pytest.raises(PeerMisbehaves):
        patience.check()


def test_what_makes_sense_pays_for_what_does_not() -> None:
    patience = NonsenseBudget(0.0)
    for _ in range(100):
        patience.regain(MOST)
        patience.lose(MOST, 0.0)
    patience.check()


async def test_a_peer_that_answers_what_nobody_asked_is_left() -> None:
    async def script(peer: PeerSession) -> None:
        with suppress(TransportError):
            while True:
                peer.answer([(CorrId(bytes([1] * 24)), EntityId(b"q"), Pong())] * 100)
                await peer.stream.drain()

    seen: list[tuple[Nonsense, int]] = []
    async with (
        scripted_router(script) as server,
        await connect_smp(
            server, Dialer(), on_nonsense=lambda kind, count: seen.append((kind, count))
        ) as session,
    ):
        async with asyncio.timeout(30):
            assert isinstance(await session.wait_closed(), PeerMisbehaves)
    assert len(seen) > MOST
    assert {kind for kind, _ in seen} == {Nonsense.UNASKED}


async def test_an_event_that_cannot_be_read_is_no_event() -> None:
    async def script(peer: PeerSession) -> None:
        peer.events([(EntityId(b"q"), Err(ErrorType(b"NONSENSE"))), (EntityId(b"q"), End())])
        await peer.receive()

    seen: list[tuple[Nonsense, int]] = []
    events: list[SmpMessage] = []
    came = asyncio.Event()

    async def consume(received: list[Received[SmpMessage]]) -> None:
        assert received
        events.extend(event.message for event in received)
        came.set()

    async with (
        asyncio.timeout(30),
        scripted_router(script) as server,
        await connect_smp(
            server,
            Dialer(),
            on_events=consume,
            on_nonsense=lambda kind, count: seen.append((kind, count)),
        ),
    ):
        await came.wait()
    assert events == [End()]
    assert seen == [(Nonsense.UNREADABLE, 1)]
