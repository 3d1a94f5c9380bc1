"""A whole server in this process, on a real port with a real database."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ntf_server import setup
from ntf_server.app import App, running
from ntf_server.config import Config
from protocol.device_token import ApnsToken, Provider
from tests.ntf_server.ntf_client import Device, NtfClient
from transport.certificates import KeyAlgorithm


def make_config(folder: Path, algorithm: KeyAlgorithm = KeyAlgorithm.ED25519, **sections: Any) -> Config:
    """A fresh server's configuration; `sections` are changes by section name."""
    options = setup.InitOptions(
        config_dir=folder / "config",
        data_dir=folder / "data",
        host="127.0.0.1",
        port=0,
        algorithm=algorithm,
    )
    config = setup.init(options, datetime.now(UTC))
    local = changed(config, TRANSPORT={"listen": "127.0.0.1"}, SUBSCRIBER={"allow_private_routers": True})
    return changed(local, **sections)


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    changes = {
        name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()
    }
    return dataclasses.replace(config, **changes)


def make_app(folder: Path, config: Config, **options: Any) -> App:
    return App(folder / "config", config, **options)


@pytest.fixture
async def app(tmp_path: Path) -> AsyncIterator[App]:
    async with running(make_app(tmp_path, make_config(tmp_path))) as app:
        yield app


@pytest.fixture
async def client(app: App) -> AsyncIterator[NtfClient]:
    client = await NtfClient.open(app.address)
    yield client
    client.close()


def null_token() -> ApnsToken:
    return ApnsToken(Provider.APNS_NULL, os.urandom(32).hex().encode())


async def code_of(app: App, device: Device) -> bytes:
    """The registration code, as the device would read it from its push."""
    record = await app.store.token_by_device(device.token, device.key.public.der)
    assert record is not None
    return record.code


async def active_device(app: App, client: NtfClient, **options: Any) -> Device:
    device = Device.make(null_token(), **options)
    await device.register(client)
    await device.verify(client, await code_of(app, device))
    return device
