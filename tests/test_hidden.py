"""No record and no exception of any package prints keys, ids, tokens, codes or contents."""

from __future__ import annotations

import ast
import base64
import collections.abc
import dataclasses
import enum
import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Iterator
from typing import Any, TypeGuard

import pytest

from protocol.errors import AUTH, HandshakeError, HandshakeErrorType
from protocol.hiding import hides_bytes
from tests.test_architecture import modules, name

PACKAGES = ("protocol", "transport", "store", "smp_client", "ntf_server", "smp_router", "agent")
SECRET = b"\x01\xfe~SECRET~of whoever it belongs to"
PUBLIC = {
    # Identities: fingerprints of certificates, part of the addresses that are given to everybody.
    "protocol.addresses.SmpServer.key_hash",
    "protocol.addresses.NtfServer.key_hash",
    "ntf_server.client_session.ServerIdentity.key_hash",
    # Words of the protocol.
    "protocol.commands.Spec.older",
    "protocol.errors.ErrorType.text",
    "protocol.errors.HandshakeErrorType.text",
    # A handle of libcurl.
    "ntf_server.push.http2._Job.easy",
}
SECRET_TEXTS = {
    "agent.duplex.agent.DuplexConfig.key",
    "ntf_server.config.AuthConfig.control_port_admin_password",
    "ntf_server.config.AuthConfig.control_port_user_password",
    "ntf_server.config.StatementsConfig.node",
    "ntf_server.config.StoreConfig.url",
    "ntf_server.config.SubscriberConfig.socks_proxy",
    "ntf_server.push.http2._Job.path",
    "ntf_server.push.webpush.Endpoint.path",
    "protocol.agent.envelopes.InvitationEnvelope.link",
    "smp_client.dialer.NetworkConfig.socks_proxy",
}
"Passwords, addresses with passwords in them, and what leads to a device or a connection."
PROGRAMS = "__main__"
NO_RECORD = object()


def classes() -> list[type]:
    found: dict[str, type] = {}
    for package in PACKAGES:
        root = importlib.import_module(package)
        for module in pkgutil.walk_packages(root.__path__, f"{package}."):
            if not module.name.endswith(PROGRAMS):
                for value in vars(importlib.import_module(module.name)).values():
                    if isinstance(value, type) and value.__module__ == module.name:
                        found[full_name(value)] = value
    return list(found.values())


def full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def is_record(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or is_named_tuple(kind)


CLASSES = classes()
ABSTRACT = {"protocol.addresses.ServerAddress"}
RECORDS = [kind for kind in CLASSES if is_record(kind) and full_name(kind) not in ABSTRACT]
EXCEPTIONS = [kind for kind in CLASSES if issubclass(kind, BaseException)]


def sample(hint: Any, within: frozenset[type] = frozenset()) -> Any:
    """A value of this type, with a secret wherever there can be one. `within`: the records it is for."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, typing.NewType):
        return sample(hint.__supertype__, within)
    if hint in (Any, bytes, bytearray, memoryview):
        return SECRET
    if origin in (typing.Union, types.UnionType):
        values = [sample(each, within) for each in arguments]
        return max(values, key=lambda value: (SECRET.hex() in spelled(value), value is not None))
    if origin is not None and inspect.isclass(origin) and not is_record(origin):
        return sample_container(origin, arguments, within)
    kind = origin or hint
    if inspect.isclass(kind) and is_record(kind):
        return NO_RECORD if kind in within else record_of(kind, within)
    if inspect.isclass(kind) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    return {str: "text", int: 1, float: 1.0, bool: True, type(None): None}.get(hint, NO_RECORD)


def spelled(value: Any) -> str:
    """Whether a secret is in it shows, also if its repr hides it."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return "".join(map(spelled, (*value.keys(), *value.values())))
    return "".join(map(spelled, value)) if isinstance(value, tuple | list | set | frozenset) else ""


def sample_container(origin: type, arguments: tuple[Any, ...], within: frozenset[type]) -> Any:
    if issubclass(origin, tuple):
        return tuple(sample(each, within) for each in arguments if each is not Ellipsis)
    if issubclass(origin, collections.abc.Mapping):
        return {sample(arguments[0], within): sample(arguments[-1], within)}
    if issubclass(origin, collections.abc.Set):
        return {sample(arguments[0], within)}
    if issubclass(origin, collections.abc.Iterable):
        return [sample(arguments[0], within)]
    return NO_RECORD


def record_of(kind: type, within: frozenset[type] = frozenset()) -> Any:
    """With a secret in every field that can hold one and is not public; made without its own checks."""
    hints = typing.get_type_hints(kind)
    values = {
        field: value_for(f"{full_name(kind)}.{field}", hints[field], within | {kind})
        for field in fields_of(kind)
    }
    if is_named_tuple(kind):
        return tuple.__new__(kind, values.values())
    record: Any = object.__new__(kind)
    for field, value in values.items():
        object.__setattr__(record, field, value)
    return record


def value_for(field: str, hint: Any, within: frozenset[type]) -> Any:
    if field in PUBLIC:
        return b"public"
    return SECRET.decode("latin-1") if field in SECRET_TEXTS else sample(hint, within)


def fields_of(kind: Any) -> list[str]:
    if is_named_tuple(kind):
        return list(kind._fields)
    return [field.name for field in dataclasses.fields(kind)]


def check_hidden(value: Any) -> None:
    forms = (repr(SECRET[:6])[2:-1], SECRET[:6].hex(), base64.urlsafe_b64encode(SECRET[:6]).decode())
    for shown in (repr(value), str(value), f"{value}", ascii(value)):
        for form in (*forms, "~SECRET~"):
            assert form not in shown


@pytest.mark.parametrize("kind", RECORDS, ids=full_name)
def test_records(kind: type) -> None:
    check_hidden(record_of(kind))


def test_what_is_public_or_a_secret_text_is_there() -> None:
    found = {f"{full_name(kind)}.{field}" for kind in RECORDS for field in fields_of(kind)}
    assert found >= PUBLIC | SECRET_TEXTS


@pytest.mark.parametrize("kind", EXCEPTIONS, ids=full_name)
def test_exceptions(kind: Any) -> None:
    """Those that are made of more than their text."""
    own = [each for each in kind.__mro__ if "__init__" in vars(each) and each.__module__ in MODULES]
    if not own:
        return
    hints = typing.get_type_hints(own[0].__init__)
    version = HandshakeErrorType(b"VERSION")
    special: dict[Any, Any] = {type(AUTH): AUTH, HandshakeErrorType: version}
    special[HandshakeError] = HandshakeError(version)
    arguments = {
        parameter: special[hints[parameter]] if hints[parameter] in special else sample(hints[parameter])
        for parameter in list(inspect.signature(own[0].__init__).parameters)[1:]
        if parameter in hints
    }
    check_hidden(kind(**arguments))


MODULES = {kind.__module__ for kind in CLASSES}
SECRETS = {
    "auth_key",
    "code",
    "corr_id",
    "decryption_key",
    "device_token",
    "dh_secret",
    "entity_id",
    "link_id",
    "message_id",
    "nonce",
    "notifier_id",
    "notifier_key",
    "password",
    "private_key",
    "recipient_id",
    "secret",
    "sender_id",
    "session_id",
    "subscription_id",
    "token_id",
    "verify_key",
}


LOGGERS = {"log", "logger"}


def texts(tree: ast.AST) -> Iterator[ast.expr]:
    """What is filled into the texts of exceptions and log lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            yield from (part.value for part in ast.walk(node) if isinstance(part, ast.FormattedValue))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).partition(".")[0] in LOGGERS:
            yield from node.args


def secrets_in(tree: ast.AST) -> list[str]:
    return [
        f"line {part.lineno}: {ast.unparse(part)}"
        for part in texts(tree)
        for word in ast.walk(part)
        if getattr(word, "attr", getattr(word, "id", "")) in SECRETS
    ]


@pytest.mark.parametrize("path", modules(*PACKAGES), ids=name)
def test_texts_of_exceptions(path: Any) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    made = {ast.unparse(node.targets[0]) for node in ast.walk(tree) if is_logger(node)}
    assert made <= LOGGERS
    assert secrets_in(tree) == []


def is_logger(node: ast.AST) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("logging.getLogger(__name__")


@pytest.mark.parametrize(
    "leak",
    [
        'logger.info("token %s", token.token_id)',
        'log.error("token %s", token_id.hex())',
        'log.error(f"token {token_id}")',
        'raise ValueError(f"token {token.token_id!r}")',
    ],
)
def test_a_secret_in_a_text_is_found(leak: str) -> None:
    assert secrets_in(ast.parse(leak))


def test_the_oracle_sees_what_a_record_shows() -> None:
    @dataclasses.dataclass
    class Leaking:
        parts: dict[str, tuple[bytes, ...]]

    leaking = Leaking({"text": (SECRET,)})
    with pytest.raises(AssertionError):
        check_hidden(leaking)
    check_hidden(hides_bytes(Leaking)({"text": (SECRET,)}))
