"""A mutant takes the place of functions that are loaded already: nothing is imported again."""

from __future__ import annotations

import gc
import inspect
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

_Key = tuple[str, str, int]


class Functions:
    """Those of this process that were defined in a folder."""

    def __init__(self, folder: Path) -> None:
        self._found: dict[_Key, list[FunctionType]] = defaultdict(list)
        gc.collect()
        for thing in gc.get_objects():
            if isinstance(thing, FunctionType) and thing.__code__.co_filename.startswith(f"{folder}/"):
                self._found[_key(thing.__code__)].append(thing)

    def exchange(self, path: Path, original: str, changed: str) -> bool:
        """Return False, with nothing exchanged, if the change concerns what runs during the import."""
        before, after = (list(_codes(compile(text, str(path), "exec"))) for text in (original, changed))
        pairs = list(zip(before, after, strict=True))
        if any(_runs_at_import(old) and _own(old) != _own(new) for old, new in pairs):
            return False
        swaps = []
        for old, new in pairs:
            if _runs_at_import(old) or old == new:
                continue
            if [_key(code) for code in before].count(_key(old)) > 1:
                return False
            swaps += [(function, new) for function in self._found[_key(old)]]
        if any(len(function.__code__.co_freevars) != len(new.co_freevars) for function, new in swaps):
            return False
        for function, new in swaps:
            function.__code__ = new
        return bool(swaps)


def _key(code: CodeType) -> _Key:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _codes(code: CodeType) -> Iterator[CodeType]:
    """In the order of the source, down to functions: what is defined in a function belongs to it."""
    yield code
    if _runs_at_import(code):
        for const in code.co_consts:
            if isinstance(const, CodeType):
                yield from _codes(const)


def _runs_at_import(code: CodeType) -> bool:
    """A module or the body of a class."""
    return not code.co_flags & inspect.CO_OPTIMIZED


def _own(code: CodeType) -> tuple[object, ...]:
    """What a code does without the functions that it defines."""
    return code.co_code, code.co_names, [const for const in code.co_consts if not isinstance(const, CodeType)]
