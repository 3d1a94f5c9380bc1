"""What `ntf-server doctor` looks at in the statement gateway: its node, and what the store keeps for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from ntf_server import setup
from ntf_server.clock import SystemClock
from ntf_server.config import Config, ConfigError
from ntf_server.findings import Finding, ok, problem
from ntf_server.statements.summary import node_name, summary
from ntf_server.stores import make_store
from store.interface import SchemaOld, StoreError

NO_TOPIC = bytes(32)
"Nobody publishes about it."


async def examine_gateway(config_dir: Path, config: Config) -> AsyncIterator[Finding]:
    if not config.STATEMENTS.enabled:
        return
    yield await _ask_node(config.STATEMENTS.node)
    if config.STORE.database == "sqlite" and not setup.database_path(config).exists():
        return
    try:
        store = make_store(config_dir, config, read_only=True)
        try:
            await store.open()
            lines = await summary(store, config.STATEMENTS, SystemClock().now())
        finally:
            await store.close()
    except SchemaOld:
        return  # the check of the routers says so
    except (ConfigError, StoreError) as error:
        yield problem("store", error)
        return
    for line in lines:
        yield ok("statements", line)


async def _ask_node(url: str) -> Finding:
    """Whether it lets a topic be watched."""
    if not url:
        return problem(
            "statements", "[STATEMENTS] node is not set: the address of the statement store's node"
        )
    try:
        from ntf_server.statements.node_client import NodeError, connected
    except ImportError as error:
        return problem("statements", f"{error.name} is missing: pip install 'ntf-server[statements]'")
    try:
        async with connected(url, _ignore) as client:
            reading = asyncio.ensure_future(client.run())
            try:
                await client.unsubscribe(await client.subscribe([NO_TOPIC]))
            finally:
                reading.cancel()
                await asyncio.wait([reading])
    except NodeError as error:
        return problem(
            "statements", f"node {node_name(url)}: {error}; look at the node and at [STATEMENTS] node"
        )
    return ok("statements", f"node {node_name(url)} answers")


async def _ignore(statements: list[bytes], is_stored: bool) -> None:
    """This is a test of the connection."""
