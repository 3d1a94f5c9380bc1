"""The push providers that a configuration asks for. Modules and libraries of the others are not loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

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

    async def deliver(self, token: DeviceToken, notification: PushNotification, push_id: str) -> None:
        raise ProviderRefusesUs("APNs has no key: set [APNS] key_file, key_id and team_id")

    async def close(self) -> None:
        """Nothing to close."""


@runtime_checkable
class HasKey(Protocol):
    def read_key_again(self) -> None: ...


@dataclass(frozen=True)
class Providers:
    """By provider of the device token; tokens of absent ones are refused when they are registered."""

    by_tag: Mapping[Provider, PushProvider]
    shared: SharedHttp = field(repr=False)

    @property
    def set_up(self) -> frozenset[str]:
        """Tags of those that can reach a device."""
        return frozenset(provider.tag for provider in self.reachable)

    @property
    def reachable(self) -> frozenset[Provider]:
        """Those that can reach a device."""
        return frozenset(
            provider
            for provider, pushes in self.by_tag.items()
            if not isinstance(pushes, (NotConfigured, NullProvider))
        )

    def read_keys_again(self) -> None:
        for provider in self._each():
            if isinstance(provider, HasKey):
                provider.read_key_again()

    async def close(self) -> None:
        for provider in self._each():
            await provider.close()
        await self.shared.close()

    def _each(self) -> list[PushProvider]:
        """One may serve several kinds of tokens."""
        return list({id(provider): provider for provider in self.by_tag.values()}.values())


class SharedHttp:
    """The one libcurl client, made when the first provider asks for it."""

    def __init__(self, idle_connections: int) -> None:
        self._idle_connections = idle_connections

    @cached_property
    def client(self) -> CurlHttp2:
        from ntf_server.push.http2 import CurlHttp2

        return CurlHttp2(max_idle=self._idle_connections)

    async def close(self) -> None:
        if "client" in vars(self):
            await self.client.close()


def make_providers(
    config: Config, data_dir: Path, clock: Callable[[], float], *, idle_connections: int = 0
) -> Providers:
    shared = SharedHttp(idle_connections)
    timeout = config.PUSH.response_timeout
    providers: dict[Provider, PushProvider] = {Provider.APNS_NULL: NullProvider()}
    providers |= _apns(config, data_dir, shared, clock)
    if config.FCM.service_account_file is not None:
        from ntf_server.push.fcm import FcmProvider

        providers[Provider.FCM] = FcmProvider(config.FCM, shared.client, clock, timeout)
    if config.WEBPUSH.enabled and config.WEBPUSH.vapid_key_file is not None:
        from ntf_server.push.webpush import WebPushProvider

        subject = config.WEBPUSH.subject or f"https://{config.TRANSPORT.host}"
        web_push = replace(config.WEBPUSH, subject=subject)
        providers[Provider.WEB_PUSH] = WebPushProvider(web_push, shared.client, clock, timeout)
    return Providers(providers, shared)


def _apns(
    config: Config, data_dir: Path, shared: SharedHttp, clock: Callable[[], float]
) -> dict[Provider, PushProvider]:
    apns = config.APNS
    if apns.key_file is None and not apns.allow_test_provider:
        return dict.fromkeys(APPLE, NotConfigured())
    if apns.key_file is not None and not (apns.key_id and apns.team_id) and not apns.allow_test_provider:
        raise ConfigError("[APNS] key_file needs key_id and team_id")
    from ntf_server.push.apns import ApnsProvider, make_apns_client

    named = replace(
        apns,
        key_file=apns.key_file or _test_key(data_dir),
        key_id=apns.key_id or TEST_NAME,
        team_id=apns.team_id or TEST_NAME,
    )
    client = make_apns_client(named, shared.client)
    provider = ApnsProvider(named, client, clock, config.PUSH.response_timeout)
    real: PushProvider = NotConfigured() if apns.key_file is None else provider
    providers = dict.fromkeys(APPLE, real)
    if apns.allow_test_provider:
        providers[Provider.APNS_TEST] = provider
    return providers


def _test_key(data_dir: Path) -> Path:
    """A test provider need not know our key: any will do."""
    path = data_dir / TEST_KEY
    if not path.exists():
        make_vapid_key(path)
    return path
