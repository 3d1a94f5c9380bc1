"""The push providers that a configuration asks for. Modules and libraries of the others are not loaded."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from ntf_server.config import Config, ConfigError
from ntf_server.push.credentials import make_vapid_key
from ntf_server.push.provider import NullProvider, ProviderRefusesUs, PushNotification, PushProvider
from protocol.device_token import DeviceToken, Provider

if TYPE_CHECKING:
    from ntf_server.push.http2 import CurlHttp2

TEST_KEY = "apns-test.pem"
TEST_NAME = "TEST"
"Key and team id of a server that has no key of Apple's: only a test provider sees them."
APPLE = (Provider.APNS_PROD, Provider.APNS_DEV)


class NotConfigured:
    """Stands in for Apple when there is no key: clients may register, pushes fail loudly."""

    async def deliver(self, token: DeviceToken, notification: PushNotification, push_id: uuid.UUID) -> None:
        raise ProviderRefusesUs("APNs has no key: set [APNS] key_file, key_id and team_id")

    async def close(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True)
class Providers:
    """By provider of the device token; tokens of absent ones are refused when they are registered."""

    by_tag: Mapping[Provider, PushProvider]
    shared: SharedHttp = field(repr=False)

    async def close(self) -> None:
        for provider in {id(provider): provider for provider in self.by_tag.values()}.values():
            await provider.close()
        await self.shared.close()


class SharedHttp:
    """The one libcurl client, made when the first provider asks for it."""

    @cached_property
    def client(self) -> CurlHttp2:
        from ntf_server.push.http2 import CurlHttp2

        return CurlHttp2()

    async def close(self) -> None:
        if "client" in vars(self):
            await self.client.close()


def make_providers(config: Config, data_dir: Path, clock: Callable[[], float]) -> Providers:
    shared = SharedHttp()
    providers: dict[Provider, PushProvider] = {Provider.APNS_NULL: NullProvider()}
    providers |= _apns(config, data_dir, shared, clock)
    if config.FCM.service_account_file is not None:
        from ntf_server.push.fcm import FcmConfig, FcmProvider

        fcm = FcmConfig(
            service_account_file=config.FCM.service_account_file,
            endpoint=config.FCM.endpoint,
            token_uri=config.FCM.token_uri or None,
            ca_file=_text(config.FCM.ca_file),
            response_timeout=config.PUSH.response_timeout,
        )
        providers[Provider.FCM] = FcmProvider(fcm, shared.client, clock)
    if config.WEBPUSH.enabled and config.WEBPUSH.vapid_key_file is not None:
        from ntf_server.push.webpush import WebPushConfig, WebPushProvider

        web_push = WebPushConfig(
            vapid_key_file=config.WEBPUSH.vapid_key_file,
            subject=config.WEBPUSH.subject or f"https://{config.TRANSPORT.host}",
            allow_private=config.WEBPUSH.allow_private_addresses,
            ca_file=_text(config.WEBPUSH.ca_file),
            response_timeout=config.PUSH.response_timeout,
        )
        providers[Provider.WEB_PUSH] = WebPushProvider(web_push, shared.client, clock)
    return Providers(providers, shared)


def _apns(
    config: Config, data_dir: Path, shared: SharedHttp, clock: Callable[[], float]
) -> dict[Provider, PushProvider]:
    section = config.APNS
    if section.key_file is None and not section.allow_test_provider:
        return dict.fromkeys(APPLE, NotConfigured())
    named = section.key_id and section.team_id
    if section.key_file is not None and not named and not section.allow_test_provider:
        raise ConfigError("[APNS] key_file needs key_id and team_id")
    from ntf_server.push.apns import ApnsConfig, ApnsProvider, make_apns_client

    apns = ApnsConfig(
        key_file=section.key_file or _test_key(data_dir),
        key_id=section.key_id or TEST_NAME,
        team_id=section.team_id or TEST_NAME,
        topic=section.topic,
        client=cast("Literal['curl', 'aioapns']", section.client),
        port=section.port,
        test_host=section.test_host if section.allow_test_provider else None,
        test_port=section.test_port,
        test_ca_file=_text(section.test_ca_file),
        response_timeout=config.PUSH.response_timeout,
    )
    provider = ApnsProvider(apns, make_apns_client(apns, shared.client), clock)
    real: PushProvider = NotConfigured() if section.key_file is None else provider
    providers = dict.fromkeys(APPLE, real)
    if section.allow_test_provider:
        providers[Provider.APNS_TEST] = provider
    return providers


def _test_key(data_dir: Path) -> Path:
    """A test provider need not know our key: any will do."""
    path = data_dir / TEST_KEY
    if not path.exists():
        make_vapid_key(path)
    return path


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
