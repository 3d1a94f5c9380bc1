"""Schema versions of PostgreSQL databases. All of ours is in one schema, so a database can be shared."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg

from store.schema_steps import Migration, SchemaSteps

SCHEMA = "ntf"
STEPS = SchemaSteps("store.postgres_migrations")

_LOCK = 0x4E544653
"'NTFS': daemons that start together migrate one after the other."

_PREPARE = """
CREATE SCHEMA IF NOT EXISTS {0};
CREATE TABLE IF NOT EXISTS {0}.schema_version (version bigint NOT NULL);
"""


async def schema_version(db: asyncpg.Connection, schema: str = SCHEMA) -> int:
    """0 for a database without anything of ours."""
    if await db.fetchval("SELECT to_regclass($1)", f"{schema}.schema_version") is None:
        return 0
    version = int(await db.fetchval(f"SELECT coalesce(max(version), 0) FROM {schema}.schema_version"))
    STEPS.check(version)
    return version


async def migrate(
    db: asyncpg.Connection, *, to: int | None = None, dry_run: bool = False, schema: str = SCHEMA
) -> list[Migration]:
    """The steps done, or with `dry_run` the steps to do. One that fails leaves the version before it."""
    target = STEPS.latest if to is None else to
    if dry_run:
        return STEPS.plan(await schema_version(db, schema), target)
    async with _alone(db):
        steps = STEPS.plan(await schema_version(db, schema), target)
        for step in steps:
            async with db.transaction():
                await db.execute(_PREPARE.format(schema))
                await db.execute(f"SET LOCAL search_path = {schema}")
                await db.execute(step.sql)
                await db.execute(f"DELETE FROM {schema}.schema_version")
                await db.execute(f"INSERT INTO {schema}.schema_version VALUES ($1)", step.version)
    return steps


@asynccontextmanager
async def _alone(db: asyncpg.Connection) -> AsyncIterator[None]:
    await db.execute("SELECT pg_advisory_lock($1)", _LOCK)
    try:
        yield
    finally:
        await db.execute("SELECT pg_advisory_unlock($1)", _LOCK)
