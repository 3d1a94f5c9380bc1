"""A server that did not exist before, in a folder of its own; a fake provider takes its pushes to Apple."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ntf_demo.fake_push.server import FakePushServer
from ntf_server import setup
from ntf_server.clock import utc_now
from ntf_server.config import LOCALHOST, Config
from transport.certificates import KeyAlgorithm


def config_dir(folder: Path) -> Path:
    return folder / "etc"


def fresh_config(folder: Path, push: FakePushServer, postgres_url: str = "") -> Config:
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
    return replace(
        config,
        TRANSPORT=replace(config.TRANSPORT, listen=LOCALHOST),
        SUBSCRIBER=replace(config.SUBSCRIBER, allow_private_routers=True),
        APNS=replace(
            config.APNS,
            allow_test_provider=True,
            key_id="DEMO",
            team_id="DEMO",
            test_host=LOCALHOST,
            test_port=push.port,
            test_ca_file=push.ca_file,
        ),
    )
