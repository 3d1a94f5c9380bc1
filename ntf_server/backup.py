"""`ntf-server backup` and `restore`: a server in a folder, whole and checked."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from ntf_server import setup
from ntf_server.config import CONFIG_FILE, Config, ConfigError, configured, load_config, render_config
from ntf_server.data_folder import expect_log, held, remember_database
from ntf_server.secret_files import write_secret
from store.backup import check_database, copy_database
from store.journal_schema import KEY_FILE_NAME
from store.migrate import STEPS

MANIFEST = "backup.json"
MOVED_FILES = (*setup.IDENTITY_FILES, setup.VAPID_KEY, CONFIG_FILE)
"With the data, all that a server needs on another machine."


class BackupError(Exception):
    """A backup that cannot be made or used; the message says why."""


@dataclass(frozen=True)
class BackupManifest:
    """What is in a backup. Written last: a folder without one is no backup."""

    made: str
    program: str
    schema: int
    files: dict[str, str]
    "SHA-256 by name."

    @classmethod
    def read(cls, folder: Path) -> BackupManifest:
        try:
            values: dict[str, Any] = json.loads((folder / MANIFEST).read_text("utf-8"))
            return cls(**values)
        except (OSError, ValueError, TypeError):
            raise BackupError(f"{folder} is not a whole backup: {MANIFEST} is missing or damaged") from None


def make_backup(
    config_dir: Path, config: Config, folder: Path, *, with_identity: bool, now: datetime
) -> BackupManifest:
    """Copy the database (also of a running server), its journal's key and, if wanted, the identity."""
    if folder.exists() and any(folder.iterdir()):
        raise BackupError(f"{folder} is not empty: a backup gets a folder of its own")
    _check_kind(config)
    database = setup.database_path(config)
    if not database.exists():
        raise BackupError(f"{database} does not exist: there is nothing to back up")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    expect_log(database)
    version = copy_database(database, folder / setup.DATABASE)
    expect_log(database)  # it may have gone meanwhile
    _copy(database.with_name(KEY_FILE_NAME), folder)
    for name in MOVED_FILES if with_identity else ():
        _copy(config_dir / name, folder)
    manifest = BackupManifest(
        made=now.isoformat(timespec="seconds"),
        program=metadata.version("ntf-server"),
        schema=version,
        files={file.name: _digest(file) for file in sorted(folder.iterdir())},
    )
    write_secret(folder / MANIFEST, json.dumps(asdict(manifest), indent=2).encode())
    return manifest


class Restored(NamedTuple):
    config: Config
    replaced: Path | None
    "Where the data is that was there before."


def restore_backup(folder: Path, config_dir: Path, data_dir: Path | None, now: datetime) -> Restored:
    """Put a backup in place of what is there, which is put aside. The server must not run.

    With an identity in the backup and none in `config_dir`, that is restored as well, and `data_dir` is where
    the data goes; otherwise the configuration in `config_dir` says it.
    """
    manifest = check_backup(folder)
    if (config_dir / CONFIG_FILE).exists():
        config = configured(config_dir)
    elif CONFIG_FILE in manifest.files:
        config = _restore_identity(folder, config_dir, data_dir, manifest)
    else:
        raise BackupError(f"{config_dir} has no {CONFIG_FILE}, nor has the backup: run init first")
    _check_kind(config)
    target = setup.data_folder(config)
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    with held(target):
        replaced = _replace_data(folder, target, manifest, now)
    remember_database(config_dir)
    setup.give_to_owner(config_dir, setup.CONFIG_FILES)
    setup.give_to_owner(target, setup.DATA_FILES)
    return Restored(config, replaced)


def _replace_data(folder: Path, target: Path, manifest: BackupManifest, now: datetime) -> Path | None:
    """The copy is whole before what is there gives way to it: the disk may be full."""
    fresh = target / f".{setup.DATABASE}.restored"
    try:
        write_secret(fresh, folder / setup.DATABASE)
        check_database(fresh)
        keys = [name for name in (KEY_FILE_NAME,) if name in manifest.files]
        replaced = setup.put_aside(target, (*setup.DATABASE_FILES, *keys), now)
        fresh.rename(target / setup.DATABASE)
    finally:
        fresh.unlink(missing_ok=True)
    for name in keys:
        _copy(folder / name, target)
    return replaced


def _check_kind(config: Config) -> None:
    if config.STORE.database != "sqlite":
        raise BackupError(
            f"[STORE] database = {config.STORE.database}: use its own tools (pg_dump, pg_restore)"
        )


def check_backup(folder: Path) -> BackupManifest:
    """The manifest of a backup whose files are all as they were written."""
    manifest = BackupManifest.read(folder)
    for name, digest in manifest.files.items():
        file = folder / name
        if Path(name).name != name or not file.is_file() or _digest(file) != digest:
            raise BackupError(f"{file} is missing or was changed: this backup cannot be used")
    if manifest.schema > STEPS.latest:
        raise BackupError(
            f"{folder} has schema version {manifest.schema}, this program knows up to {STEPS.latest}:"
            f" install version {manifest.program} or later"
        )
    return manifest


def _restore_identity(
    folder: Path, config_dir: Path, data_dir: Path | None, manifest: BackupManifest
) -> Config:
    """The configuration with the paths of this machine."""
    config_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in MOVED_FILES:
        if (config_dir / name).exists():
            raise BackupError(
                f"{config_dir / name} exists: an identity is restored into an empty folder only"
            )
    try:
        config = load_config(folder / CONFIG_FILE, {})
    except ConfigError as error:
        raise BackupError(str(error)) from None
    if data_dir is not None:
        config = replace(config, STORE=replace(config.STORE, data_dir=data_dir.absolute()))
    vapid = config_dir / setup.VAPID_KEY
    if setup.VAPID_KEY in manifest.files:
        config = replace(config, WEBPUSH=replace(config.WEBPUSH, vapid_key_file=vapid.absolute()))
    for name in MOVED_FILES:
        if name in manifest.files and name != CONFIG_FILE:
            _copy(folder / name, config_dir)
    write_secret(config_dir / CONFIG_FILE, render_config(config).encode())
    return config


def _copy(source: Path, folder: Path) -> None:
    if source.is_file():
        write_secret(folder / source.name, source)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
