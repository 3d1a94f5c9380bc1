"""Files whose readers could be this server, or see what it knows: they belong to its user alone."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from ntf_server import setup
from ntf_server.config import CONFIG_FILE, Config
from transport.certificates import CA_KEY, SERVER_KEY


def secret_files(config_dir: Path, config: Config) -> list[Path]:
    """Keys, passwords and data, where they exist."""
    data_dir = setup.data_folder(config)
    candidates = [
        config_dir / CONFIG_FILE,
        config_dir / CA_KEY,
        config_dir / SERVER_KEY,
        *(data_dir / name for name in setup.DATA_FILES),
        config.STORE.url_file,
        config.WEBPUSH.vapid_key_file,
        config.APNS.key_file,
        config.FCM.service_account_file,
        config.STATEMENTS.key_file,
    ]
    return [path for path in candidates if path is not None and path.exists()]


def readable_by_others(paths: Iterable[Path]) -> list[Path]:
    """Those that more than their owner may use: by their own mode and by that of their folder."""
    return [path for path in paths if _exposed(path.stat().st_mode, path.parent.stat().st_mode)]


def _exposed(mode: int, folder: int) -> bool:
    by_group = mode & stat.S_IRWXG and folder & stat.S_IXGRP
    by_all = mode & stat.S_IRWXO and folder & stat.S_IXOTH
    return bool(by_group or by_all)


def write_secret(target: Path, content: bytes | Path) -> None:
    """A file that only its owner can read, on the disk before its name is used."""
    hidden = target.with_name(f".{target.name}.new")
    with open(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        if isinstance(content, Path):
            with content.open("rb") as source:
                shutil.copyfileobj(source, file)
        else:
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    hidden.rename(target)
