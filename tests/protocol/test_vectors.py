"""Captured commands, answers and values: ours encode to the same bytes and decode from them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from protocol.addresses import (
    NtfServer,
    SmpQueueNtf,
    parse_ntf_server,
    parse_smp_queue_ntf,
    parse_smp_server,
    pull_smp_queue_ntf,
    pull_smp_server,
    push_smp_queue_ntf,
    push_smp_server,
)
from protocol.blocks import BlockChain, session_chains
from protocol.crypto import open_box
from protocol.device_token import Provider
from protocol.encoding import CorrId, Reader, Writer, unb64
from protocol.ids_hash import NO_IDS, ids_hash, xor
from protocol.ntf_commands import NTF_COMMANDS, NTF_RESPONSES
from protocol.proxy import ForwardedAnswer, seal_forwarded_answer
from protocol.push_messages import (
    NmsgMeta,
    PnMessage,
    decode_nmsg_meta,
    decode_pn_messages,
    encode_pn_messages,
    open_nmsg_meta,
    open_push,
    seal_nmsg_meta,
    seal_push,
)
from protocol.smp_codec import SMP_COMMANDS, SMP_MESSAGES
from protocol.smp_handshake import ServiceRole
from protocol.versions import SMP_BLOCK_SIZE
from tests.builders import fixed, inputs, vector_groups, vectors, x25519
from tests.protocol import captured
from tests.protocol.captured import label
from tests.protocol.seen import ntf_seen, smp_seen


def test_no_group_is_forgotten() -> None:
    here = {"ntf_command", "ntf_response", "smp_command", "smp_response", "smp_encrypted_block", "ids_hash"}
    here |= {"nmsg_meta", "pn_messages", "smp_queue_ntf", "apns_payload", "server_address", "push_provider"}
    here |= {"int64", "service_role", "system_time"}
    sessions = {"ntf_transmission", "smp_transmission", "ntf_batch", "smp_batch", "ntf_server_handshake"}
    sessions |= {"ntf_client_handshake", "smp_server_handshake", "smp_client_handshake"}
    sessions |= {"smp_server_handshake_response"}
    assert vector_groups() == here | sessions | {"reverse_nonce"}


def test_nonces_of_proxied_answers_are_in_reverse() -> None:
    (vector,) = vectors("reverse_nonce")
    answer = ForwardedAnswer(CorrId(fixed("corrId")), b"answer")
    boxed = seal_forwarded_answer(bytes(32), CorrId(fixed("corrId")), answer)
    assert open_box(bytes(32), bytes.fromhex(vector["hex"]), boxed).endswith(b"answer")


@pytest.mark.parametrize("vector", vectors("ntf_command"), ids=label)
def test_ntf_command(vector: Any) -> None:
    command, wire, version = captured.ntf_commands()[vector["name"]], vector["hex"], vector["version"]
    assert NTF_COMMANDS.encode(command, version).hex() == wire
    assert NTF_COMMANDS.decode(bytes.fromhex(wire), version) == command


@pytest.mark.parametrize("vector", vectors("ntf_response"), ids=label)
def test_ntf_response(vector: Any) -> None:
    response, wire, version = captured.ntf_response(vector["name"]), vector["hex"], vector["version"]
    assert NTF_RESPONSES.encode(response, version).hex() == wire
    assert NTF_RESPONSES.decode(bytes.fromhex(wire), version) == ntf_seen(response, version)


@pytest.mark.parametrize("vector", vectors("smp_command"), ids=label)
def test_smp_command(vector: Any) -> None:
    command, wire, version = captured.smp_commands()[vector["name"]], vector["hex"], vector["version"]
    assert SMP_COMMANDS.encode(command, version).hex() == wire
    assert SMP_COMMANDS.decode(bytes.fromhex(wire), version) == smp_seen(command, version)


@pytest.mark.parametrize("vector", vectors("smp_response"), ids=label)
def test_smp_message(vector: Any) -> None:
    message, wire, version = captured.smp_message(vector["name"]), vector["hex"], vector["version"]
    assert SMP_MESSAGES.encode(message, version).hex() == wire
    assert SMP_MESSAGES.decode(bytes.fromhex(wire), version) == smp_seen(message, version)


def test_encrypted_blocks() -> None:
    secret = bytes.fromhex(inputs()["dh_secrets"]["ntfSecret_serverX_clientX"])
    assert x25519("serverX").exchange(x25519("clientX").public) == secret
    router, client = session_chains(fixed("sessionId"), secret)
    router_twin, client_twin = session_chains(fixed("sessionId"), secret)
    for vector in vectors("smp_encrypted_block"):
        ours, twin = (router, router_twin) if vector["name"].startswith("server") else (client, client_twin)
        keys = BlockChain(ours._chain_key)._next()
        assert [key.hex() for key in keys] == [vector["sb_key_hex"], vector["nonce_hex"]]
        block = ours.encrypt(bytes.fromhex(vector["content_hex"]), SMP_BLOCK_SIZE)
        captured.check_block(vector, block, "encrypted_block")
        assert twin.decrypt(block).hex() == vector["content_hex"]


@pytest.mark.parametrize("vector", vectors("ids_hash"), ids=label)
def test_ids_hash(vector: Any) -> None:
    ids = [bytes.fromhex(queue_id) for queue_id in vector["ids_hex"]]
    assert ids_hash(ids).hex() == vector["hex"]
    total = NO_IDS
    for queue_id in ids:
        total = xor(total, ids_hash([queue_id]))
    assert total.hex() == vector["hex"]


def test_nmsg_meta() -> None:
    plain, encrypted = vectors("nmsg_meta")
    meta = NmsgMeta(fixed("msgId"), inputs()["msgTs_seconds"])
    assert meta.encode().hex() == plain["hex"]
    assert decode_nmsg_meta(bytes.fromhex(plain["hex"])) == meta
    secret, nonce = bytes.fromhex(encrypted["dh_secret_hex"]), bytes.fromhex(encrypted["nonce_hex"])
    assert seal_nmsg_meta(secret, nonce, meta).hex() == encrypted["hex"]
    assert open_nmsg_meta(secret, nonce, bytes.fromhex(encrypted["hex"])) == meta


def pn_messages(count: int) -> list[PnMessage]:
    meta = bytes.fromhex(vectors("nmsg_meta")[1]["hex"])
    queues = [SmpQueueNtf(s, captured.NOTIFIER_ID) for s in (captured.LOCALHOST, captured.TWO_HOSTS)]
    nonces, at = (fixed("nonce"), fixed("nonce2")), inputs()["msgTs_seconds"]
    return [PnMessage(q, at, nonce, meta) for q, nonce in zip(queues, nonces, strict=True)][:count]


@pytest.mark.parametrize("vector", vectors("pn_messages"), ids=label)
def test_pn_messages(vector: Any) -> None:
    entries = pn_messages({"one": 1, "two": 2}[vector["name"]])
    assert encode_pn_messages(entries).decode() == vector["text"]
    assert decode_pn_messages(vector["text"].encode()) == entries


@pytest.mark.parametrize("vector", vectors("apns_payload"), ids=label)
def test_sealed_pushes(vector: Any) -> None:
    data = json.loads(vector["json"])["notificationData"]
    boxed = data.get("verification") or data.get("message")
    if boxed is None:
        assert data == {"checkMessages": True}
        return
    secret, nonce = bytes.fromhex(vector["token_dh_secret_hex"]), bytes.fromhex(vector["nonce_hex"])
    assert secret == x25519("ntfSrvX").exchange(x25519("tknX").public)
    plain = bytes.fromhex(vector["plaintext_hex"])
    assert unb64(data["nonce"].encode()) == nonce
    assert seal_push(secret, nonce, plain, vector["padded_len"]) == unb64(boxed.encode())
    assert open_push(secret, nonce, unb64(boxed.encode())) == plain


@pytest.mark.parametrize("vector", vectors("server_address"), ids=label)
def test_server_address(vector: Any) -> None:
    wire, text = bytes.fromhex(vector["hex"]), vector["text"]
    server = pull_smp_server(Reader(wire))
    if vector["name"].startswith("smp"):
        assert parse_smp_server(text) == server
        assert str(server) == text
    else:
        ntf = parse_ntf_server(text)
        assert ntf == NtfServer(server.hosts, server.port, server.key_hash)
        assert str(ntf) == text
    w = Writer()
    push_smp_server(w, server)
    assert w.value() == wire


@pytest.mark.parametrize("vector", vectors("smp_queue_ntf"), ids=label)
def test_smp_queue_ntf(vector: Any) -> None:
    server = captured.TWO_HOSTS if "two hosts" in vector["name"] else captured.LOCALHOST
    queue = SmpQueueNtf(server, captured.NOTIFIER_ID)
    if "text" in vector:
        assert queue.text.decode() == vector["text"]
        assert parse_smp_queue_ntf(vector["text"].encode()) == queue
        return
    w = Writer()
    push_smp_queue_ntf(w, queue)
    assert w.value().hex() == vector["hex"]
    assert pull_smp_queue_ntf(Reader(w.value())) == queue


@pytest.mark.parametrize("vector", vectors("push_provider"), ids=label)
def test_push_provider(vector: Any) -> None:
    provider = Provider[vector["text"].upper()]
    assert provider.value.hex() == vector["hex"]
    assert Provider(bytes.fromhex(vector["hex"])) is provider


@pytest.mark.parametrize("vector", vectors("service_role"), ids=label)
def test_service_role(vector: Any) -> None:
    role = ServiceRole[vector["name"].removeprefix("SR").upper()]
    assert role.value.hex() == vector["hex"]


@pytest.mark.parametrize("vector", vectors("int64") + vectors("system_time"), ids=label)
def test_numbers(vector: Any) -> None:
    number = int(vector.get("text") or vector["name"])
    w = Writer()
    w.push_int64(number)
    assert w.value().hex() == vector["hex"]
    assert Reader(w.value()).pull_int64() == number
