"""All parts of the benchmark, in the order in which they run and are shown."""

from __future__ import annotations

from collections.abc import Sequence

from bench.agent import AGENT
from bench.analytics import ANALYTICS
from bench.cluster import CLUSTER
from bench.connections import CONNECTIONS
from bench.handshakes import HANDSHAKES
from bench.journal import JOURNAL
from bench.load import LOAD
from bench.million import MILLION
from bench.moving import MOVING
from bench.part import Part
from bench.protocol import PROTOCOL
from bench.push_clients import PUSH_CLIENTS
from bench.push_path import PUSH_PATH
from bench.ratchet import RATCHET
from bench.router import ROUTER
from bench.router_commands import ROUTER_COMMANDS
from bench.server import COMMANDS, IDLE
from bench.statement_daemons import STATEMENT_DAEMONS
from bench.statements import GATEWAY
from bench.store import STORE
from bench.storm import STORM
from bench.subscriber import RECEIVING, ROUTERS, START_UP
from bench.tls import TLS

PARTS: Sequence[Part] = (
    PROTOCOL,
    TLS,
    COMMANDS,
    IDLE,
    MILLION,
    STORE,
    CLUSTER,
    MOVING,
    START_UP,
    ROUTERS,
    RECEIVING,
    PUSH_CLIENTS,
    PUSH_PATH,
    LOAD,
    STORM,
    JOURNAL,
    ANALYTICS,
    ROUTER,
    ROUTER_COMMANDS,
    RATCHET,
    AGENT,
    HANDSHAKES,
    CONNECTIONS,
    GATEWAY,
    STATEMENT_DAEMONS,
)
