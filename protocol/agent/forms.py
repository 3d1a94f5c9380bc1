"""How values stand in bytes: each form is said once, for reading and for writing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from protocol.crypto import pull_public_key, push_key
from protocol.encoding import Reader, Writer
from protocol.errors import DecodeError
from protocol.queue_uri import pull_queue_info, pull_queue_uri, push_queue_info, push_queue_uri
from protocol.versions import pull_version_range, push_version_range

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Form(Generic[T]):
    pull: Callable[[Reader], T]
    push: Callable[[Writer, T], None]
    kind: type[T] | None = None
    "Of a record."

    def decode(self, data: bytes) -> T:
        """Nothing may be left behind it."""
        r = Reader(data)
        value = self.pull(r)
        r.check_end()
        return value

    def encode(self, value: T) -> bytes:
        w = Writer()
        self.push(w, value)
        return w.value()


SHORT = Form(Reader.pull_short, Writer.push_short)
LARGE = Form(Reader.pull_large, Writer.push_large)
TAIL = Form(Reader.pull_tail, Writer.push_bytes)
BOOL = Form(Reader.pull_bool, Writer.push_bool)
WORD16 = Form(Reader.pull_word16, Writer.push_word16)
INT64 = Form(Reader.pull_int64, Writer.push_int64)
PUBLIC_KEY = Form(pull_public_key, push_key)
VERSIONS = Form(pull_version_range, push_version_range)
QUEUE_URI = Form(pull_queue_uri, push_queue_uri)
QUEUE_INFO = Form(pull_queue_info, push_queue_info)


def exactly(size: int) -> Form[bytes]:
    """So many bytes, without their length."""
    return Form(lambda r: r.pull_bytes(size), Writer.push_bytes)


def checked(form: Form[T], check: Callable[[T], T]) -> Form[T]:
    """What was read is as `check` returns it; that may raise DecodeError."""
    return Form(lambda r: check(form.pull(r)), form.push)


def text(form: Form[bytes], encoding: str = "utf-8") -> Form[str]:
    def pull(r: Reader) -> str:
        try:
            return form.pull(r).decode(encoding)
        except UnicodeDecodeError:
            raise DecodeError from None

    return Form(pull, lambda w, value: form.push(w, value.encode(encoding)))


def optional(form: Form[T]) -> Form[T | None]:
    pull, push = form.pull, form.push
    return Form(lambda r: r.pull_optional(pull), lambda w, value: w.push_optional(value, push))


def nonempty(form: Form[T]) -> Form[tuple[T, ...]]:
    return Form(
        lambda r: tuple(r.pull_nonempty(form.pull)), lambda w, values: w.push_nonempty(values, form.push)
    )


def record(kind: type[T], **forms: Form[Any]) -> Form[T]:
    """Its fields one after another, in the order of `forms`.

    Slots are filled without `__init__`: that of a frozen class takes longer than to read what it is given.
    """
    assert forms.keys() == {field.name for field in fields(kind)}  # type: ignore[arg-type]
    pulls = [(getattr(kind, name).__set__, form.pull) for name, form in forms.items()]
    pushes = [(name, form.push) for name, form in forms.items()]

    def pull(r: Reader) -> T:
        value = kind.__new__(kind)
        for fill, pull_field in pulls:
            fill(value, pull_field(r))
        return value

    def push(w: Writer, value: T) -> None:
        for name, push_field in pushes:
            push_field(w, getattr(value, name))

    return Form(pull, push, kind)


def tagged(by_tag: Mapping[bytes, Form[Any]]) -> Form[Any]:
    """One of several records, each with its tag before it."""
    by_kind = {form.kind: (tag, form) for tag, form in by_tag.items()}
    longer = {tag[:1] for tag in by_tag if len(tag) > 1}

    def pull(r: Reader) -> Any:
        tag = r.pull_bytes(1)
        form = by_tag.get(tag + r.pull_bytes(1) if tag in longer else tag)
        if form is None:
            raise DecodeError
        return form.pull(r)

    def push(w: Writer, value: Any) -> None:
        tag, form = by_kind[type(value)]
        w.push_bytes(tag)
        form.push(w, value)

    return Form(pull, push)
