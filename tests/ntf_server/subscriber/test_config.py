"""What the defaults promise, and how settings reach the network."""

from __future__ import annotations

import pytest

from ntf_server.config import SubscriberConfig
from ntf_server.router import LONGEST_DELAY
from ntf_server.subscriber import network_config
from smp_client.dialer import Dialer, NetworkConfig


def test_defaults_keep_the_promises() -> None:
    config = SubscriberConfig()
    assert config.ping_interval + config.ping_timeout <= 80, "half-open connections are noticed in time"
    assert config.connect_timeout + LONGEST_DELAY <= 60, "a router that moved is found within a minute"
    assert config.use_service_credentials


@pytest.mark.parametrize(
    ("config", "network"),
    [
        (SubscriberConfig(), NetworkConfig()),
        (SubscriberConfig(socks_proxy="h:1"), NetworkConfig(socks_proxy="socks5://h:1")),
        (
            SubscriberConfig(socks_proxy="socks5://u:p@h:1", socks_mode="always", host_mode="onion"),
            NetworkConfig(socks_proxy="socks5://u:p@h:1", proxy_all=True, prefer_onion=True),
        ),
    ],
)
def test_network(config: SubscriberConfig, network: NetworkConfig) -> None:
    assert network_config(config) == network
    Dialer(network)


def test_the_proxys_password_is_not_shown() -> None:
    assert "secret" not in repr(SubscriberConfig(socks_proxy="socks5://user:secret@host:1"))
    assert "secret" not in repr(NetworkConfig(socks_proxy="socks5://user:secret@host:1"))
