"""`ntf-agent`: the command line of the agent."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from agent.cli import connections, device, notifications
from agent.cli.running import Action, address, raw
from agent.errors import AgentError
from protocol.addresses import parse_smp_server_with_password
from smp_client.proxy import ProxyPolicy
from store.interface import StoreError
from transport.cancellation import first_cause

EPILOG = """\
a conversation, with the addresses of `ntf-server demo --keep`:
  ntf-agent --folder alice create --router smp://… --name Alice     prints a link
  ntf-agent --folder bob join 'LINK' --router smp://… --name Bob
  ntf-agent --folder alice receive --follow                         lets Bob in, shows what he writes
  ntf-agent --folder bob send 1 'Hello'
"""


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    code = 0
    try:
        asyncio.run(args.action(args))
    except* (AgentError, StoreError) as problems:
        print(f"ntf-agent: {first_cause(problems)}", file=sys.stderr)
        code = 1
    except* TimeoutError:
        print("ntf-agent: no answer in time; what is left is done by the next command", file=sys.stderr)
        code = 1
    except* KeyboardInterrupt:
        code = 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ntf-agent",
        description="Conversations over SMP routers on the command line: links, messages, notifications.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {metadata.version('ntf-server')}")
    _options(parser)
    parser.set_defaults(
        folder=Path(os.environ.get("NTF_AGENT_PATH", "~/.local/state/ntf-agent")).expanduser(),
        timeout=15.0,
        router=None,
        name=b"",
        json=False,
        key_file=None,
        services=False,
        separate_sessions=False,
        cover_traffic=None,
        socks_proxy=None,
        onion=None,
        private_servers=False,
        proxy=ProxyPolicy.UNKNOWN,
    )
    anywhere = argparse.ArgumentParser(add_help=False)
    _options(anywhere)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = _adder(commands, anywhere)
    connections.add_commands(add)
    device.add_commands(add)
    group = commands.add_parser("notifications", help="the device's token, and what a push leads to")
    notifications.add_commands(_adder(group.add_subparsers(required=True, metavar="COMMAND"), anywhere))
    return parser


def _options(parser: argparse.ArgumentParser) -> None:
    """Before or after the command."""
    options: dict[str, dict[str, object]] = {
        "--folder": {
            "type": Path,
            "help": "where this device keeps its keys and state"
            " (~/.local/state/ntf-agent; env NTF_AGENT_PATH)",
        },
        "--router": {
            "type": address("smp", parse_smp_server_with_password),
            "action": "append",
            "metavar": "SMP_ADDRESS",
            "help": "where to make queues (again for more), as smp://IDENTITY@HOST or"
            " smp://IDENTITY:PASSWORD@HOST; remembered, with its password",
        },
        "--name": {"type": raw, "help": "what the other side is told about you"},
        "--json": {"action": "store_true", "help": "one JSON object per line"},
        "--key-file": {
            "type": Path,
            "metavar": "FILE",
            "help": "the key that the state is encrypted with (env NTF_AGENT_KEY)",
        },
        "--services": {
            "action": "store_true",
            "help": "subscribe all queues of a router at once: for thousands of connections",
        },
        "--proxy": {
            "type": ProxyPolicy,
            "choices": list(ProxyPolicy),
            "metavar": "{always,unknown,never}",
            "help": "send through a router of ours, which hides where we are:"
            " to all routers, to those that are not ours (unknown, the default), to none (never)",
        },
        "--private-servers": {
            "action": "store_true",
            "help": "connect to routers that others name also in private networks: for development",
        },
        "--socks-proxy": {
            "metavar": "URL",
            "help": "reach all servers through this SOCKS proxy, for example socks5://127.0.0.1:9050 (Tor)",
        },
        "--onion": {
            "choices": ["prefer", "require"],
            "metavar": "{prefer,require}",
            "help": "with --socks-proxy: connect to the .onion host of a server first, or to no other host",
        },
        "--separate-sessions": {
            "action": "store_true",
            "help": "a connection to the router for each queue, through another circuit with --socks-proxy:"
            " routers cannot tell which queues are yours; costs a connection each",
        },
        "--cover-traffic": {
            "type": float,
            "metavar": "SECONDS",
            "help": "send PINGs on each connection to a router at random times, SECONDS apart on average",
        },
        "--timeout": {"type": float, "help": "seconds to wait for a server (15)"},
    }
    for name, values in options.items():
        parser.add_argument(name, default=argparse.SUPPRESS, **values)  # type: ignore[arg-type]


def _adder(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], options: argparse.ArgumentParser
) -> Callable[..., argparse.ArgumentParser]:
    def add(name: str, action: Action, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", parents=[options]
        )
        command.set_defaults(action=action)
        return command

    return add


if __name__ == "__main__":
    sys.exit(main())
