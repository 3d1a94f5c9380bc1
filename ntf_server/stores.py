"""The store that the configuration asks for, and what must hold while it is open."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from pathlib import Path

from ntf_server import setup
from ntf_server.config import Config, ConfigError, StoreConfig
from ntf_server.data_folder import begin_anew, expect_database, has_database, held, remember_database
from store.interface import NtfStore
from store.leases import GATEWAY, Duty
from store.policy import Durability, RowCaps
from store.sql_store import CommitObserver
from store.sqlite import SqliteStore

_VANISHED = (
    "the PostgreSQL database is empty, but this server had one: check [STORE] url, move it (ntf-server"
    " migrate --to postgres) or restore a backup; "
)


def make_store(
    config_dir: Path, config: Config, *, read_only: bool = False, on_commit: CommitObserver | None = None
) -> NtfStore:
    """Not yet open. StoreVanished if there was a database and now there is none; with PostgreSQL when it is
    opened."""
    section = config.STORE
    durability = Durability(section.durability)
    caps = RowCaps(
        subscriptions_per_token=section.subscriptions_per_token, routers_per_token=section.routers_per_token
    )
    if section.database == "sqlite":
        path = setup.database_path(config)
        expect_database(config_dir, path)
        return SqliteStore(
            path,
            busy_timeout=section.busy_timeout,
            read_only=read_only,
            caps=caps,
            durability=durability,
            on_commit=on_commit,
        )
    need_driver()
    from store.postgres import PostgresStore

    return PostgresStore(
        postgres_url(section),
        name=daemon_name(config),
        pool_size=section.pool_size,
        statement_timeout=section.statement_timeout,
        lease_seconds=section.lease_seconds,
        duties=frozenset(Duty) if config.STATEMENTS.enabled else frozenset(Duty) - GATEWAY,
        vanished=_VANISHED + begin_anew(config_dir) if has_database(config_dir) else None,
        auto_migrate=not read_only,
        caps=caps,
        durability=durability,
        on_commit=on_commit,
    )


def need_driver() -> None:
    if importlib.util.find_spec("asyncpg") is None:
        raise ConfigError("PostgreSQL needs its driver: pip install 'ntf-server[postgres]'")


def postgres_url(section: StoreConfig) -> str:
    """From the configuration, the environment or a file that only the server can read."""
    url = section.url if section.url_file is None else read_url(section.url_file, "[STORE] url_file")
    return check_postgres_url(url, "[STORE] url")


def read_url(file: Path, key: str) -> str:
    try:
        return file.read_text("utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{key} {file}: {error.strerror}") from None


def check_postgres_url(url: str, key: str) -> str:
    if not url.startswith(("postgresql://", "postgres://")):
        raise ConfigError(f"{key} must be postgresql://user:password@host:port/database")
    return url


def daemon_name(config: Config) -> str:
    """Tells the daemons apart that share a database, or whose journals are read together."""
    return config.STORE.daemon or f"{platform.node()}:{config.TRANSPORT.port}"


@asynccontextmanager
async def opened(store: NtfStore, config_dir: Path, config: Config) -> AsyncIterator[None]:
    """A file is for one process alone; a database server keeps daemons apart by itself."""
    async with AsyncExitStack() as stack:
        is_file = config.STORE.database == "sqlite"
        if is_file:
            stack.enter_context(held(setup.data_folder(config)))
        stack.push_async_callback(store.close)
        await store.open()
        with nullcontext() if is_file else suppress(OSError):  # there it may be a volume for reading
            remember_database(config_dir)
        yield
