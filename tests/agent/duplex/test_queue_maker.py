"""Where queues are made."""

from __future__ import annotations

import pytest

from agent.duplex.queue_maker import QueueMaker
from agent.duplex.replies import TemporaryFailure
from agent.duplex.secrets import Secrets
from agent.duplex.tables import receive_queues
from protocol.addresses import SmpServer
from protocol.encoding import CorrId
from protocol.smp_messages import New, QueueMode, SmpCommand, SmpMessage
from smp_client.requests import Request
from tests.agent.duplex.simulation import SERVERS, connected_parties, finish, settle

ONE, TWO, THREE = SERVERS


async def _away(server: SmpServer, request: Request[SmpCommand], corr_id: CorrId | None = None) -> SmpMessage:
    raise TemporaryFailure("away")


def test_each_attempt_goes_to_a_router_that_was_not_tried() -> None:
    maker, tried = QueueMaker(SERVERS, Secrets(), _away), list[SmpServer]()
    for _ in range(6):
        tried.append(maker.choose())
        with pytest.raises(TemporaryFailure):
            finish(maker.make(tried[-1], QueueMode.MESSAGING))
    assert set(tried[:3]) == set(tried[3:]) == set(SERVERS)


def test_routers_to_be_avoided() -> None:
    maker = QueueMaker(SERVERS, Secrets(), _away)
    for _ in range(20):
        assert maker.choose([ONE, TWO]) is THREE
        assert maker.choose(SERVERS, [ONE]) in (TWO, THREE)
        assert maker.choose(SERVERS) in SERVERS


def test_the_password_of_a_router_however_it_is_spelled() -> None:
    sent = list[SmpCommand]()

    async def ask(
        server: SmpServer, request: Request[SmpCommand], corr_id: CorrId | None = None
    ) -> SmpMessage:
        sent.append(request.message)
        raise TemporaryFailure("away")

    spelled = SmpServer(("Router0.example.",), "5223", ONE.key_hash)
    assert spelled.canonical == ONE.canonical
    maker = QueueMaker(SERVERS, Secrets(), ask, passwords={spelled: b"sesame"})
    for server in (ONE, spelled, TWO):
        with pytest.raises(TemporaryFailure):
            finish(maker.make(server, QueueMode.MESSAGING))
    assert [command.password for command in sent if isinstance(command, New)] == [b"sesame", b"sesame", None]


def test_a_queue_moves_to_a_router_of_its_own() -> None:
    """Not to the peer's, as long as there is another; and never to where it is."""
    alice, bob = connected_parties()
    theirs = receive_queues(bob.db, bob.connection_id)[0].server
    (third,) = set(SERVERS) - {SERVERS[0], theirs}
    assert alice.switch()
    settle(alice, bob)
    assert [queue.server for queue in receive_queues(alice.db, alice.connection_id)] == [third]
