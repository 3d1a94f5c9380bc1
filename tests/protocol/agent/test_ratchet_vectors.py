"""Conversations of the deployed implementation: ours makes the same bytes and ends in the same state."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.agent.aead import open_sealed, seal
from protocol.agent.e2e_params import E2E_PARAMS
from protocol.agent.errors import NoSendingChain, RatchetError
from protocol.agent.kem import decapsulate, encapsulate, new_kem_pair
from protocol.agent.ratchet_header import Header, decode_header, encode_header
from protocol.agent.x3dh import agree_as_creator, agree_as_joiner, joiner_params
from protocol.encoding import Reader
from tests.protocol.agent.captured import (
    Script,
    creator_keys,
    joiner_keys,
    kem_params,
    label,
    public,
    ratchet_kem,
    raw,
    state,
    vectors,
)
from tests.protocol.agent.conversation import Party, outcome, parties


@pytest.mark.parametrize("vector", vectors("aead"), ids=label)
def test_aead(vector: Any) -> None:
    key, iv, associated, plaintext, tag, body = (
        raw(vector[name]) for name in ("key", "iv", "associated_data", "plaintext", "tag", "body")
    )
    assert seal(key, iv, associated, plaintext, vector["padded"]) == (tag, body)
    assert open_sealed(key, iv, associated, tag, body) == plaintext


@pytest.mark.parametrize("vector", vectors("sntrup761"), ids=label)
def test_sntrup761(vector: Any) -> None:
    secret = raw(vector["secret"])
    assert decapsulate(secret, raw(vector["ciphertext"])).hex() == vector["shared"]
    assert decapsulate(secret, raw(vector["bad_ciphertext"])).hex() == vector["bad_shared"]
    made = encapsulate(raw(vector["public"]))
    assert decapsulate(secret, made.ciphertext) == made.shared


def test_a_new_kem_pair_works() -> None:
    own = new_kem_pair()
    made = encapsulate(own.public)
    assert decapsulate(own.secret, made.ciphertext) == made.shared


@pytest.mark.parametrize("vector", vectors("x3dh") + vectors("ratchet_conversation"), ids=label)
def test_x3dh(vector: Any) -> None:
    theirs, ours = (E2E_PARAMS.pull(Reader(raw(vector[name]))) for name in ("a_params", "b_params"))
    joiner, kem = joiner_keys(vector), ratchet_kem(vector["b_initial"]["kem"])
    assert joiner_params(joiner, kem, vector["version"]) == ours
    expected = tuple(raw(vector[n]) for n in ("associated_data", "header_key", "next_header_key", "root_key"))
    for agreed in (agree_as_joiner(joiner, kem, theirs), agree_as_creator(creator_keys(vector), ours)):
        found = (agreed.associated_data, agreed.header_key, agreed.next_header_key, agreed.root_key)
        assert found == expected
        assert vector["kem_secret_used"] == (agreed.kem is not None and agreed.kem.accepted is not None)
    both = parties(vector)
    assert state(both["a"].ratchet) == vector["a_initial"]
    assert state(both["b"].ratchet) == vector["b_initial"]


@pytest.mark.parametrize("vector", vectors("ratchet_header"), ids=label)
def test_header(vector: Any) -> None:
    header = Header(
        vector["max_version"], public(vector["dh"]), kem_params(vector["kem"]), vector["pn"], vector["n"]
    )
    assert encode_header(header, vector["current_version"]).hex() == vector["binary"]
    assert decode_header(raw(vector["binary"]), vector["current_version"]) == header


@pytest.mark.parametrize("vector", vectors("ratchet_conversation"), ids=label)
def test_conversation(vector: Any) -> None:
    both, sent = parties(vector), dict[int, bytes]()
    for op in vector["ops"]:
        party = both[op["by"]]
        {"encrypt": _encrypt, "encrypt_lost": _encrypt_lost, "decrypt": _decrypt}[op["op"]](party, op, sent)
        assert party.counters() == op.get("after", party.counters())
    assert state(both["a"].ratchet) == vector["a_final"]
    assert state(both["b"].ratchet) == vector["b_final"]


def _encrypt(party: Party, op: Any, sent: dict[int, bytes]) -> None:
    pq = {"on": True, "off": False, None: None}[op["pq"]]
    if op["result"] != "ok":
        with pytest.raises(NoSendingChain):
            party.encrypt(b"early", 100, party.ratchet.max_version, pq)
        return
    message = party.encrypt(raw(op["plaintext"]), op["padded"], op["own_max_version"], pq)
    assert message.hex() == op["message"]
    sent[op["id"]] = message


def _encrypt_lost(party: Party, op: Any, sent: dict[int, bytes]) -> None:
    for _ in range(op["count"]):
        party.encrypt(b"lost", 100, op.get("own_max_version", party.ratchet.max_version))


def _decrypt(party: Party, op: Any, sent: dict[int, bytes]) -> None:
    message = raw(op["message"]) if op.get("tampered") else sent[op["id"]]
    fresh = Script(op.get("new_dh_private"), op.get("new_kem"))
    before = party.ratchet
    if op["result"] != "ok":
        with pytest.raises(RatchetError) as caught:
            party.decrypt(message, fresh)
        assert outcome(caught.value) == op["result"]
        assert op["state_changed"] or party.ratchet == before
        return
    assert party.decrypt(message, fresh).hex() == op["plaintext"]
    assert op["advanced"] == (party.ratchet.dh != before.dh)
