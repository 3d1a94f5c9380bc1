"""The command line: `smp-router init`, `smp-router cert`, `smp-router start`, `smp-router control`."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from protocol.addresses import SMP_PORT, SmpServer
from smp_router.config import ConfigError, FileConfig, load_config, within_open_files, write_config
from smp_router.control import ControlError, ask, control_socket
from smp_router.router import Router, utc_now
from smp_router.state import RouterState
from store.errors import StoreError
from transport.cancellation import stop_signal
from transport.certificates import (
    CA_KEY,
    SERVER_CERTIFICATE,
    Credentials,
    KeyAlgorithm,
    load_server_files,
    make_ca,
    make_online,
    renew_online,
    write_server_files,
)
from transport.core_dumps import forbid_core_dumps
from transport.errors import TransportError
from transport.hosts import bracketed, client_port_option, host_option
from transport.open_files import open_file_limit, raise_limit


def init(arguments: argparse.Namespace) -> int:
    """Make the router's identity and configuration."""
    config_dir: Path = arguments.config_dir
    algorithm = KeyAlgorithm[arguments.algorithm]
    now = utc_now()
    ca_certificate, ca_key = make_ca(algorithm, "SMP router CA", now)
    online = make_online(ca_certificate, ca_key, algorithm, arguments.ip[0], now)
    write_server_files(config_dir, ca_certificate, ca_key, online)
    write_config(config_dir, ",".join(arguments.ip), arguments.port)
    print(SmpServer(tuple(map(bracketed, arguments.ip)), str(arguments.port), online.identity))
    print(f"Keep {config_dir / CA_KEY} elsewhere: the running router does not need it.")
    return 0


def start(arguments: argparse.Namespace) -> int:
    """Run the router until SIGTERM or SIGINT."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    raise_limit()
    forbid_core_dumps()
    credentials = load_server_files(arguments.config_dir)
    asyncio.run(_run(arguments, load_config(arguments.config_dir), credentials))
    return 0


async def _run(arguments: argparse.Namespace, file: FileConfig, credentials: Credentials) -> None:
    stop = stop_signal()
    config = within_open_files(file.router, open_file_limit())
    if arguments.interval is not None:
        config = replace(config, interval=arguments.interval)
    async with AsyncExitStack() as stack:
        state = RouterState(credentials)
        if arguments.store is not None:
            from smp_router.sqlite_records import stored_state  # imports are half of the time to start

            state = await stack.enter_async_context(
                stored_state(arguments.store, credentials, restore_messages=config.restore_messages)
            )
        router = await stack.enter_async_context(
            Router.start(
                config,
                host=file.hosts[0],
                more_hosts=file.hosts[1:],
                port=file.port,
                listen=file.listen,
                state=state,
            )
        )
        if arguments.control is not None:
            await stack.enter_async_context(control_socket(router, arguments.control))
        if file.http is not None:
            from smp_router.information import RouterPages

            pages = RouterPages(router, file.information)
            await pages.open(*file.http)
            stack.push_async_callback(pages.close)
        print(router.address, flush=True)
        await stop.wait()


def cert(arguments: argparse.Namespace) -> int:
    """Renew the online certificate; the address stays."""
    config_dir: Path = arguments.config_dir
    host = load_config(config_dir).hosts[0]
    algorithm = None if arguments.algorithm is None else KeyAlgorithm[arguments.algorithm]
    if not (config_dir / CA_KEY).exists():
        raise ConfigError(f"{config_dir / CA_KEY} is missing: copy it back from where it is kept")
    renew_online(config_dir, algorithm, host, utc_now())
    print(f"New online certificate: {config_dir / SERVER_CERTIFICATE}. Restart the router to use it.")
    print(f"The router's address is unchanged. Keep {CA_KEY} elsewhere again.")
    return 0


def control(arguments: argparse.Namespace) -> int:
    """Ask a running router for a fault or load."""
    answer = asyncio.run(ask(arguments.control, arguments.request))
    print(json.dumps(answer, indent=2))
    return 0 if answer["ok"] else 1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="smp-router", description="An SMP router, to host oneself and for development."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("init", help="make certificates and configuration")
    command.add_argument(
        "--ip",
        type=_hosts_option,
        required=True,
        help="address or name that clients connect to; several, such as an onion address, with commas",
    )
    command.add_argument(
        "--port", type=client_port_option, default=SMP_PORT, help="that clients connect to (%(default)s)"
    )
    command.add_argument("--config-dir", type=Path, required=True, help="folder to make them in")
    command.add_argument(
        "-a",
        "--algorithm",
        choices=[a.name for a in KeyAlgorithm],
        default=KeyAlgorithm.ED448.name,
        help="of the certificates (%(default)s)",
    )
    command.set_defaults(run=init)
    command = commands.add_parser("cert", help="renew the online certificate with ca.key")
    command.add_argument("--config-dir", type=Path, required=True, help="folder that init has made")
    command.add_argument(
        "-a", "--algorithm", choices=[a.name for a in KeyAlgorithm], help="of the new certificate (the CA's)"
    )
    command.set_defaults(run=cert)
    command = commands.add_parser("start", help="run until SIGTERM or SIGINT")
    command.add_argument("--config-dir", type=Path, required=True, help="folder that init has made")
    command.add_argument("--control", type=Path, help="Unix socket for faults and load")
    command.add_argument("--interval", type=_seconds, help="between rounds of NMSG delivery; 0: at once")
    command.add_argument("--store", type=Path, help="database that keeps queues, messages and services")
    command.set_defaults(run=start)
    command = commands.add_parser("control", help="send one request to a router's control socket")
    command.add_argument("--control", type=Path, required=True, help="the socket that start was given")
    command.add_argument("request", help='JSON, for example {"do": "status"}')
    command.set_defaults(run=control)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib import metadata

        print(f"{parser.prog} {metadata.version('ntf-server')}")
        parser.exit()


def _hosts_option(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(host_option(host) for host in text.split(",")))


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 <= (seconds := float(text)) < float("inf"):
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")


def main() -> None:
    arguments = make_parser().parse_args()
    try:
        sys.exit(arguments.run(arguments))
    except (ConfigError, ControlError, StoreError, TransportError, OSError) as error:
        sys.exit(f"smp-router: {error}")


if __name__ == "__main__":
    main()
