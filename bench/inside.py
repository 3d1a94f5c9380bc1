"""Parts of a daemon, of the version that the Python which runs this file has installed.

Run as a program: the name of a function and its arguments, as JSON; prints its result as JSON. The measuring
code is today's in both cases. Where an earlier version has something elsewhere, or not yet, `NAMES` says it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import importlib
import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def name_of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def earlier_config(**values: Any) -> Any:
    config = name_of("ntf_server.push.apns", "ApnsConfig")
    known = {field.name for field in dataclasses.fields(config)}
    return config(**{name: value for name, value in values.items() if name in known})


def earlier_provider(config: Any, client: Any, clock: Any, _response_timeout: float) -> Any:
    return name_of("ntf_server.push.apns", "ApnsProvider")(config, client, clock)


NAMES: Mapping[tuple[str, str], Callable[[], Any]] = {
    ("transport.server", "serve"): lambda: name_of("transport.streams", "serve"),
    ("transport.engine", "RECEIVE_SIZE"): lambda: name_of("transport.streams", "RECEIVE_SIZE"),
    ("ntf_server.push.provider", "MessageList"): lambda: name_of("ntf_server.push.provider", "Message"),
    ("ntf_server.config", "ApnsConfig"): lambda: earlier_config,
    ("ntf_demo.fake_push.program", "FakePushProcess"): lambda: None,
    ("ntf_demo.fake_push.program", "fake_push_process"): lambda: None,
    ("ntf_demo.fake_push.server", "wall_clock"): lambda: time.time,
}
"What the measuring code imports, and what an earlier version has instead."


def prepare() -> None:
    """Makes `bench` importable, and only that of this repository."""
    bench = sys.modules["bench"] = ModuleType("bench")
    bench.__path__ = [str(Path(__file__).parent)]
    for (module, name), instead in NAMES.items():
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            found = sys.modules[module] = ModuleType(module)
        if not hasattr(found, name):
            setattr(found, name, instead())


async def push(host: str, port: int, ca_file: str, key: str, pushes: int) -> float:
    """Microseconds of CPU for each push to a provider that runs elsewhere."""
    clients: Any = importlib.import_module("bench.push_clients")
    if clients.ApnsConfig is earlier_config:
        clients.ApnsProvider, clients.Path = earlier_provider, str

    async def as_it_is(**_: object) -> None: ...

    fake = SimpleNamespace(host=host, port=port, ca_file=ca_file, control=as_it_is)
    _, cpu, _ = await clients.pushing("curl", fake, Path(key), pushes, 0)
    return float(cpu)


def tls(size: int, rounds: int) -> tuple[float, float]:
    """Microseconds of CPU for each block: through our streams, and in a bare loop over sockets."""
    loops: Any = importlib.import_module("bench.tls")
    certificates: Any = importlib.import_module("transport.certificates")
    ed25519, now = certificates.KeyAlgorithm.ED25519, datetime.now(UTC)
    credentials = certificates.make_online(
        *certificates.make_ca(ed25519, "CA", now), ed25519, "localhost", now
    )
    ours = loops.our_streams(credentials, size, rounds, in_step=False)
    return ours, loops.openssl_sockets(credentials, size, rounds)


async def disconnect(database: str) -> float:
    """Milliseconds of CPU to mark all queues of its only router disconnected."""
    store = name_of("store.sqlite", "SqliteStore")(Path(database))
    await store.open()
    gc.collect()  # one that happens to fall into it would take longer than what is measured
    before = time.process_time()
    await store.set_disconnected(1)
    spent = time.process_time() - before
    await store.close()
    return spent * 1000


if __name__ == "__main__":
    prepare()
    result = globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))
    print(json.dumps(asyncio.run(result) if asyncio.iscoroutine(result) else result))
