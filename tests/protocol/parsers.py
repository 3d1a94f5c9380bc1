"""Every parser under one signature: bytes in, a typed error or nothing. What was understood encodes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from protocol.addresses import (
    parse_ntf_server,
    parse_smp_queue_ntf,
    parse_smp_server,
    pull_smp_queue_ntf,
    push_smp_queue_ntf,
)
from protocol.blocks import pack_batches, pad, split_batch, unpad
from protocol.commands import Codec
from protocol.connection import Block, Failed, HandshakeDone, Received
from protocol.crypto import X25519PublicKey, decode_private_key, decode_public_key
from protocol.device_token import decode_device_token, encode_device_token
from protocol.encoding import Reader, Writer, b64, split_three_shorts, unb64
from protocol.error_codec import decode_error
from protocol.errors import DecodeError, HandshakeError
from protocol.ntf_commands import NTF_COMMANDS, NTF_RESPONSES
from protocol.push_messages import (
    decode_nmsg_meta,
    decode_pn_messages,
    encode_pn_messages,
    open_nmsg_meta,
    open_push,
)
from protocol.session_params import SessionParams, ntf_params, smp_params
from protocol.signed_key import certificate_key, open_signed_key
from protocol.smp_codec import SMP_COMMANDS, SMP_MESSAGES
from protocol.transmission import body, encode_transmission, parse_transmission
from protocol.versions import SMP_BLOCK_SIZE
from tests import twins
from tests.builders import fixed, server_chain, service_login, x25519

Parser = Callable[[bytes], object]
TYPED = (DecodeError, HandshakeError)


def understood(parse: Parser, data: bytes) -> bool:
    """Any exception of another kind gets out, and fails the test."""
    try:
        parse(data)
    except TYPED:
        return False
    return True


def message_parser(codec: Codec[Any], version: int) -> Parser:
    def parse(data: bytes) -> None:
        message = codec.decode(data, version)
        wire = codec.encode(message, version)
        assert codec.encode(codec.decode(wire, version), version) == wire

    return parse


def transmission_parser(params: SessionParams) -> Parser:
    def parse(data: bytes) -> None:
        raw = parse_transmission(params, data)
        content = body(raw.corr_id, raw.entity_id, raw.command)
        again = encode_transmission(params, raw.auth, raw.service_signature, content)
        assert params.implied_session_id is False or again == data
        assert raw.signed.endswith(content) or not raw.auth

    return parse


def connection_parser(make: Callable[[], Any], *, wrap: bool) -> Parser:
    """A whole connection. With `wrap` the bytes are the content of a block, else they are the stream."""

    def parse(data: bytes) -> None:
        connection = make()
        size = connection._block_size
        stream = pad(data[: size - 2], size) if wrap else data
        for event in connection.receive_data(stream):
            assert isinstance(event, HandshakeDone | Block | Failed)
            if isinstance(event, Block):
                assert all(isinstance(item, Received) or item.error.text for item in event.items)

    return parse


def awaiting_service() -> Any:
    """A client that has sent its service's certificate and waits for the answer."""
    both = twins.smp_twins(service=service_login())
    both.to_client(both.server.data_to_send())
    return both.client


def _reencoded(decode: Callable[[bytes], Any], encode: Callable[[Any], bytes]) -> Parser:
    def parse(data: bytes) -> None:
        value = decode(data)
        assert decode(encode(value)) == value

    return parse


def _queue_bytes(queue: Any) -> bytes:
    w = Writer()
    push_smp_queue_ntf(w, queue)
    return w.value()


def _pull_queue(data: bytes) -> Any:
    r = Reader(data)
    queue = pull_smp_queue_ntf(r)
    r.check_end()
    assert parse_smp_queue_ntf(queue.text) == queue
    return queue


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _messages() -> Iterator[tuple[str, Parser]]:
    for version in range(1, 4):
        yield f"NTF command v{version}", message_parser(NTF_COMMANDS, version)
        yield f"NTF response v{version}", message_parser(NTF_RESPONSES, version)
    for version in range(6, 21):
        yield f"SMP command v{version}", message_parser(SMP_COMMANDS, version)
        yield f"SMP message v{version}", message_parser(SMP_MESSAGES, version)


def _sessions() -> Iterator[tuple[str, Parser]]:
    session_id = fixed("sessionId")
    for version in (1, 2):
        yield f"NTF transmission v{version}", transmission_parser(ntf_params(version, session_id))
    for version in (6, 7, 16):
        yield f"SMP transmission v{version}", transmission_parser(smp_params(version, session_id))
    hellos: dict[str, Callable[[], Any]] = {
        "NTF server hello": lambda: twins.ntf_twins().client,
        "NTF client hello": lambda: twins.ntf_twins().server,
        "SMP router hello": lambda: twins.smp_twins(session_key=x25519("clientX")).client,
        "SMP client hello": lambda: twins.smp_twins(service=service_login()).server,
        "SMP service answer": awaiting_service,
    }
    for name, make in hellos.items():
        yield name, connection_parser(make, wrap=True)
        yield f"{name}, stream", connection_parser(make, wrap=False)
    yield "NTF commands", connection_parser(lambda: twins.ntf_twins().shake().server, wrap=True)
    yield "SMP commands", connection_parser(lambda: twins.smp_twins().shake().server, wrap=True)
    yield "SMP messages", connection_parser(lambda: twins.smp_twins().shake().client, wrap=True)
    encrypted = x25519("clientX")
    yield (
        "encrypted stream",
        connection_parser(lambda: twins.smp_twins(session_key=encrypted).shake().client, wrap=False),
    )


def _values() -> Iterator[tuple[str, Parser]]:
    secret, nonce = bytes(32), bytes(24)
    yield "batch", _reencoded(split_batch, lambda items: pack_batches(items, 1 << 20)[0])
    yield "padding", _reencoded(unpad, lambda content: pad(content, SMP_BLOCK_SIZE * 8))
    yield "device token", _reencoded(decode_device_token, encode_device_token)
    yield "public key", _reencoded(decode_public_key, lambda key: bytes(key.der))
    yield "private key", _reencoded(decode_private_key, lambda key: bytes(key.der))
    yield "queue", _reencoded(_pull_queue, _queue_bytes)
    yield "queue text", _reencoded(parse_smp_queue_ntf, lambda queue: bytes(queue.text))
    yield "SMP address", _reencoded(lambda data: parse_smp_server(_text(data)), lambda s: str(s).encode())
    yield "NTF address", _reencoded(lambda data: parse_ntf_server(_text(data)), lambda s: str(s).encode())
    yield "push messages", _reencoded(decode_pn_messages, encode_pn_messages)
    yield "NMSG meta", _reencoded(decode_nmsg_meta, lambda meta: bytes(meta.encode()))
    yield "error", _reencoded(decode_error, lambda error: bytes(error.text))
    yield "base64", _reencoded(unb64, b64)
    yield "three shorts", lambda data: split_three_shorts(data)
    yield "signed key", lambda data: open_signed_key(server_chain()[0], data, X25519PublicKey)
    yield "certificate", lambda data: certificate_key(data)
    yield "push", lambda data: open_push(secret, nonce, data)
    yield "boxed meta", lambda data: open_nmsg_meta(secret, nonce, data)


PARSERS: dict[str, Parser] = dict([*_messages(), *_sessions(), *_values()])
