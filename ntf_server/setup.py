"""Making and removing a server's files: `init`, `cert` and `delete`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from ntf_server.config import CONFIG_FILE, Config, ConfigError, StoreConfig, render_config
from ntf_server.data_folder import LOCK_FILE, MADE_MARK
from ntf_server.push.credentials import load_p256_key, make_vapid_key, vapid_public_key
from protocol.addresses import NTF_PORT, NtfServer
from store.journal_schema import KEY_FILE_NAME
from transport.certificates import (
    CA_CERTIFICATE,
    CA_KEY,
    FINGERPRINT,
    SERVER_CERTIFICATE,
    SERVER_KEY,
    KeyAlgorithm,
    load_server_files,
    make_ca,
    make_online,
    write_server_files,
)
from transport.hosts import bracketed

VAPID_KEY = "vapid.pem"
DATABASE = "ntf-server.db"
JOURNAL_FOLDER = "journal"
DATABASE_FILES = (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm")
DATA_FILES = (*DATABASE_FILES, JOURNAL_FOLDER, KEY_FILE_NAME, LOCK_FILE)
IDENTITY_FILES = (CA_CERTIFICATE, CA_KEY, SERVER_CERTIFICATE, SERVER_KEY, FINGERPRINT)
CONFIG_FILES = (*IDENTITY_FILES, VAPID_KEY, MADE_MARK, CONFIG_FILE)


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    config_dir: Path
    data_dir: Path
    host: str
    port: int
    algorithm: KeyAlgorithm
    store: StoreConfig = field(default_factory=StoreConfig)


def init(options: InitOptions, now: datetime) -> Config:
    """Make the configuration, the identity and the keys. An identity that is there already is kept."""
    config_file = options.config_dir / CONFIG_FILE
    if config_file.exists():
        raise ConfigError(f"{config_file} exists; --force makes a new configuration and a new identity")
    for folder in (options.config_dir, options.data_dir):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (options.config_dir / SERVER_CERTIFICATE).exists():
        ca_certificate, ca_key = make_ca(options.algorithm, "NTF server CA", now)
        online = make_online(ca_certificate, ca_key, options.algorithm, options.host, now)
        write_server_files(options.config_dir, ca_certificate, ca_key, online)
    vapid_key = options.config_dir / VAPID_KEY
    if not vapid_key.exists():
        make_vapid_key(vapid_key)
    config = _initial_config(options, vapid_key)
    config_file.touch(mode=0o600)
    config_file.write_text(render_config(config), "utf-8")
    for name in (*IDENTITY_FILES, VAPID_KEY):  # also those that were brought along
        if (options.config_dir / name).exists():
            (options.config_dir / name).chmod(0o600)
    give_to_owner(options.config_dir, CONFIG_FILES)
    return config


def put_aside(folder: Path, names: Sequence[str], now: datetime) -> Path | None:
    """Move these files into a new folder beside them: identities and data are never just removed."""
    files = [folder / name for name in names if (folder / name).exists()]
    if not files:
        return None
    aside = folder / f"replaced-{now:%Y%m%dT%H%M%S.%f}"
    aside.mkdir(mode=0o700)
    for file in files:
        file.rename(aside / file.name)
    return aside


def give_to_owner(folder: Path, names: Sequence[str]) -> None:
    """What root has made in a folder of somebody else belongs to them: else the server could not read it."""
    if os.geteuid() != 0:
        return
    owner = folder.stat()
    for name in names:
        with suppress(FileNotFoundError):
            os.chown(folder / name, owner.st_uid, owner.st_gid, follow_symlinks=False)


def _initial_config(options: InitOptions, vapid_key: Path) -> Config:
    config = Config()
    return replace(
        config,
        STORE=replace(options.store, data_dir=options.data_dir.absolute()),
        TRANSPORT=replace(config.TRANSPORT, host=options.host, port=options.port),
        WEBPUSH=replace(config.WEBPUSH, vapid_key_file=vapid_key.absolute()),
    )


def address(config_dir: Path, config: Config, port: int | None = None) -> NtfServer:
    """What clients are given; `port` if the one in the configuration is 0."""
    shown = port or config.TRANSPORT.port
    identity = load_server_files(config_dir).identity
    host = bracketed(config.TRANSPORT.host)
    return NtfServer((host,), "" if shown == NTF_PORT else str(shown), identity)


def data_folder(config: Config) -> Path:
    if config.STORE.data_dir is None:
        raise ConfigError("[STORE] data_dir is not set; it is the folder of the database")
    return config.STORE.data_dir


def database_path(config: Config) -> Path:
    return data_folder(config) / DATABASE


def vapid_key_text(config: Config) -> str | None:
    """The public half of the Web Push key, as apps need it."""
    file = config.WEBPUSH.vapid_key_file
    return vapid_public_key(load_p256_key(file)) if config.WEBPUSH.enabled and file else None


def delete(config_dir: Path, data_dir: Path | None) -> list[Path]:
    """Remove what init and the server made; other files in these folders stay. Returns what was removed."""
    files = [config_dir / name for name in CONFIG_FILES]
    if data_dir is not None:
        files += [data_dir / name for name in DATA_FILES]
    removed = [file for file in files if file.exists()]
    for file in removed:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    for folder in {config_dir, data_dir or config_dir}:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
    return removed
