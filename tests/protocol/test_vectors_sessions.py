"""Captured handshakes, transmissions and batches: made of the same keys, and understood by the other side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from protocol.blocks import BATCH_RESERVE, pack_batches, pad, split_batch, unpad
from protocol.connection import Block, Connection, Outgoing, Received
from protocol.crypto import AuthPrivateKey, Ed25519PrivateKey
from protocol.encoding import CorrId, EntityId
from protocol.errors import HANDSHAKE_ERRORS, HandshakeError
from protocol.handshake import Step
from protocol.ntf_commands import Schk
from protocol.ntf_handshake import NtfClientHandshake, NtfServerHandshake
from protocol.session_params import ServiceSession, SessionParams, ntf_params, smp_params
from protocol.smp_handshake import (
    ClientHello,
    ServiceRole,
    SmpClientHandshake,
    SmpServerHandshake,
    service_fingerprint,
)
from protocol.smp_messages import New, Nsub, Sub
from protocol.transmission import RawTransmission, verify
from protocol.versions import NTF_BLOCK_SIZE, SMP_BLOCK_SIZE, VersionRange
from tests import twins
from tests.builders import (
    ed25519,
    fixed,
    inputs,
    server_chain,
    service_chain,
    service_login,
    vectors,
    x25519,
)
from tests.protocol import captured
from tests.protocol.captured import check_block, label
from tests.protocol.seen import smp_seen

SESSION_ID, KEY_HASH, CORR_ID = fixed("sessionId"), fixed("keyHash"), CorrId(fixed("corrId"))


# Sessions as the vectors have them: also with authenticators in versions that do not agree on a key.


def service_session(private: bool) -> ServiceSession:
    key = ed25519("serviceSessSk")
    fingerprint = service_fingerprint(service_chain())
    return ServiceSession(EntityId(fixed("serviceId")), fingerprint, key.public, key if private else None)


def client_params(group: str, version: int, service: bool) -> SessionParams:
    make = ntf_params if group.startswith("ntf") else smp_params
    params = replace(make(version, SESSION_ID), peer_session_key=x25519("serverX").public)
    return replace(params, service=service_session(private=True)) if service else params


def server_params(params: SessionParams) -> SessionParams:
    service = params.service and service_session(private=False)
    return replace(params, peer_session_key=None, own_session_key=x25519("serverX"), service=service)


def pair(group: str, params: SessionParams) -> tuple[Connection[Any, Any], Connection[Any, Any]]:
    """Client and server in the session `params`."""
    both: Any = twins.ntf_twins() if group.startswith("ntf") else twins.smp_twins()
    both.client.params, both.server.params = params, server_params(params)
    return both.client, both.server


def signing_key(name: str) -> AuthPrivateKey | None:
    kind = name.partition(" auth ")[2].removesuffix(" service")
    keys: dict[str, AuthPrivateKey] = {"ed25519": ed25519(), "x25519": x25519()}
    keys["service session key"] = ed25519("serviceSessSk")
    return None if kind == "none" else keys[kind]


@pytest.mark.parametrize("vector", vectors("ntf_transmission") + vectors("smp_transmission"), ids=label)
def test_transmission(vector: Any) -> None:
    group, version, name = vector["group"], vector["version"], vector["name"]
    command_name, in_service = name.partition(" auth ")[0], name.endswith(" service")
    commands: dict[str, Any] = captured.ntf_commands() if group.startswith("ntf") else captured.smp_commands()
    command, key = commands[command_name], signing_key(name)
    with_service = in_service and isinstance(command, Nsub | Sub | New)
    entity = captured.entity_of(group.replace("transmission", "command"), command_name)
    params = client_params(group, version, in_service)
    client, server = pair(group, params)

    block = client.send([Outgoing(CORR_ID, entity, command, key, with_service)])
    check_block(vector, block)
    content = unpad(block)
    assert content.hex() == vector["block_content_hex"]
    assert params.batch == vector["batched"]
    [transmission] = split_batch(content) if params.batch else [content]
    assert transmission.hex() == vector["transmission_hex"]

    [event] = server.receive_data(block)
    assert isinstance(event, Block)
    [item] = event.items
    assert isinstance(item, Received)
    assert (item.corr_id, item.entity_id) == (CORR_ID, entity)
    assert item.message == (command if group.startswith("ntf") else smp_seen(command, version))
    if key is not None:
        assert item.raw.signed.hex() == vector["signed_bytes_hex"]
        check_authorisation(server_params(params), key, item.raw, with_service)


def check_authorisation(
    params: SessionParams, key: AuthPrivateKey, raw: RawTransmission, with_service: bool
) -> None:
    prefix = params.service.fingerprint if params.service and with_service else b""
    assert verify(params, key.public, raw, prefix)
    assert not verify(params, key.public, raw, prefix + b"other")
    assert (raw.service_signature is not None) == with_service
    if params.service and raw.service_signature is not None:
        assert params.service.session_key.verify(raw.service_signature, raw.signed)


# Batches


def batch_transmissions(vector: Any) -> tuple[SessionParams, list[Outgoing[Any]]]:
    count, command = vector["name"].split(" ")[:2]
    service = vector["name"].endswith(" service")
    params = client_params(vector["group"], vector["version"], service)
    message = Schk() if command == "SCHK" else Nsub()
    letters = [bytes((ord("a") + index % 26,)) * 24 for index in range(int(count))]
    return params, [Outgoing(CorrId(s), EntityId(s), message, ed25519(), service) for s in letters]


def split_blocks(params: SessionParams, data: bytes) -> list[bytes]:
    size = params.block_size
    return [unpad(data[start : start + size]) for start in range(0, len(data), size)]


@pytest.mark.parametrize("vector", vectors("ntf_batch") + vectors("smp_batch"), ids=label)
def test_batch(vector: Any) -> None:
    params, batch = batch_transmissions(vector)
    client, server = pair(vector["group"], params)
    data = client.send(batch)
    contents = split_blocks(params, data)
    assert len(contents) == len(vector["blocks"])
    ours = [t for content in contents for t in (split_batch(content) if params.batch else [content])]
    check_same_transmissions(params, ours, vector["blocks"])
    assert all(len(content) - 1 <= params.block_size - BATCH_RESERVE for content in contents)
    events = server.receive_data(data)
    received = [item for event in events if isinstance(event, Block) for item in event.items]
    assert [item.corr_id for item in received] == [outgoing.corr_id for outgoing in batch]


def check_same_transmissions(params: SessionParams, ours: Sequence[bytes], blocks: Sequence[Any]) -> None:
    """The captured blocks are these transmissions, in this order, cut elsewhere."""
    start = 0
    for block in blocks:
        count = block.get("count", 1)
        [content] = pack_batches(ours[start : start + count], 1 << 16) if params.batch else [ours[start]]
        start += count
        assert len(content) == block["content_len"]
        assert content.hex() == block.get("content_hex", content.hex())
        check_block(block, pad(content, params.block_size))
    assert start == len(ours)


# Handshakes


@pytest.mark.parametrize("vector", vectors("ntf_server_handshake"), ids=label)
def test_ntf_server_hello(vector: Any) -> None:
    versions = VersionRange(1, vector["version"])
    server = NtfServerHandshake(SESSION_ID, KEY_HASH, ed25519("serverCertSk"), x25519("serverX"), versions)
    assert server.start().hex() == vector["hex"]
    check_block(vector, pad(server.start(), NTF_BLOCK_SIZE))
    params = agreed(ntf_client().receive(bytes.fromhex(vector["hex"])))
    assert params.version == vector["version"]
    has_key = params.version > 1
    assert params.peer_session_key == (x25519("serverX").public if has_key else None)


def ntf_client(versions: VersionRange | None = None) -> NtfClientHandshake:
    return NtfClientHandshake(SESSION_ID, KEY_HASH, server_chain()[0], versions or VersionRange(1, 3))


def agreed(step: Step) -> SessionParams:
    assert step.agreed is not None
    return step.agreed.params


@pytest.mark.parametrize("vector", vectors("ntf_client_handshake"), ids=label)
def test_ntf_client_hello(vector: Any) -> None:
    version = vector["version"]
    server = NtfServerHandshake(SESSION_ID, KEY_HASH, ed25519("serverCertSk"), x25519("serverX"))
    reply = ntf_client(VersionRange(1, version)).receive(server.start()).reply
    assert reply is not None
    assert reply.hex() == vector["hex"]
    check_block(vector, pad(reply, NTF_BLOCK_SIZE))
    assert agreed(server.receive(bytes.fromhex(vector["hex"]))).version == version


def smp_router(versions: VersionRange) -> SmpServerHandshake:
    return SmpServerHandshake(
        SESSION_ID,
        server_chain(),
        ed25519("serverCertSk"),
        x25519("serverX"),
        service_id=twins.service_id,
        versions=versions,
    )


@pytest.mark.parametrize("vector", vectors("smp_server_handshake"), ids=label)
def test_smp_router_hello(vector: Any) -> None:
    router = smp_router(VersionRange(6, vector["version"]))
    assert router.start().hex() == vector["hex"]
    check_block(vector, pad(router.start(), SMP_BLOCK_SIZE))
    client = SmpClientHandshake(SESSION_ID, KEY_HASH, server_chain(), x25519("clientX"))
    step = client.receive(bytes.fromhex(vector["hex"]))
    assert agreed(step).version == vector["version"]
    assert step.agreed is not None
    assert (step.agreed.sending is not None) == (vector["version"] >= 11)


@pytest.mark.parametrize("vector", vectors("smp_client_handshake"), ids=label)
def test_smp_client_hello(vector: Any) -> None:
    version, name = vector["version"], vector["name"]
    role = next((role for role in ServiceRole if f"{role.name.lower()} service" in name), None)
    session_key = None if name.startswith("no key") else x25519("clientX")
    check_block(vector, pad(bytes.fromhex(vector["hex"]), SMP_BLOCK_SIZE))
    hello = ClientHello.parse(bytes.fromhex(vector["hex"]))
    assert (hello.version, hello.key_hash) == (version, KEY_HASH)
    assert hello.session_key == (session_key.public.der if session_key and version >= 7 else None)
    assert ClientHello.build(hello).hex() == vector["hex"]
    assert (hello.service is not None) == (role is not None and version >= 16)
    if role is ServiceRole.MESSAGING and 16 <= version < role.since:
        return  # encoded by the reference, sent by nobody
    client = SmpClientHandshake(
        SESSION_ID,
        KEY_HASH,
        server_chain(),
        session_key,
        None if role is None else service_login(role),
        VersionRange(6, version),
    )
    reply = client.receive(smp_router(VersionRange(6, 19)).start()).reply
    assert reply is not None
    assert reply.hex() == vector["hex"]


@pytest.mark.parametrize("vector", vectors("smp_server_handshake_response"), ids=label)
def test_smp_service_answer(vector: Any) -> None:
    client = SmpClientHandshake(
        SESSION_ID, KEY_HASH, server_chain(), x25519("clientX"), service_login(), VersionRange(6, 19)
    )
    client.receive(smp_router(VersionRange(6, 19)).start())
    answer = bytes.fromhex(vector["hex"])
    if vector["name"] == "service id":
        service = agreed(client.receive(answer)).service
        assert service is not None
        assert service.service_id == fixed("serviceId")
        assert service.fingerprint.hex() == inputs()["serviceCert_fingerprint_sha256_hex"]
        assert service.private_key == Ed25519PrivateKey(ed25519("serviceSessSk").seed)
        return
    with pytest.raises(HandshakeError) as refused:
        client.receive(answer)
    assert b"E" + refused.value.error.text == answer
    assert refused.value.error in HANDSHAKE_ERRORS.values()
