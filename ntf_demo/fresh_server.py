"""A server that did not exist before, in a folder of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from ntf_server import setup
from ntf_server.clock import utc_now
from ntf_server.config import Config
from transport.certificates import KeyAlgorithm

LOCALHOST: Final = "127.0.0.1"


def config_dir(folder: Path) -> Path:
    return folder / "etc"


def fresh_config(folder: Path, postgres_url: str = "") -> Config:
    """Makes an identity too; the server listens on a free port."""
    options = setup.InitOptions(
        config_dir=config_dir(folder),
        data_dir=folder / "data",
        host=LOCALHOST,
        port=0,
        algorithm=KeyAlgorithm.ED25519,
    )
    config = setup.init(options, utc_now())
    if postgres_url:
        config = replace(config, STORE=replace(config.STORE, database="postgres", url=postgres_url))
    return config
