"""How routers are watched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from smp_client.agent import AgentConfig
from smp_client.dialer import NetworkConfig
from smp_client.requests import SessionTiming


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberConfig:
    """Times are seconds."""

    use_service_credentials: bool = True
    "Log in to routers with a certificate, so that all queues are subscribed with one command."
    socks_proxy: str | None = field(default=None, repr=False)
    "`host:port`, or `socks5://user:password@host:port`."
    socks_mode: Literal["onion", "always"] = "onion"
    "For which hosts the proxy is used."
    host_mode: Literal["public", "onion"] = "public"
    "Which of a router's hosts are tried first."
    own_hosts: tuple[str, ...] = ()
    "Routers of the same operator: counted one by one in the metrics."
    connect_timeout: float = 45.0
    command_timeout: float = 30.0
    ping_interval: float = 60.0
    ping_timeout: float = 15.0
    first_delay: float = 1.0
    longest_delay: float = 10.0
    identity_delay: float = 60.0
    "Between attempts while somebody else answers at a router's address."
    takeover_first_delay: float = 60.0
    takeover_longest_delay: float = 3600.0
    "Between attempts after another instance took the service's subscriptions over."
    service_reset_interval: float = 600.0
    "Credentials that a router refuses are replaced at most this often."
    verify_interval: float = 3600.0
    "Between comparisons of our queues with a router's, while a session lasts."
    unanswered_delay: float = 10.0
    "Before a queue is asked for again whose request was not answered."
    longest_rest: float = 60.0
    "Between looks at what is due."
    batch_size: int = 900
    waiting_limit: int = 10_000
    "New queues kept in memory per router; more are found in the store."
    status_interval: float = 5.0
    "Between updates of the metrics about connections."

    def network(self) -> NetworkConfig:
        proxy = self.socks_proxy
        if proxy is not None and "://" not in proxy:
            proxy = f"socks5://{proxy}"
        return NetworkConfig(
            socks_proxy=proxy,
            proxy_all=self.socks_mode == "always",
            prefer_onion=self.host_mode == "onion",
        )

    def agent(self) -> AgentConfig:
        return AgentConfig(
            connect_timeout=self.connect_timeout,
            timing=SessionTiming(
                answer=self.command_timeout, ping_after=self.ping_interval, ping_limit=self.ping_timeout
            ),
            first_delay=self.first_delay,
            longest_delay=self.longest_delay,
            identity_delay=self.identity_delay,
        )
