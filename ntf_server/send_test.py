"""`ntf-server test`: one real push to one device, and what its provider said."""

from __future__ import annotations

import argparse
import asyncio
import json
import uuid
from urllib.parse import urlsplit

from ntf_server import setup
from ntf_server.clock import SystemClock
from ntf_server.config import ConfigError, configured
from ntf_server.push.provider import CheckMessages, PushError
from ntf_server.push.providers import make_providers
from protocol.device_token import ApnsToken, DeviceToken, FcmToken, Provider, WebPushToken
from protocol.encoding import unb64
from protocol.errors import DecodeError

APNS = {"apns": Provider.APNS_PROD, "apns-dev": Provider.APNS_DEV, "apns-test": Provider.APNS_TEST}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds, option = [*APNS, "fcm", "webpush"], parser.add_argument
    option("--provider", choices=kinds, default="apns", help="of the device (%(default)s)")
    about = "the device token; for webpush the subscription as JSON, with endpoint and keys"
    option("--token", required=True, help=about)


def run(args: argparse.Namespace) -> int:
    return asyncio.run(_send(args))


async def _send(args: argparse.Namespace) -> int:
    config = configured(args.config_dir)
    token = _device(args.provider, args.token)
    providers = make_providers(config, setup.data_folder(config), SystemClock().now)
    try:
        if token.provider not in providers.by_tag:
            section = args.provider.partition("-")[0].upper()
            raise ConfigError(f"{args.provider} is not set up; see [{section}] of the configuration")
        await providers.by_tag[token.provider].deliver(token, CheckMessages(), str(uuid.uuid4()))
    except PushError as error:
        print(f"{args.provider} did not take it: {type(error).__name__}, {error.reason}")
        return 1
    finally:
        await providers.close()
    print(f"{args.provider} took it: the app wakes up and looks for messages; nothing is shown.")
    return 0


def _device(provider: str, text: str) -> DeviceToken:
    if provider in APNS:
        return ApnsToken(APNS[provider], text.encode())
    return FcmToken(text.encode()) if provider == "fcm" else _subscription(text)


def _subscription(text: str) -> WebPushToken:
    """As browsers and UnifiedPush apps print it."""
    try:
        values = json.loads(text)
        url = urlsplit(values["endpoint"])
        auth, point = (unb64(values["keys"][name].encode()) for name in ("auth", "p256dh"))
        path = url.path + (f"?{url.query}" if url.query else "")
        port = "" if url.port is None else str(url.port)
        return WebPushToken((url.hostname or "").encode(), port.encode(), path.encode(), auth, point)
    except (ValueError, KeyError, TypeError, AttributeError, DecodeError):
        raise ConfigError('--token is not a subscription like {"endpoint": …, "keys": {…}}') from None
