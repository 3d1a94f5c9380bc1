"""The connection machine after the handshake: batches both ways, refusals, broken blocks, encryption."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from protocol import ntf_commands as ntf
from protocol import smp_messages as smp
from protocol.blocks import pad
from protocol.connection import Block, Failed, Outgoing, Received, Rejected, write_item
from protocol.encoding import NO_CORR, NO_ENTITY, CorrId, short
from protocol.errors import (
    BLOCK,
    CMD_HAS_AUTH,
    CMD_NO_AUTH,
    CMD_NO_ENTITY,
    CMD_SYNTAX,
    CMD_UNKNOWN,
    SESSION,
    TE_BLOCK,
    TE_NO_AUTH,
    HandshakeError,
    TooLarge,
)
from protocol.smp_codec import SMP_COMMANDS
from protocol.transmission import verify
from protocol.versions import NTF_LEGACY, SMP_LEGACY, VersionRange
from tests import twins
from tests.builders import (
    corr_id,
    ed448,
    ed25519,
    entity_id,
    fixed,
    nmsg,
    service_login,
    snew,
    tnew,
    x25519,
)

SMP_SIZE = 16384


def items(events: Any) -> list[Any]:
    return [item for event in events for item in event.items]


def test_requests_and_answers() -> None:
    both = twins.ntf_twins().shake()
    requests = [
        Outgoing[ntf.NtfCommand](corr_id(1), NO_ENTITY, tnew(), ed25519()),
        Outgoing[ntf.NtfCommand](corr_id(2), NO_ENTITY, snew(), x25519()),
        Outgoing[ntf.NtfCommand](corr_id(3), entity_id(), ntf.Tchk(), ed448()),
        Outgoing[ntf.NtfCommand](corr_id(4), NO_ENTITY, ntf.Ping()),
    ]
    received = items(both.server.receive_data(both.client.send(requests)))
    assert [(r.corr_id, r.entity_id, r.message) for r in received] == [request[:3] for request in requests]
    assert both.server.params is not None
    for item, request in zip(received[:3], requests, strict=False):
        assert request.key is not None
        assert verify(both.server.params, request.key.public, item.raw)
    answers = [Outgoing(item.corr_id, item.entity_id, ntf.Ok()) for item in received]
    answered = items(both.client.receive_data(both.server.send(answers)))
    assert [(a.corr_id, a.message) for a in answered] == [(r.corr_id, ntf.Ok()) for r in received]


@pytest.mark.parametrize("session_key", [None, x25519("clientX")], ids=["plain", "encrypted"])
def test_chunks_do_not_matter(session_key: Any) -> None:
    seen = []
    for chunk in (0, 1, 1000, SMP_SIZE, SMP_SIZE + 1, 50000):
        both = twins.smp_twins(session_key=session_key).shake()
        events = [Outgoing(NO_CORR, entity_id(n), nmsg(n)) for n in range(250)]
        data = both.server.send(events)
        assert len(data) == 4 * SMP_SIZE
        seen.append(twins.deliver(both.client, data, chunk))
    assert len(items(seen[0])) == 250
    assert all(events == seen[0] for events in seen)


def test_encrypted_blocks_look_random_and_must_come_in_order() -> None:
    both = twins.smp_twins(session_key=x25519("clientX")).shake()
    data = both.server.send([Outgoing(NO_CORR, entity_id(n), nmsg(n)) for n in range(100)])
    first, second = data[:SMP_SIZE], data[SMP_SIZE:]
    assert b"NMSG" not in data
    assert b"####" not in data
    both.to_client(second + first)
    assert both.failures == (TE_BLOCK, None)
    assert len([e for e in both.client_events if isinstance(e, Failed)]) == 1
    again = twins.smp_twins(session_key=x25519("clientX")).shake()
    again.to_client(first + first)
    assert isinstance(again.client_events[1], Block)
    assert again.failures == (TE_BLOCK, None)


def test_nothing_is_read_after_a_failure() -> None:
    both = twins.ntf_twins().shake()
    bad = pad(b"", 512)
    good = both.client.send([Outgoing(corr_id(), NO_ENTITY, ntf.Ping())])
    both.to_server(bad + good)
    both.to_server(good + b"rest")
    assert [type(event).__name__ for event in both.server_events] == ["HandshakeDone", "Failed"]
    assert both.server._buffer == b""


BAD_BATCHES = [b"", b"\0", b"\1", b"\1\0", b"\1\0\5abc", b"\2\0\1a", b"\1\0\1ab"]


@pytest.mark.parametrize("content", BAD_BATCHES, ids=bytes.hex)
def test_a_count_that_does_not_match_ends_the_connection(content: bytes) -> None:
    both = twins.ntf_twins().shake()
    both.to_server(pad(content, 512))
    assert both.failures == (None, TE_BLOCK)


@pytest.mark.parametrize("content", BAD_BATCHES, ids=bytes.hex)
def test_a_router_answers_it(content: bytes) -> None:
    both = twins.smp_twins().shake()
    both.to_server(pad(content, SMP_SIZE))
    assert both.failures == (None, None)
    assert both.server_events[-1] == Block([Rejected(NO_CORR, NO_ENTITY, BLOCK)])


def ntf_transmission(auth: bytes, corr: CorrId, entity: bytes, command: bytes) -> bytes:
    return short(auth) + short(corr) + short(entity) + command


@pytest.mark.parametrize(
    ("auth", "entity", "command", "error"),
    [
        (b"", b"", b"WHAT", CMD_UNKNOWN),
        (b"", b"", b"ping", CMD_UNKNOWN),
        (b"", b"", b"", CMD_UNKNOWN),
        (b"", b"", b"PING now", CMD_SYNTAX),
        (b"s" * 64, b"token", b"TCRN \0", CMD_SYNTAX),
        (b"s" * 64, b"token", b"TCRN \0\0\0", CMD_SYNTAX),
        (b"s" * 64, b"token", b"TVFY", CMD_SYNTAX),
        (b"s" * 63, b"token", b"TCHK", BLOCK),
        (b"s" * 64, b"", b"PING", CMD_HAS_AUTH),
        (b"", b"token", b"PING", CMD_HAS_AUTH),
        (b"", b"token", b"TCHK", CMD_NO_AUTH),
        (b"s" * 64, b"", b"TCHK", CMD_NO_AUTH),
        (b"s" * 80, b"token", b"TCHK", None),
        (b"s" * 114, b"token", b"TCHK", None),
    ],
)
def test_refused_transmissions(auth: bytes, entity: bytes, command: bytes, error: Any) -> None:
    """The rest of the batch is still served."""
    both = twins.ntf_twins().shake()
    first = ntf_transmission(auth, corr_id(7), entity, command)
    second = ntf_transmission(b"", corr_id(8), b"", b"PING")
    content = b"\2" + b"".join(len(t).to_bytes(2, "big") + t for t in (first, second))
    [event] = both.server.receive_data(pad(content, 512))
    assert isinstance(event, Block)
    refused, served = event.items
    assert isinstance(served, Received)
    if error is None:
        assert isinstance(refused, Received)
    else:
        assert refused == Rejected(corr_id(7), entity, error)  # type: ignore[arg-type]


def test_commands_that_carry_their_key() -> None:
    both = twins.ntf_twins().shake()
    create = ntf.NTF_COMMANDS.encode(tnew(), 3)
    for auth, entity, error in ((b"", b"", CMD_NO_AUTH), (b"s" * 64, b"token", CMD_HAS_AUTH)):
        transmission = ntf_transmission(auth, corr_id(), entity, create)
        content = b"\1" + len(transmission).to_bytes(2, "big") + transmission
        [item] = items(both.server.receive_data(pad(content, 512)))
        assert item == Rejected(corr_id(), entity, error)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "transmission", [b"", b"\x05abc", b"\0\x05abc", b"\0\0", b"\0\0\x02a"], ids=bytes.hex
)
def test_unreadable_transmissions(transmission: bytes) -> None:
    both = twins.ntf_twins().shake()
    content = b"\1" + len(transmission).to_bytes(2, "big") + transmission
    [item] = items(both.server.receive_data(pad(content, 512)))
    assert item == Rejected(NO_CORR, NO_ENTITY, BLOCK)


def test_send_without_a_key_needs_an_entity() -> None:
    both = twins.smp_twins().shake()
    batch = [
        Outgoing(corr_id(1), entity_id(), smp.Send(True, b"x")),
        Outgoing(corr_id(2), NO_ENTITY, smp.Send(True, b"x")),
    ]
    sent, refused = items(both.server.receive_data(both.client.send(batch)))
    assert isinstance(sent, Received)
    assert refused == Rejected(corr_id(2), NO_ENTITY, CMD_NO_ENTITY)


@pytest.mark.parametrize("make", ["ntf", "smp"])
def test_legacy_sessions_name_the_session(make: str) -> None:
    both: Any = (
        twins.ntf_twins(server_versions=NTF_LEGACY)
        if make == "ntf"
        else twins.smp_twins(router_versions=SMP_LEGACY)
    ).shake()
    ping = ntf.Ping() if make == "ntf" else smp.Ping()
    data = both.client.send([Outgoing(corr_id(1), NO_ENTITY, ping), Outgoing(corr_id(2), NO_ENTITY, ping)])
    assert len(data) == (2 * 512 if make == "ntf" else SMP_SIZE)
    assert fixed("sessionId") in data
    good = items(both.server.receive_data(data))
    assert [item.message for item in good] == [ping, ping]
    other = data.replace(fixed("sessionId"), bytes(32))
    assert [item.error for item in items(both.server.receive_data(other))] == [SESSION, SESSION]


def test_no_authenticators_without_a_session_key() -> None:
    both = twins.ntf_twins(server_versions=NTF_LEGACY).shake()
    with pytest.raises(HandshakeError) as refused:
        both.client.send([Outgoing(corr_id(), entity_id(), ntf.Tchk(), x25519())])
    assert refused.value.error == TE_NO_AUTH


@pytest.mark.parametrize("key", [ed25519(), x25519(), ed448()], ids=["Ed25519", "X25519", "Ed448"])
def test_service_signatures(key: Any) -> None:
    both = twins.smp_twins(service=service_login(), session_key=x25519("clientX")).shake()
    batch: list[Outgoing[smp.SmpCommand]] = [
        Outgoing(corr_id(1), entity_id(), smp.Nsub(), key, with_service=True),
        Outgoing(corr_id(2), entity_id(), smp.Ndel(), key),
        Outgoing(corr_id(3), entity_id(), smp.Nsubs(smp.QueueSet(0)), ed25519("serviceSessSk")),
    ]
    nsub, ndel, nsubs = items(both.server.receive_data(both.client.send(batch)))
    params = both.server.params
    assert params is not None
    assert params.service is not None
    fingerprint, session_key = params.service.fingerprint, params.service.session_key
    assert verify(params, key.public, nsub.raw, fingerprint)
    assert not verify(params, key.public, nsub.raw)
    assert session_key.verify(nsub.raw.service_signature, nsub.raw.signed)
    assert verify(params, key.public, ndel.raw)
    assert ndel.raw.service_signature is None
    assert verify(params, session_key, nsubs.raw)


def test_with_service_means_nothing_without_a_service() -> None:
    both = twins.smp_twins().shake()
    batch = [Outgoing(corr_id(1), entity_id(), smp.Nsub(), ed25519(), with_service=True)]
    [nsub] = items(both.server.receive_data(both.client.send(batch)))
    assert nsub.raw.service_signature is None
    assert both.server.params is not None
    assert verify(both.server.params, ed25519().public, nsub.raw)


def test_nobody_signs_for_a_service_without_its_key() -> None:
    """A router knows services, and has the keys of none."""
    both = twins.smp_twins(service=service_login()).shake()
    assert both.server.params is not None
    assert both.server.params.service is not None
    params = replace(both.server.params, own_session_key=None)
    outgoing: Outgoing[smp.SmpCommand] = Outgoing(corr_id(1), entity_id(), smp.Nsub(), ed25519(), True)
    unsigned = write_item(replace(params, service=None), outgoing, SMP_COMMANDS)
    assert write_item(params, outgoing, SMP_COMMANDS) == unsigned


def test_service_signature_of_another_length() -> None:
    both = twins.smp_twins(service=service_login()).shake()
    for size in (0, 63, 65):
        start = short(b"s" * 64) + b"1" + short(b"x" * size)
        transmission = start + short(b"corr") + short(b"entity") + b"NSUB"
        content = b"\1" + len(transmission).to_bytes(2, "big") + transmission
        [item] = items(both.server.receive_data(pad(content, SMP_SIZE)))
        assert item == Rejected(NO_CORR, NO_ENTITY, BLOCK)


def message(size: int) -> smp.Msg:
    return smp.Msg(b"m" * 24, b"x" * size)


# count, transmission length; auth, corr id, entity id; tag, space and message id
OVERHEAD = 1 + 2 + 3 + 4 + 1 + 24


def test_one_transmission_may_fill_a_block() -> None:
    both = twins.smp_twins().shake()
    room = SMP_SIZE - 2 - OVERHEAD
    [item] = items(both.client.receive_data(both.server.send([Outgoing(NO_CORR, NO_ENTITY, message(room))])))
    assert item.message == message(room)
    with pytest.raises(TooLarge):
        both.server.send([Outgoing(NO_CORR, NO_ENTITY, message(room + 1))])


def test_too_large_in_an_encrypted_session_spoils_nothing() -> None:
    """No key of the chain is used up by blocks that are never sent."""
    both = twins.smp_twins(session_key=x25519("clientX")).shake()
    room = SMP_SIZE - 2 - 16 - OVERHEAD
    fits, too_large = (Outgoing(NO_CORR, NO_ENTITY, message(size)) for size in (room, room + 1))
    with pytest.raises(TooLarge):
        both.server.send([fits, too_large])
    [item] = items(both.client.receive_data(both.server.send([fits])))
    assert item.message == message(room)


def test_too_large_without_batches() -> None:
    both = twins.ntf_twins(server_versions=NTF_LEGACY).shake()
    with pytest.raises(TooLarge):
        both.client.send([Outgoing(CorrId(b"c" * 255), entity_id(), ntf.Tvfy(b"x" * 255))])


def test_old_routers_are_told_in_words_they_know() -> None:
    both = twins.smp_twins(router_versions=VersionRange(6, 9)).shake()
    batch: list[Outgoing[smp.SmpMessage]] = [
        Outgoing(corr_id(), entity_id(), smp.Sok()),
        Outgoing(NO_CORR, entity_id(), smp.Deld()),
    ]
    received = items(both.client.receive_data(both.server.send(batch)))
    assert [item.message for item in received] == [smp.Ok(), smp.End()]
