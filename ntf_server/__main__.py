"""`ntf-server`: the command line."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import ipaddress
import logging
import os
import socket
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from ntf_server import backup, checks, setup, workers
from ntf_server.asking import confirmed
from ntf_server.clock import utc_now
from ntf_server.config import CONFIG_FILE, Config, ConfigError, StoreConfig, configured, unknown_variables
from ntf_server.daemon import run_until_signal
from ntf_server.data_folder import FolderInUse, held, holder
from ntf_server.logs import set_up_logging
from ntf_server.push.credentials import KeyFileError
from ntf_server.status import print_status
from ntf_server.stores import check_postgres_url
from protocol.addresses import NTF_PORT
from store.interface import StoreError
from store.journal_schema import JournalKeyError
from transport.cancellation import first_cause
from transport.certificates import CA_KEY, SERVER_CERTIFICATE, KeyAlgorithm, renew_online
from transport.errors import TransportError
from transport.hosts import client_port_option, host_option, number_option

logger = logging.getLogger(__name__)
EXPECTED = (
    backup.BackupError,
    ConfigError,
    FolderInUse,
    StoreError,
    TransportError,
    KeyFileError,
    JournalKeyError,
    OSError,
    sqlite3.Error,
)
"What an operator can cause: told in one line, without a traceback."
MAX_WORKERS = 256
ELSEWHERE = (
    ("migrate", "ntf_server.migration", "change the database's schema, or move to another database"),
    ("import", "ntf_server.import_command", "take over the data of the deployed server"),
    ("doctor", "ntf_server.doctor", "look for everything that can be wrong"),
    ("test", "ntf_server.send_test", "send one real push to one device"),
    ("statements", "ntf_server.statements_command", "answer questions about the statement gateway"),
)
"Name, module and `--help`."
DEMONSTRATIONS = (
    ("demo", "ntf_demo.demo", "see one notification on its whole way, on this machine alone"),
    ("fake-push", "ntf_demo.fake_push.program", "run a push provider for tests: APNs, FCM and Web Push"),
    ("fake-node", "ntf_demo.fake_node.program", "run a statement store's node for tests"),
)
"Likewise; they need no configuration."


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        cause = first_cause(error)
        if not isinstance(cause, EXPECTED):
            raise
        # In one piece: the thread that writes the log would put its lines between two.
        sys.stderr.write(f"ntf-server: {checks.remedied(_one_line(cause))}\n")
        return workers.USAGE


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


class CommandParser(argparse.ArgumentParser):
    """A command, or the name of the module that has its `add_arguments` and `run`: loaded when it is asked
    for, so that the daemon does not carry a demonstration."""

    def __init__(self, *args: Any, module: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self._module = module

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        if self._module:
            program = importlib.import_module(self._module)
            program.add_arguments(self)
            self.set_defaults(run=program.run)
        return super().parse_known_args(*args, **options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ntf-server",
        description="A notification server for SMP: watches queues, wakes devices with encrypted pushes.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {metadata.version('ntf-server')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    folders = CommandParser(add_help=False)
    about = "folder of the configuration and the identity"
    _add_folder(folders, "--config-dir", about, "NTF_SERVER_CFG_PATH", "~/.config/ntf-server")
    for name, (add_options, run, about) in {
        "init": (_add_init, _init, "make configuration, identity and keys"),
        "start": (_add_start, _start, "run the server"),
        "cert": (_add_cert, _cert, "renew the online certificate"),
        "backup": (_add_backup, _backup, "copy the data of a running server"),
        "restore": (_add_restore, _restore, "put a backup in place"),
        "status": (lambda _: None, _status, "show configuration, store and liveness"),
        "delete": (_add_delete, _delete, "remove configuration, identity and data"),
    }.items():
        command = commands.add_parser(name, parents=[folders], help=about)
        add_options(command)
        command.set_defaults(run=run)
    for name, module, about in ELSEWHERE:
        commands.add_parser(name, parents=[folders], module=module, help=about)
    for name, module, about in DEMONSTRATIONS:
        commands.add_parser(name, module=module, help=about)
    return parser


def _add_folder(parser: argparse.ArgumentParser, name: str, about: str, variable: str, default: str) -> None:
    folder = Path(os.environ.get(variable, default)).expanduser()
    parser.add_argument(name, type=Path, default=folder, help=f"{about} (%(default)s; env {variable})")


def _add_data_dir(parser: argparse.ArgumentParser) -> None:
    default = "~/.local/state/ntf-server"
    _add_folder(parser, "--data-dir", "folder of the database", "NTF_SERVER_LOG_PATH", default)


def _add_algorithm(parser: argparse.ArgumentParser, about: str, default: KeyAlgorithm | None = None) -> None:
    words = ("-a", "--algorithm")
    parser.add_argument(*words, type=_algorithm, default=default, metavar="ED25519|ED448", help=about)


def _add_init(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--ip", type=_ip, help="address of the server, as clients will know it")
    about = "name of the server, as clients will know it (this machine's name)"
    where.add_argument("--fqdn", type=host_option, help=about)
    about = "that clients will connect to (%(default)s)"
    parser.add_argument("--port", type=client_port_option, default=NTF_PORT, help=about)
    _add_data_dir(parser)
    _add_algorithm(parser, "of the certificates (ED448)", KeyAlgorithm.ED448)
    kinds = ("sqlite|postgres", "URL")
    about = "kind of database (sqlite); postgres with postgresql://user:password@host:port/database"
    parser.add_argument("--store", nargs="+", default=["sqlite"], metavar=kinds, help=about)
    parser.add_argument("--force", action="store_true", help="replace an existing configuration and identity")


def _algorithm(text: str) -> KeyAlgorithm:
    try:
        return KeyAlgorithm[text.upper()]
    except KeyError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither ED25519 nor ED448") from None


def _ip(text: str) -> str:
    try:
        address = ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an IP address; for a name use --fqdn") from None
    if address.is_unspecified or address.is_multicast or getattr(address, "scope_id", None):
        raise argparse.ArgumentTypeError(f"{text!r} is not an address that clients can connect to")
    return str(address)


def _init(args: argparse.Namespace) -> int:
    options = setup.InitOptions(
        config_dir=args.config_dir,
        data_dir=args.data_dir,
        host=args.ip or args.fqdn or socket.getfqdn(),
        port=args.port,
        algorithm=args.algorithm,
        store=_store(args.store),
    )
    now = utc_now()
    if args.force:
        _refuse_while_running(args)
    if args.force and (replaced := setup.put_aside(args.config_dir, setup.CONFIG_FILES, now)):
        print(f"The old configuration and identity: {replaced}")
    config = setup.init(options, now)
    if not (args.ip or args.fqdn):
        print(f"Neither --fqdn nor --ip was given: clients are told this machine's name, {options.host}.")
    print(f"Configuration: {args.config_dir / CONFIG_FILE}")
    print(f"Keep {args.config_dir / CA_KEY} offline: whoever has it can be this server.")
    print(f"Web Push public key: {setup.vapid_key_text(config)}")
    print(f"Server address: {setup.address(args.config_dir, config)}")
    return 0


def _store(words: Sequence[str]) -> StoreConfig:
    match words:
        case ["sqlite"]:
            return StoreConfig()
        case ["postgres", url]:
            return StoreConfig(database="postgres", url=check_postgres_url(url, "--store postgres URL"))
    raise ConfigError("--store takes sqlite, or postgres and its URL")


def _refuse_while_running(args: argparse.Namespace) -> None:
    try:
        data_dir = configured(args.config_dir).STORE.data_dir
    except ConfigError:
        return  # nothing runs with it
    if data_dir is not None and (process := holder(data_dir)) is not None:
        raise FolderInUse(f"process {process} runs with this configuration: stop it first")


def _add_start(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--maintenance", action="store_true", help="check and migrate everything, do not serve")
    option("--log-level", choices=["debug", "info", "warning", "error"], help="instead of [LOG] level")
    number = number_option(1, MAX_WORKERS, f"a number from 1 to {MAX_WORKERS}")
    about = "so many daemons on this machine, one for each core; needs PostgreSQL"
    option("--workers", type=number, help=about)
    about = "end when standard input ends: how --workers starts its workers"
    option(workers.WORKER, action="store_true", help=about)


def _start(args: argparse.Namespace) -> int:
    def load() -> Config:
        config = configured(args.config_dir)
        return replace(config, LOG=replace(config.LOG, level=args.log_level or config.LOG.level))

    config = load()
    set_up_logging(config.LOG)
    for line in unknown_variables(os.environ):
        logger.warning("%s", line)
    for problem in (*checks.setting_problems(config), *checks.file_problems(config)):
        raise ConfigError(problem)
    if args.workers is not None and not args.maintenance:
        workers.check(config, args.workers)
        level = ("--log-level", args.log_level) if args.log_level else ()
        each = ("--config-dir", str(args.config_dir), *level)
        return asyncio.run(workers.WorkerProcesses(config, each).run(args.workers))
    try:
        return asyncio.run(
            run_until_signal(args.config_dir, load, maintenance=args.maintenance, is_worker=args.worker)
        )
    except Exception as error:
        if isinstance(first_cause(error), OSError):
            for problem in checks.port_problems(config):
                raise ConfigError(problem) from None
        raise


def _add_cert(parser: argparse.ArgumentParser) -> None:
    _add_algorithm(parser, "of the new certificate (the CA's)")


def _cert(args: argparse.Namespace) -> int:
    config = configured(args.config_dir)
    if not (ca_key := args.config_dir / CA_KEY).exists():
        raise ConfigError(f"{ca_key} is not here; bring it from where it is kept")
    renew_online(args.config_dir, args.algorithm, config.TRANSPORT.host, utc_now())
    setup.give_to_owner(args.config_dir, setup.CONFIG_FILES)
    print(f"New online certificate: {args.config_dir / SERVER_CERTIFICATE}. SIGHUP makes the server use it.")
    print(f"The server's address is unchanged. Keep {CA_KEY} offline again.")
    return 0


def _add_backup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a new folder for the copy")
    about = "also configuration, certificates and keys: enough to move"
    parser.add_argument("--identity", action="store_true", help=about)


def _backup(args: argparse.Namespace) -> int:
    config, now = configured(args.config_dir), utc_now()
    made = backup.make_backup(args.config_dir, config, args.folder, with_identity=args.identity, now=now)
    print(f"{args.folder}: {', '.join(made.files)}; schema version {made.schema}, checked")
    return 0


def _add_restore(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="what `backup` made")
    _add_data_dir(parser)


def _restore(args: argparse.Namespace) -> int:
    config, replaced = backup.restore_backup(args.folder, args.config_dir, args.data_dir, utc_now())
    print(f"Restored: {setup.database_path(config)}")
    if replaced is not None:
        print(f"What was there before: {replaced}")
    print(f"Server address: {setup.address(args.config_dir, config)}")
    return 0


def _status(args: argparse.Namespace) -> int:
    return asyncio.run(print_status(args.config_dir, configured(args.config_dir)))


def _add_delete(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="do not ask")


def _delete(args: argparse.Namespace) -> int:
    config_file = args.config_dir / CONFIG_FILE
    if not config_file.exists():
        raise ConfigError(f"{config_file} does not exist: nothing to delete")
    data_dir = configured(args.config_dir).STORE.data_dir
    question = f"Remove the configuration and identity in {args.config_dir} and all data in {data_dir}?"
    if not (args.yes or confirmed(question)):
        return 1
    with held(data_dir) if data_dir is not None and data_dir.is_dir() else nullcontext():
        for file in setup.delete(args.config_dir, data_dir):
            print(f"removed {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
