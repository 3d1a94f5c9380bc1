"""Parsers against changed bytes: a value or a typed error, quickly, and nothing else."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import protocol
from protocol.agent.errors import RatchetError
from protocol.agent.messages import AGENT_MESSAGE
from protocol.encoding import Reader
from protocol.errors import DecodeError, HandshakeError
from protocol.versions import NTF_VERSIONS, SMP_VERSIONS
from tests.fuzz import bodies
from tests.fuzz.mutation import Mutator
from tests.protocol.parsers import PARSERS, Parser

TYPED = (DecodeError, HandshakeError, RatchetError, *bodies.TYPED)
OWN_EXAMPLE = 0.05
"Share of inputs that are made of what clients of the gateway send."
THOROUGH = 4
"Parsers of whole sessions take much longer than others: they get one input of so many."
READS = ("pull", "decode", "parse")
"How functions that take bytes from outside begin."
SLOW = 2.0
"Seconds of processor time for one input: more is a way to stop a server."
VERSIONS = tuple(range(NTF_VERSIONS.min, SMP_VERSIONS.max + 1))


@dataclass(frozen=True)
class Finding:
    """An input that a parser did not take well."""

    parser: str
    data: bytes
    what: str

    def __str__(self) -> str:
        return f"{self.parser}: {self.what}\n  input: {self.data.hex()}"


def discovered() -> Mapping[str, Parser]:
    """Every function of protocol/ that reads bytes, a text or a Reader, also those that nobody listed."""
    found: dict[str, Parser] = {}
    for info in pkgutil.walk_packages(protocol.__path__, "protocol."):
        module = importlib.import_module(info.name)
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == info.name and name.partition("_")[0] in READS:
                found |= dict(_adapted(f"{info.name}.{name}", function))
    return found


def _adapted(name: str, function: Callable[..., Any]) -> Iterator[tuple[str, Parser]]:
    first, *others = inspect.signature(function).parameters.values()
    if first.annotation not in ADAPTERS:
        return
    parse = ADAPTERS[first.annotation]
    required = [parameter for parameter in others if parameter.default is parameter.empty]
    if not required:
        yield name, lambda data: parse(function, data)
    elif [parameter.name for parameter in required] == ["version"]:
        for version in VERSIONS:
            yield f"{name} v{version}", partial(_with_version, parse, function, version)


def _with_version(
    parse: Callable[..., object], function: Callable[..., Any], version: int, data: bytes
) -> None:
    parse(function, data, version)


ADAPTERS: Mapping[str, Callable[..., object]] = {
    "Reader": lambda function, data, *more: function(Reader(data), *more),
    "bytes": lambda function, data, *more: function(data, *more),
    "str": lambda function, data, *more: function(data.decode("utf-8", "surrogateescape"), *more),
}


def all_parsers() -> dict[str, Parser]:
    return {**discovered(), **PARSERS, **MESSAGES, **bodies.PARSERS}


def _agent_message(data: bytes) -> None:
    message = AGENT_MESSAGE.decode(data)
    assert AGENT_MESSAGE.decode(AGENT_MESSAGE.encode(message)) == message


MESSAGES: Mapping[str, Parser] = {"agent message": _agent_message}


def try_input(name: str, parse: Parser, data: bytes) -> Finding | None:
    started = time.process_time()
    try:
        parse(data)
    except TYPED:
        pass
    except Exception:
        return Finding(name, data, traceback.format_exc())
    taken = time.process_time() - started
    return Finding(name, data, f"took {taken:.1f} s") if taken > SLOW else None


@dataclass
class ParserRun:
    inputs: int
    findings: list[Finding]


def fuzz_parsers(seconds: float, seed: int, parsers: Mapping[str, Parser] | None = None) -> ParserRun:
    """Changed examples for all parsers in turn, for some time; each parser is reported once."""
    deadline = time.monotonic() + seconds
    return _fuzz(lambda _inputs: time.monotonic() < deadline, seed, parsers)


def fuzz_inputs(inputs: int, seed: int) -> ParserRun:
    """The same for so many inputs, or a few more."""
    return _fuzz(lambda done: done < inputs, seed, None)


def _fuzz(goes_on: Callable[[int], bool], seed: int, parsers: Mapping[str, Parser] | None) -> ParserRun:
    mutator = Mutator(seed)
    waiting = dict(parsers if parsers is not None else all_parsers())
    slow = set(PARSERS) if parsers is None else set()
    run = ParserRun(0, [])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the certificate parser warns of what it then accepts or refuses
        for number in itertools.count():
            if not waiting or not goes_on(run.inputs):
                break
            data = _example(mutator)
            for name, parse in list(waiting.items()):
                if name in slow and number % THOROUGH:
                    continue
                run.inputs += 1
                if finding := try_input(name, parse, data):
                    run.findings.append(finding)
                    del waiting[name]
    return run


def _example(mutator: Mutator) -> bytes:
    example = mutator.pick(bodies.EXAMPLES) if mutator.chance(OWN_EXAMPLE) else mutator.example()
    return mutator.changed(example)
