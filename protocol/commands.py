"""How any command or message is found by its tag, read and written; both protocols use it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from protocol.encoding import EntityId, Reader, Writer
from protocol.errors import (
    CMD_HAS_AUTH,
    CMD_NO_AUTH,
    CMD_NO_ENTITY,
    CMD_SYNTAX,
    CMD_UNKNOWN,
    DecodeError,
    ErrorType,
)

M = TypeVar("M")


class CredentialRule(Enum):
    """What a command must come with."""

    NOTHING = "neither authorisation nor entity"
    KEY = "authorisation by the key inside, no entity"
    ENTITY = "authorisation and entity"
    ENTITY_ONLY = "an entity; authorisation if the entity has a key"
    ENTITY_BARE = "an entity and no authorisation"


def check_credentials(rule: CredentialRule, auth: bytes, entity_id: EntityId) -> ErrorType | None:
    if rule is CredentialRule.ENTITY:
        return None if auth and entity_id else CMD_NO_AUTH
    if rule is CredentialRule.KEY:
        if not auth:
            return CMD_NO_AUTH
        return CMD_HAS_AUTH if entity_id else None
    if rule is CredentialRule.ENTITY_ONLY:
        return None if entity_id else CMD_NO_ENTITY
    if rule is CredentialRule.ENTITY_BARE and not (auth and entity_id):
        return None if entity_id else CMD_NO_ENTITY
    return CMD_HAS_AUTH if auth or entity_id else None


@dataclass(frozen=True, slots=True)
class Spec(Generic[M]):
    """One wire word: how its parameters are pulled and pushed. `pull` None: it has no parameters."""

    kind: type[M]
    pull: Callable[[Reader, int], M] | None = None
    push: Callable[[Writer, M, int], None] | None = None
    credentials: CredentialRule = CredentialRule.ENTITY
    text: Callable[[M, int], bytes] | None = None
    "Instead of `push`, where the parameters are one text: half the cost of a Writer."
    since: int = 0
    older: bytes = b""
    "What peers of versions before `since` are sent instead; if it is the tag alone, they send that too."


class Codec(Generic[M]):
    """A table of tags, read both ways."""

    def __init__(self, specs: Mapping[bytes, Spec[Any]]) -> None:
        self.specs = specs
        self._by_kind: Mapping[type[M], tuple[bytes, Spec[Any]]] = {
            spec.kind: (tag, spec) for tag, spec in specs.items()
        }
        self._bare: Mapping[bytes, M] = {tag: spec.kind() for tag, spec in specs.items() if spec.pull is None}

    def decode(self, data: bytes, version: int) -> M:
        """Raises DecodeError with CMD UNKNOWN or CMD SYNTAX."""
        bare = self._bare.get(data)
        if bare is not None:
            return bare
        tag, space, parameters = data.partition(b" ")
        spec = self.specs.get(tag)
        if spec is None:
            raise DecodeError(CMD_UNKNOWN)
        if spec.pull is None or not space:
            if version < spec.since and data == spec.older:
                return spec.kind()  # type: ignore[no-any-return]
            raise DecodeError(CMD_SYNTAX)
        r = Reader(parameters)
        try:
            message: M = spec.pull(r, version)
            r.check_end()
        except DecodeError:
            raise DecodeError(CMD_SYNTAX) from None
        return message

    def encode(self, message: M, version: int) -> bytes:
        tag, spec = self._by_kind[type(message)]
        if version < spec.since:
            return spec.older
        if spec.text is not None:
            return tag + b" " + spec.text(message, version)
        if spec.push is None:
            return tag
        w = Writer(tag + b" ")
        spec.push(w, message, version)
        return w.value()

    def credentials(self, message: M) -> CredentialRule:
        return self._by_kind[type(message)][1].credentials
