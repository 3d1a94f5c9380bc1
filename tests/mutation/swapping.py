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
        before, after = (compile(text, str(path), "exec") for text in (original, changed))
        if _at_import(before) != _at_import(after):
            return False
        old, new = _by_key(before), _by_key(after)
        swaps = []
        for key, codes in old.items():
            functions = self._found.get(key, ())
            if functions and codes != new[key]:
                if len(codes) > 1 or [len(code.co_freevars) for code in codes] != [
                    len(code.co_freevars) for code in new[key]
                ]:
                    return False
                swaps += [(function, new[key][0]) for function in functions]
        for function, code in swaps:
            function.__code__ = code
        return bool(swaps)


def _key(code: CodeType) -> _Key:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _by_key(module: CodeType) -> dict[_Key, list[CodeType]]:
    found: dict[_Key, list[CodeType]] = defaultdict(list)
    for code in _codes(module):
        found[_key(code)].append(code)
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def _at_import(code: CodeType) -> list[tuple[object, ...]]:
    """What a module and the bodies of its classes do, without the functions that they define."""
    consts = [const for const in code.co_consts if isinstance(const, CodeType)]
    others = [const for const in code.co_consts if not isinstance(const, CodeType)]
    inner = [const for const in consts if not const.co_flags & inspect.CO_OPTIMIZED]
    return [(code.co_code, code.co_names, others), *(each for body in inner for each in _at_import(body))]
