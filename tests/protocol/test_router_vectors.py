"""Routers, proxies and their clients: ours write the captured bytes and read them as the other side does."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import pytest

from protocol.blocks import pack_batches, split_batch
from protocol.commands import check_credentials
from protocol.crypto import X25519PublicKey
from protocol.encoding import CorrId, EntityId, Reader, short
from protocol.errors import DecodeError
from protocol.link_crypto import sender_id_of
from protocol.messages_crypto import (
    PADDED_SIZE,
    QuotaExceeded,
    RcvMessage,
    max_message_length,
    open_message,
    seal_message,
)
from protocol.proxy import (
    PROXIED_PADDED,
    ClientLayer,
    Forwarded,
    ForwardedAnswer,
    open_forwarded,
    open_forwarded_answer,
    seal_forwarded,
    seal_forwarded_answer,
)
from protocol.session_params import SessionParams, smp_params
from protocol.signed_key import open_signed_key
from protocol.smp_codec import SMP_COMMANDS, SMP_MESSAGES
from protocol.smp_messages import Err, Pfwd, Pkey, Pres, Rfwd, Rres
from protocol.transmission import (
    RawTransmission,
    authorize,
    body,
    encode_transmission,
    parse_transmission,
    verify,
)
from protocol.versions import SMP_BLOCK_SIZE
from tests.protocol import router_vectors as captured
from tests.protocol.router_vectors import dh, dh_private, inputs, label, private, public, vectors
from transport.errors import TransportError
from transport.identity import check_chain

NEWEST = 19
PROXY_STEPS = 9


def _hex(text: str) -> bytes:
    return bytes.fromhex(text)


def test_no_group_is_forgotten() -> None:
    assert captured.groups() == {
        "smp_command",
        "smp_response",
        "smp_error",
        "smp_transmission",
        "recipient_auth",
        "sender_id_from_corr_id",
        "msg_layer",
        "body_limit",
        "smp_proxy",
        "pkey_check",
        "command_decode",
        "response_decode",
        "command_credentials",
    }


@pytest.mark.parametrize("vector", vectors("smp_command"), ids=label)
def test_command(vector: Any) -> None:
    wire, version = _hex(vector["hex"]), vector["version"]
    assert SMP_COMMANDS.encode(captured.command(vector), version) == wire
    seen = SMP_COMMANDS.encode(SMP_COMMANDS.decode(wire, version), NEWEST)
    assert seen == _hex(vector.get("decoded_v19") or "") or "decoded_v19" not in vector
    assert SMP_COMMANDS.encode(SMP_COMMANDS.decode(wire, version), version) == wire


@pytest.mark.parametrize("vector", vectors("smp_response"), ids=label)
def test_response(vector: Any) -> None:
    wire, version = _hex(vector["hex"]), vector["version"]
    message = captured.response(vector)
    read = SMP_MESSAGES.decode(wire, version)
    assert SMP_MESSAGES.encode(read if message is None else message, version) == wire
    assert SMP_MESSAGES.encode(read, version) == wire
    if "decoded_v19" in vector:
        assert SMP_MESSAGES.encode(read, NEWEST) == _hex(vector["decoded_v19"])


@pytest.mark.parametrize("vector", vectors("smp_error"), ids=label)
def test_error(vector: Any) -> None:
    wire, version = _hex(vector["hex"]), vector["version"]
    read = SMP_MESSAGES.decode(wire, version)
    assert isinstance(read, Err)
    assert SMP_MESSAGES.encode(read, version) == wire
    if "(" not in vector["name"] and not vector["name"].startswith("ERR PROXY BROKER"):
        meant = SMP_MESSAGES.decode(vector["name"].encode(), NEWEST)
        assert SMP_MESSAGES.encode(meant, version) == wire


@pytest.mark.parametrize("vector", vectors("response_decode"), ids=label)
def test_reading_answers(vector: Any) -> None:
    wire = _hex(vector["hex"])
    if not vector["accepted"]:
        with pytest.raises(DecodeError):
            SMP_MESSAGES.decode(wire, NEWEST)
        return
    assert SMP_MESSAGES.encode(SMP_MESSAGES.decode(wire, NEWEST), NEWEST) == _hex(vector["reencoded"])


@pytest.mark.parametrize("vector", vectors("command_decode"), ids=label)
def test_reading_commands(vector: Any) -> None:
    wire = _hex(vector["hex"])
    if vector["error"] is None:
        assert SMP_COMMANDS.encode(SMP_COMMANDS.decode(wire, NEWEST), NEWEST) == _hex(vector["reencoded"])
        return
    with pytest.raises(DecodeError) as refused:
        SMP_COMMANDS.decode(wire, NEWEST)
    assert str(refused.value.error) == vector["error"]


@pytest.mark.parametrize("vector", vectors("command_credentials"), ids=label)
def test_credentials(vector: Any) -> None:
    rule = SMP_COMMANDS.credentials(SMP_COMMANDS.decode(_hex(vector["hex"]), vector["version"]))
    auth, entity = b"a" * vector["has_auth"], EntityId(b"e" * vector["has_entity"])
    error = check_credentials(rule, auth, entity)
    assert (None if error is None else str(error)) == vector["error"]


def _params(vector: Any, *, router: bool) -> SessionParams:
    key = dh_private(vector["server_key"])
    return smp_params(
        vector["version"],
        _hex(vector.get("session_id", inputs()["session_id"])),
        own_session_key=key if router else None,
        peer_session_key=None if router else key.public,
    )


@pytest.mark.parametrize("vector", vectors("smp_transmission"), ids=label)
def test_transmission(vector: Any) -> None:
    client, router = _params(vector, router=False), _params(vector, router=True)
    corr_id, entity_id = CorrId(_hex(vector["correlation_id"])), EntityId(_hex(vector["entity_id"]))
    command = SMP_COMMANDS.encode(captured.command(vector), vector["version"])
    content = body(corr_id, entity_id, command)
    signed = short(client.session_id) + content
    assert signed == _hex(vector["authorized"])
    key = None if vector["key"] is None else private(vector["key"])
    auth = b"" if key is None else authorize(client, key, corr_id, signed)
    assert auth == _hex(vector["auth"])
    (packed,) = pack_batches([encode_transmission(client, auth, None, content)], SMP_BLOCK_SIZE)
    assert packed == _hex(vector["hex"])
    (transmission,) = split_batch(packed)
    raw = parse_transmission(router, transmission)
    assert (raw.corr_id, raw.entity_id, raw.command, raw.fault) == (corr_id, entity_id, command, None)
    assert key is None or verify(router, key.public, raw)


@pytest.mark.parametrize("vector", vectors("recipient_auth"), ids=label)
def test_a_queue_of_several_recipients(vector: Any) -> None:
    raw = RawTransmission(
        _hex(vector["hex"]),
        None,
        CorrId(_hex(vector["correlation_id"])),
        EntityId(b""),
        b"",
        _hex(vector["authorized"]),
    )
    router = _params(vector, router=True)
    accepted = [name for name in vector["queue_keys"] if verify(router, public(name), raw)]
    assert accepted == vector["accepted_by"]
    assert bool(accepted) == vector["accepted"]


@pytest.mark.parametrize("vector", vectors("sender_id_from_corr_id"), ids=label)
def test_sender_id(vector: Any) -> None:
    assert sender_id_of(CorrId(_hex(vector["correlation_id"]))).hex() == vector["hex"]


@pytest.mark.parametrize("vector", vectors("msg_layer"), ids=label)
def test_message_layer(vector: Any) -> None:
    secret = dh_private(vector["srv_private"]).exchange(dh(vector["rcv_public"]))
    assert secret.hex() == vector["dh_secret"]
    message_id = _hex(vector["msg_id"])
    message: RcvMessage | QuotaExceeded = QuotaExceeded(vector["timestamp"])
    if not vector["quota"]:
        message = RcvMessage(vector["timestamp"], vector["flags_notification"], _hex(vector["body"]))
    assert message.encode() == _hex(vector["plaintext"])
    sealed = seal_message(secret, message_id, message)
    assert b"MSG " + short(message_id) + sealed == _hex(vector["hex"])
    assert (len(sealed), PADDED_SIZE) == (vector["encrypted_length"], vector["padded_length"])
    assert open_message(secret, message_id, sealed) == message


@pytest.mark.parametrize("vector", vectors("body_limit"), ids=label)
def test_body_limit(vector: Any) -> None:
    assert max_message_length(vector["version"]) == vector["max_body"]


def _proxy_case(number: int) -> dict[int, Any]:
    steps = [vector for vector in vectors("smp_proxy") if vector["case"] == number]
    return {int(vector["step"].split()[0]): vector for vector in steps}


CASES = sorted({vector["case"] for vector in vectors("smp_proxy")})


def test_every_step_of_the_proxy_occurs() -> None:
    steps = {step for case in CASES for step in _proxy_case(case)}
    assert steps == set(range(1, PROXY_STEPS + 1))


def _layer(step: Any) -> ClientLayer:
    """Of step 2 or 7: the nonce of the answer is that of the command in reverse."""
    number = _hex(step["nonce"])
    corr_id = number if step["step"].startswith("2") else number[::-1]
    return ClientLayer(_hex(step["dh_secret"]), CorrId(corr_id))


@pytest.mark.parametrize("case", CASES)
def test_proxied_command(case: int) -> None:
    steps = _proxy_case(case)
    if 2 in steps:
        sealed = _hex(steps[2]["hex"])
        layer = ClientLayer.agree(dh_private("cmdX"), dh("relaySessX"), _layer(steps[2]).corr_id)
        assert layer == _layer(steps[2])
        assert layer.seal_command(_hex(steps[2]["plaintext"])) == sealed
        assert layer.open_command(sealed) == _hex(steps[2]["plaintext"])
        assert steps[2]["padded_length"] == PROXIED_PADDED
        if 1 in steps:
            assert steps[1]["hex"] == steps[2]["plaintext"]
    if 3 in steps:
        (transmission,) = split_batch(_hex(steps[3]["hex"]))
        raw = parse_transmission(smp_params(NEWEST, b""), transmission)
        forward = SMP_COMMANDS.decode(raw.command, steps[3]["version"])
        assert isinstance(forward, Pfwd)
        assert (forward.version, forward.key) == (steps[3]["fwd_version"], dh(steps[3]["key_public"]))
        assert raw.entity_id == _hex(steps[3]["entity_id"])
        assert forward.body == _hex(steps[2]["hex"])
    if 5 in steps:
        secret, corr_id = _hex(steps[5]["dh_secret"]), CorrId(_hex(steps[5]["correlation_id"]))
        assert secret == dh_private(steps[5]["private"]).exchange(dh(steps[5]["public"]))
        relayed = _rfwd(steps[5])
        opened = open_forwarded(secret, corr_id, relayed.body)
        assert seal_forwarded(secret, corr_id, opened) == relayed.body
        if 4 in steps:
            assert _plain(opened) == _hex(steps[4]["hex"])
        assert sha256(_plain(opened)).hexdigest() == steps[5]["plaintext_sha256"]


def _rfwd(step: Any) -> Rfwd:
    (transmission,) = split_batch(_hex(step["hex"]))
    command = SMP_COMMANDS.decode(parse_transmission(smp_params(NEWEST, b""), transmission).command, NEWEST)
    assert isinstance(command, Rfwd)
    return command


def _plain(forwarded: Forwarded) -> bytes:
    version = forwarded.version.to_bytes(2, "big")
    return short(forwarded.corr_id) + version + short(forwarded.key.der) + forwarded.body


@pytest.mark.parametrize("case", CASES)
def test_proxied_answer(case: int) -> None:
    steps = _proxy_case(case)
    if 7 in steps:
        sealed, layer = _hex(steps[7]["hex"]), _layer(steps[7])
        assert layer.seal_answer(_hex(steps[7]["plaintext"])) == sealed
        assert layer.open_answer(sealed) == _hex(steps[7]["plaintext"])
        if 6 in steps:
            assert steps[6]["hex"] == steps[7]["plaintext"]
    if 8 in steps:
        (transmission,) = split_batch(_hex(steps[8]["hex"]))
        raw = parse_transmission(smp_params(NEWEST, b""), transmission)
        answer = SMP_MESSAGES.decode(raw.command, NEWEST)
        assert isinstance(answer, Rres)
        secret = _hex(steps[8]["dh_secret"])
        opened = open_forwarded_answer(secret, raw.corr_id, answer.body)
        assert seal_forwarded_answer(secret, raw.corr_id, opened) == answer.body
        plain = short(opened.corr_id) + opened.body
        assert (len(plain), sha256(plain).hexdigest()) == (
            steps[8]["plaintext_length"],
            steps[8]["plaintext_sha256"],
        )
        assert 7 not in steps or opened == ForwardedAnswer(_layer(steps[7]).corr_id, _hex(steps[7]["hex"]))
    if 9 in steps:
        (transmission,) = split_batch(_hex(steps[9]["hex"]))
        raw = parse_transmission(smp_params(NEWEST, b""), transmission)
        assert SMP_MESSAGES.decode(raw.command, NEWEST) == Pres(_hex(steps[7]["hex"]))


@pytest.mark.parametrize("vector", vectors("pkey_check"), ids=label)
def test_proof_of_the_destination(vector: Any) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    pkey = SMP_MESSAGES.decode(_hex(vector["hex"]), NEWEST)
    assert isinstance(pkey, Pkey)
    assert pkey.session_id == _hex(vector["session_id"])
    assert [pkey.versions.min, pkey.versions.max] == vector["versions"]
    try:
        check_chain(pkey.chain, _hex(vector["relay_fingerprint"]), now)
        key = open_signed_key(pkey.chain[0], pkey.signed_key, X25519PublicKey)
    except (TransportError, DecodeError):
        assert not vector["accepted"]
        return
    assert vector["accepted"]
    assert key.raw.hex() == vector["relay_key"]


def test_information_of_queues_is_json() -> None:
    infos = [vector for vector in vectors("smp_response") if vector["name"].startswith("INFO")]
    for vector in infos:
        r = Reader(_hex(vector["hex"]))
        r.pull_word()
        assert json.loads(r.pull_tail()) == vector["fields"]["json"]
