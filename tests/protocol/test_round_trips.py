"""Whatever is encoded decodes to what a peer of that version may see, at every version."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.addresses import (
    SmpQueueNtf,
    SmpServer,
    parse_smp_queue_ntf,
    parse_smp_server,
    pull_smp_server,
    push_smp_server,
)
from protocol.blocks import MAX_BATCH, BlockChain, pack_batches, pad, session_chains, split_batch, unpad
from protocol.connection import Block, Outgoing
from protocol.crypto import decode_private_key, decode_public_key
from protocol.device_token import DeviceToken, decode_device_token, encode_device_token
from protocol.encoding import CorrId, EntityId, Reader, Writer, b64, unb64
from protocol.error_codec import decode_error
from protocol.errors import ErrorType, TooLarge
from protocol.ids_hash import ids_hash, xor
from protocol.ntf_commands import NTF_COMMANDS, NTF_RESPONSES, NtfCommand, NtfResponse
from protocol.push_messages import PnMessage, decode_pn_messages, encode_pn_messages
from protocol.smp_codec import SMP_COMMANDS, SMP_MESSAGES
from protocol.smp_messages import SmpCommand, SmpMessage
from protocol.versions import NTF_BLOCK_SIZE, SMP_BLOCK_SIZE, VersionRange
from tests import twins
from tests.builders import x25519
from tests.protocol import strategies as some
from tests.protocol.seen import ntf_seen, smp_seen


@given(some.ntf_commands, some.ntf_versions)
def test_ntf_commands(command: NtfCommand, version: int) -> None:
    assert NTF_COMMANDS.decode(NTF_COMMANDS.encode(command, version), version) == command


@given(some.ntf_responses, some.ntf_versions)
def test_ntf_responses(response: NtfResponse, version: int) -> None:
    wire = NTF_RESPONSES.encode(response, version)
    assert NTF_RESPONSES.decode(wire, version) == ntf_seen(response, version)


@given(some.smp_commands, some.smp_versions)
def test_smp_commands(command: SmpCommand, version: int) -> None:
    assert SMP_COMMANDS.decode(SMP_COMMANDS.encode(command, version), version) == smp_seen(command, version)


@given(some.smp_messages, some.smp_versions)
def test_smp_messages(message: SmpMessage, version: int) -> None:
    assert SMP_MESSAGES.decode(SMP_MESSAGES.encode(message, version), version) == smp_seen(message, version)


@given(st.lists(st.tuples(some.corr_ids, some.entity_ids, some.smp_messages), min_size=1, max_size=20))
@settings(max_examples=30)
def test_blocks_of_messages(batch: list[tuple[CorrId, EntityId, SmpMessage]]) -> None:
    both = twins.smp_twins(session_key=x25519("clientX")).shake()
    sent = [Outgoing(*parts) for parts in batch]
    events = both.client.receive_data(both.server.send(sent))
    items = [item for event in events if isinstance(event, Block) for item in event.items]
    assert [(item.corr_id, item.entity_id, item.message) for item in items] == [  # type: ignore[union-attr]
        (corr_id, entity_id, smp_seen(message, 19)) for corr_id, entity_id, message in batch
    ]


@given(some.device_tokens)
def test_device_tokens(token: DeviceToken) -> None:
    assert decode_device_token(encode_device_token(token)) == token


@given(some.public_keys, some.private_keys)
def test_keys(public: Any, private: Any) -> None:
    assert decode_public_key(public.der) == public
    assert decode_private_key(private.der) == private


@given(some.smp_servers)
def test_servers(server: SmpServer) -> None:
    w = Writer()
    push_smp_server(w, server)
    assert pull_smp_server(Reader(w.value())) == server
    assert parse_smp_server(str(server)) == server


@given(some.queues)
def test_queues(queue: SmpQueueNtf) -> None:
    assert parse_smp_queue_ntf(queue.text) == queue


@given(st.lists(some.pn_messages, min_size=1, max_size=5))
def test_push_messages(entries: list[PnMessage]) -> None:
    assert decode_pn_messages(encode_pn_messages(entries)) == entries


@given(some.errors)
def test_errors(error: ErrorType) -> None:
    assert decode_error(error.text) == error


@given(st.binary(max_size=100))
def test_base64(data: bytes) -> None:
    assert unb64(b64(data)) == unb64(b64(data).rstrip(b"=")) == data


@given(st.binary(max_size=600), st.sampled_from([NTF_BLOCK_SIZE, 3072]))
def test_padding(message: bytes, size: int) -> None:
    try:
        padded = pad(message, size)
    except TooLarge:
        assert len(message) > size - 2
        return
    assert len(padded) == size
    assert unpad(padded) == message
    assert set(padded[2 + len(message) :]) <= {ord("#")}


@given(st.lists(st.binary(max_size=509), max_size=600))
@settings(max_examples=30)
def test_batches(transmissions: list[bytes]) -> None:
    contents = pack_batches(transmissions, NTF_BLOCK_SIZE)
    batches = [split_batch(content) for content in contents]
    assert [t for batch in batches for t in batch] == transmissions
    for content, batch in zip(contents, batches, strict=True):
        assert len(batch) <= MAX_BATCH
        assert len(content) <= NTF_BLOCK_SIZE - 2 - (16 if len(batch) > 1 else 0)


def test_a_batch_holds_at_most_255() -> None:
    counts = [content[0] for content in pack_batches([b""] * 600, SMP_BLOCK_SIZE)]
    assert counts == [255, 255, 90]


@given(some.raw32, some.raw32, st.lists(st.binary(max_size=200), max_size=4))
@settings(max_examples=20)
def test_block_chains(session_id: bytes, secret: bytes, contents: list[bytes]) -> None:
    ours, _ = session_chains(session_id, secret)
    theirs, other = session_chains(session_id, secret)
    assert isinstance(other, BlockChain)
    for content in contents:
        assert theirs.decrypt(ours.encrypt(content, SMP_BLOCK_SIZE)) == content


@given(st.sets(st.binary(max_size=24)), st.sets(st.binary(max_size=24)))
def test_ids_hash_adds_and_removes(a: set[bytes], b: set[bytes]) -> None:
    assert xor(ids_hash(a), ids_hash(b)) == ids_hash(a ^ b)


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 9), st.integers(0, 9))
def test_common_version(a_min: int, a_more: int, b_min: int, b_more: int) -> None:
    a, b = VersionRange(a_min, a_min + a_more), VersionRange(b_min, b_min + b_more)
    shared = [version for version in range(1, 30) if version in a and version in b]
    assert a.common(b) == (max(shared) if shared else None)
