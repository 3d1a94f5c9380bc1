"""How often anyone may make the server push to a device that it has not verified.

TNEW and TRPL name a device, and the server pushes a code to it: without a limit, a cannon to be pointed at a
stranger's phone or at a Web Push host. Pure: time is an argument, memory is bounded, no device token is kept.
"""

from __future__ import annotations

import hashlib
from urllib.parse import unquote_to_bytes

from ntf_server.config import LimitsConfig
from ntf_server.limits import SECONDS_PER_HOUR
from ntf_server.push.provider import destination_of
from protocol.device_token import DeviceToken, WebPushToken, encode_device_token
from transport.limits import UNLIMITED, Rate, RateLimiter

KEY_SIZE = 16
DEFAULT_PORT = b"443"


class VerificationLimits:
    """Counts per device and hour, and per Web Push host and hour; of this process alone."""

    def __init__(self, config: LimitsConfig) -> None:
        self._devices, self._hosts = RateLimiter(UNLIMITED), RateLimiter(UNLIMITED)
        self.use(config)

    def use(self, config: LimitsConfig) -> None:
        """What was used up stays used up."""
        self._devices.rate = Rate.over(config.device_verifications_per_hour, SECONDS_PER_HOUR)
        self._hosts.rate = Rate.over(config.host_verifications_per_hour, SECONDS_PER_HOUR)

    def allows(self, device: DeviceToken, now: float) -> bool:
        """Whether a verification push to the device may be made now; if so, it counts."""
        if not self._devices.allows(device_key(device), now):
            return False
        return not isinstance(device, WebPushToken) or self._hosts.allows(destination_of(device), now)


def device_key(device: DeviceToken) -> bytes:
    """The same for one device however it is written, and nothing that anybody could push to."""
    if isinstance(device, WebPushToken):  # its keys are free to choose: the endpoint is what gets the push
        text = b"\0".join((destination_of(device).host, _port(device.port), unquote_to_bytes(device.path)))
    else:
        text = encode_device_token(device)
    return hashlib.blake2b(text, digest_size=KEY_SIZE).digest()


def _port(port: bytes) -> bytes:
    return port.lstrip(b"0") or DEFAULT_PORT
