"""The connection machine of both protocols and both sides: bytes in, events out; batches in, bytes out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from protocol.blocks import PAD_LENGTH_SIZE, BlockChain, pack_batches, pad, split_batch, unpad
from protocol.commands import Codec, check_credentials
from protocol.crypto import TAG_SIZE, AuthPrivateKey
from protocol.encoding import NO_CORR, NO_ENTITY, CorrId, EntityId, new_tuple, short
from protocol.errors import (
    BLOCK,
    TE_BLOCK,
    DecodeError,
    ErrorType,
    HandshakeError,
    HandshakeErrorType,
    TooLarge,
)
from protocol.handshake import Handshake, HandshakeRefused
from protocol.session_params import SessionParams
from protocol.transmission import RawTransmission, authorize, body, encode_transmission, parse_transmission

In = TypeVar("In")
Out = TypeVar("Out")
Message = TypeVar("Message", covariant=True)


class Received(NamedTuple, Generic[Message]):
    """A transmission whose command was understood. `raw` holds what its authorisation covers."""

    corr_id: CorrId
    entity_id: EntityId
    message: Message
    raw: RawTransmission

    def __repr__(self) -> str:
        return f"Received({self.message!r})"


class Rejected(NamedTuple):
    """A transmission that was not; a server answers `error`, with these ids."""

    corr_id: CorrId
    entity_id: EntityId
    error: ErrorType

    def __repr__(self) -> str:
        return f"Rejected({self.error})"


class Outgoing(NamedTuple, Generic[Message]):
    """What to send. A client's command also has the key that authorises it."""

    corr_id: CorrId
    entity_id: EntityId
    message: Message
    key: AuthPrivateKey | None = None
    with_service: bool = False
    "Also sign with the service's session key and bind the entity key's signature to the service."

    def __repr__(self) -> str:
        return f"Outgoing({self.message!r})"


@dataclass(frozen=True, slots=True)
class HandshakeDone:
    params: SessionParams


class Block(NamedTuple, Generic[Message]):
    """The transmissions of one block, in order."""

    items: Sequence[Received[Message] | Rejected]


@dataclass(frozen=True, slots=True)
class Failed:
    """The connection must end: the peer broke the protocol below the level of transmissions."""

    error: HandshakeErrorType


def read_item(
    params: SessionParams, data: bytes, codec: Codec[In], *, checks_credentials: bool
) -> Received[In] | Rejected:
    """One transmission of a block."""
    try:
        raw = parse_transmission(params, data)
    except DecodeError:
        return Rejected(NO_CORR, NO_ENTITY, BLOCK)
    auth, _, corr_id, entity_id, command, _, error = raw
    if error is None:
        try:
            message = codec.decode(command, params.version)
        except DecodeError as problem:
            return Rejected(corr_id, entity_id, problem.error)
        if checks_credentials:
            error = check_credentials(codec.credentials(message), auth, entity_id)
        if error is None:
            return new_tuple(Received, (corr_id, entity_id, message, raw))
    return Rejected(corr_id, entity_id, error)


def write_item(params: SessionParams, outgoing: Outgoing[Out], codec: Codec[Out]) -> bytes:
    """The twin of `read_item`."""
    corr_id, entity_id, message, key, with_service = outgoing
    content = body(corr_id, entity_id, codec.encode(message, params.version))
    if key is None:
        return encode_transmission(params, b"", None, content)
    text = short(params.session_id) + content
    service = params.service if with_service else None
    if service is None or service.private_key is None:
        return encode_transmission(params, authorize(params, key, corr_id, text), None, content)
    auth = authorize(params, key, corr_id, service.fingerprint + text)
    return encode_transmission(params, auth, service.private_key.sign(text), content)


class Connection(Generic[In, Out]):
    """Feed it what the stream received; send what `data_to_send` returns.

    `codec_in` reads the peer's words, `codec_out` writes ours. A server (`checks_credentials`) also refuses
    commands that come without what they need, so that handlers see only well-formed requests. With
    `answers_bad_batches` it answers a block whose count does not match its contents, and does not end.
    """

    __slots__ = (
        "_answers_bad_batches",
        "_block_size",
        "_buffer",
        "_checks_credentials",
        "_codec_in",
        "_codec_out",
        "_failed",
        "_handshake",
        "_outbox",
        "_receiving",
        "_sending",
        "params",
    )

    def __init__(
        self,
        handshake: Handshake,
        codec_in: Codec[In],
        codec_out: Codec[Out],
        *,
        checks_credentials: bool,
        answers_bad_batches: bool = False,
    ) -> None:
        self._handshake: Handshake | None = handshake
        self._codec_in = codec_in
        self._codec_out = codec_out
        self._checks_credentials = checks_credentials
        self._answers_bad_batches = answers_bad_batches
        self._block_size = handshake.block_size
        self._buffer = b""
        self._outbox: list[bytes] = []
        self._sending: BlockChain | None = None
        self._receiving: BlockChain | None = None
        self._failed = False
        self.params: SessionParams | None = None
        hello = handshake.start()
        if hello is not None:
            self._outbox.append(pad(hello, self._block_size))

    def data_to_send(self) -> bytes:
        data = b"".join(self._outbox)
        self._outbox.clear()
        return data

    def receive_data(self, data: bytes) -> list[HandshakeDone | Block[In] | Failed]:
        events: list[HandshakeDone | Block[In] | Failed] = []
        buffer = self._buffer + data if self._buffer else data
        start, size = 0, self._block_size
        while len(buffer) - start >= size and not self._failed:
            event = self._receive_block(buffer[start : start + size])
            start += size
            if event is not None:
                events.append(event)
        self._buffer = b"" if self._failed else buffer[start:]
        return events

    def _receive_block(self, block: bytes) -> HandshakeDone | Block[In] | Failed | None:
        try:
            if self.params is None:
                return self._shake(unpad(block))
            content = unpad(block) if self._receiving is None else self._receiving.decrypt(block)
            return Block(self._items(content, self.params))
        except HandshakeError as error:
            self._failed = True
            return Failed(error.error)
        except DecodeError:
            self._failed = True
            return Failed(TE_BLOCK)

    def _shake(self, content: bytes) -> HandshakeDone | None:
        assert self._handshake is not None
        try:
            step = self._handshake.receive(content)
        except HandshakeRefused as refused:
            self._outbox.append(pad(refused.reply, self._block_size))
            raise
        if step.reply is not None:
            self._outbox.append(pad(step.reply, self._block_size))
        if step.agreed is None:
            return None
        self._handshake = None
        self.params = step.agreed.params
        self._sending, self._receiving = step.agreed.sending, step.agreed.receiving
        return HandshakeDone(self.params)

    def _items(self, content: bytes, params: SessionParams) -> list[Received[In] | Rejected]:
        try:
            transmissions = split_batch(content) if params.batch else [content]
        except DecodeError:
            if not self._answers_bad_batches:
                raise
            return [Rejected(NO_CORR, NO_ENTITY, BLOCK)]
        codec, checks = self._codec_in, self._checks_credentials
        return [read_item(params, data, codec, checks_credentials=checks) for data in transmissions]

    def send(self, batch: Iterable[Outgoing[Out]]) -> bytes:
        """Whole padded blocks, ready for the stream. A server's answers and a client's commands alike."""
        assert self.params is not None
        params = self.params
        codec = self._codec_out
        transmissions = [write_item(params, outgoing, codec) for outgoing in batch]
        contents = pack_batches(transmissions, params.block_size) if params.batch else transmissions
        return b"".join(self._seal(contents))

    def _seal(self, contents: Sequence[bytes]) -> list[bytes]:
        size = self._block_size
        if self._sending is None:
            return [pad(content, size) for content in contents]
        # Checked before the first is sealed: keys of blocks that are never sent would be skipped.
        if any(len(content) > size - PAD_LENGTH_SIZE - TAG_SIZE for content in contents):
            raise TooLarge
        return [self._sending.encrypt(content, size) for content in contents]
