"""What operators get wrong, and the line that each mistake gets: one line, exit code 2, no traceback.

`docs/mistakes.md` shows all of them, with their lines; `python -m tests.docs.reference` writes it.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import socket
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from datetime import timedelta
from io import StringIO
from pathlib import Path

import pytest

from ntf_server import checks, setup
from ntf_server.__main__ import main
from ntf_server.clock import utc_now
from tests.ntf_server.test_cli import ANY_PORT, init, needs_setpriv, ntf_server, started, without
from transport.certificates import CA_CERTIFICATE, KeyAlgorithm, make_ca, make_online, write_server_files

Prepare = Callable[["Place"], object]


@dataclass
class Place:
    """A server that was made and is about to be started wrongly."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    @property
    def config_dir(self) -> Path:
        return self.folder / "c"

    @property
    def data_dir(self) -> Path:
        return self.folder / "d"

    @property
    def ini(self) -> Path:
        return self.config_dir / "ntf-server.ini"

    def set(self, section: str, line: str) -> None:
        """A line of the configuration, at its end."""
        text = self.ini.read_text()
        key = line.partition("=")[0].strip()
        text = re.sub(rf"^{key} =.*\n", "", text, flags=re.MULTILINE) if section == "TRANSPORT" else text
        self.ini.write_text(f"{text}\n[{section}]\n{line}\n")

    def setenv(self, name: str, value: object) -> None:
        self.monkeypatch.setenv(name, str(value))

    def write(self, name: str, content: str) -> Path:
        path = self.folder / name
        path.write_text(content)
        return path


def setting(section: str, line: str) -> Prepare:
    return lambda place: place.set(section, line)


def variable(name: str, value: str) -> Prepare:
    return lambda place: place.setenv(name, value)


def file_setting(section: str, key: str, content: str) -> Prepare:
    return lambda place: place.set(section, f"{key} = {place.write('file', content)}")


@dataclass(frozen=True)
class Mistake:
    """`what` was done, how to do it, and what the line must say. `arguments` if it is not `start`."""

    what: str
    prepare: Prepare
    says: str
    arguments: tuple[str, ...] = ("start",)


def nothing(place: Place) -> None:
    """The mistake is in the arguments."""


def busy(variable: str) -> Prepare:
    def prepare(place: Place) -> None:
        TAKEN.append(socket.create_server(("127.0.0.1", 0)))
        place.setenv(variable, TAKEN[-1].getsockname()[1])

    return prepare


TAKEN: list[socket.socket] = []
"Ports that somebody else has, until the test ends."


def another_program(place: Place) -> None:
    database = sqlite3.connect(place.data_dir / "ntf-server.db")
    database.execute("CREATE TABLE mine (x)")
    database.execute("PRAGMA application_id = 42")
    database.commit()
    database.close()


def broken(name: str) -> Prepare:
    def prepare(place: Place) -> None:
        (place.config_dir / name).write_text("broken")

    return prepare


def missing(name: str) -> Prepare:
    return lambda place: (place.config_dir / name).unlink()


def no_data_dir(place: Place) -> None:
    place.ini.write_text(re.sub(r"^data_dir =.*\n", "", place.ini.read_text(), flags=re.MULTILINE))


def data_dir_is_a_file(place: Place) -> None:
    place.setenv("NTF_STORE_DATA_DIR", place.write("file", ""))


def rsa_key(place: Place) -> None:
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(65537, 2048)
    pem = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    apns(place, pem.decode())


def apns(place: Place, content: str) -> None:
    place.set("APNS", f"key_file = {place.write('key.p8', content)}\nkey_id = K\nteam_id = T")


def no_journald(place: Place) -> None:
    place.monkeypatch.setattr(checks, "JOURNALD_SOCKET", "/no/such/socket")
    place.set("LOG", "format = journald")


def same_port(place: Place) -> None:
    for key in ("NTF_TRANSPORT_PORT", "NTF_METRICS_PORT"):
        place.setenv(key, 8443)


def server_key_of_another(place: Place) -> None:
    other = place.folder / "other"
    other.mkdir()
    ca, key = make_ca(KeyAlgorithm.ED448, "CA", utc_now())
    write_server_files(other, ca, key, make_online(ca, key, KeyAlgorithm.ED448, "h", utc_now()))
    shutil.copy(other / "server.key", place.config_dir)


def from_tomorrow(place: Place) -> None:
    """Made by a machine whose clock was wrong."""
    for name in setup.IDENTITY_FILES:
        (place.config_dir / name).unlink()
    later = utc_now() + timedelta(days=9)
    ca, key = make_ca(KeyAlgorithm.ED448, "CA", later)
    write_server_files(place.config_dir, ca, key, make_online(ca, key, KeyAlgorithm.ED448, "h", later))


ACCOUNT = {"client_email": "a@b", "private_key": "no key", "project_id": "p", "token_uri": "https://h/t"}

MISTAKES = [
    Mistake("no `init` before `start`", lambda p: p.ini.unlink(), "`ntf-server init` makes it"),
    Mistake("`init` twice", nothing, "exists; --force", ("init",)),
    Mistake("`init --ip` with a name", nothing, "'notanip' is not an IP address; for a name use --fqdn", ("init", "--ip", "notanip")),
    Mistake("`init --fqdn` with a space", nothing, "is not a host name", ("init", "--fqdn", "my server")),
    Mistake("`init --fqdn` with a scheme", nothing, "is not a host name", ("init", "--fqdn", "https://ntf.example.org")),
    Mistake("`init --port 0`", nothing, "is not a port", ("init", "--port", "0")),
    Mistake("`init --port` out of range", nothing, "is not a port", ("init", "--port", "70000")),
    Mistake("`init -a` of another kind", nothing, "neither ED25519 nor ED448", ("init", "-a", "RSA")),
    Mistake("`init --ip` with the address of nobody", nothing, "is not an address that clients can connect to", ("init", "--ip", "0.0.0.0")),
    Mistake("an unknown command", nothing, "invalid choice: 'run'", ("run",)),
    Mistake("an unknown section", setting("PUHS", "x = 1"), "unknown section [PUHS]"),
    Mistake("an unknown key", setting("PUSH", "concurency = 1"), "unknown key concurency in [PUSH]; did you mean concurrency?"),
    Mistake("a key set twice", setting("LOG", "level = info\nlevel = debug"), "was set in line"),
    Mistake("a line without `=`", setting("LOG", "debug"), "'debug' is neither a section nor key = value"),
    Mistake("a word for a number", setting("PUSH", "concurrency = many"), "must be a whole number from 1 to 10000, not 'many'"),
    Mistake("a number out of range", setting("PUSH", "padding = 9999"), "must be a whole number from 1024 to 3072"),
    Mistake("a switch that is neither on nor off", setting("JOURNAL", "enabled = maybe"), "must be on or off"),
    Mistake("a comment behind a value", setting("LOG", "level = info ; not debug"), "a comment needs a line of its own"),
    Mistake("a comment behind a path", setting("APNS", "key_file = /etc/key.p8 # Apple's"), "a comment needs a line of its own"),
    Mistake("a value in quotes", setting("APNS", 'key_file = "/etc/key.p8"'), "write the value without quotes"),
    Mistake("journald where there is none", no_journald, "[LOG] format is journald, and there is none here"),
    Mistake("a file that is not text", lambda p: p.ini.write_bytes(b"\xff\xfe\x00"), "is not UTF-8 text"),
    Mistake("a wrong value in the environment", variable("NTF_LOG_LEVEL", "loud"), "environment NTF_LOG_LEVEL must be one of"),
    Mistake("`data_dir` not set", no_data_dir, "[STORE] data_dir is not set"),
    Mistake("`data_dir` is a file", data_dir_is_a_file, "is not a folder"),
    Mistake("the port is in use", busy("NTF_TRANSPORT_PORT"), "is in use by another program"),
    Mistake("the metrics port is in use", busy("NTF_METRICS_PORT"), "is in use by another program"),
    Mistake("the control port is in use", busy("NTF_TRANSPORT_CONTROL_PORT"), "is in use by another program"),
    Mistake("two ports that are the same", same_port, "[TRANSPORT] port and [METRICS] port are both 8443"),
    Mistake("`host` not set", variable("NTF_TRANSPORT_HOST", ""), "[TRANSPORT] host is not set"),
    Mistake("`listen` is a name that means nothing", variable("NTF_TRANSPORT_LISTEN", "no such host"), "must be an IP address of this machine"),
    Mistake("`listen` is an address of another machine", variable("NTF_TRANSPORT_LISTEN", "192.0.2.1"), "is no address of this machine"),
    Mistake("`socks_proxy` without a port", setting("SUBSCRIBER", "socks_proxy = localhost"), "[SUBSCRIBER] socks_proxy must be host:port"),
    Mistake("`socks_proxy` with a bad port", setting("SUBSCRIBER", "socks_proxy = localhost:x"), "[SUBSCRIBER] socks_proxy must be host:port"),
    Mistake("`own_hosts` with a port", setting("SUBSCRIBER", "own_hosts = smp1.example.org:5223"), "must be host names or IP addresses without a port"),
    Mistake("`team_id` without a key", setting("APNS", "team_id = T"), "team_id is set and key_file is not"),
    Mistake("`database = postgres` without `url`", setting("STORE", "database = postgres"), "[STORE] url"),
    Mistake("`start --workers` with SQLite", nothing, "--workers needs [STORE] database = postgres", ("start", "--workers", "2")),
    Mistake("an APNs key that is not there", setting("APNS", "key_file = /no/such.p8\nkey_id = K\nteam_id = T"), "/no/such.p8"),
    Mistake("an APNs key that is none", lambda p: apns(p, "nonsense"), "holds no private key"),
    Mistake("an APNs key of the wrong kind", rsa_key, "is not a P-256 private key"),
    Mistake("an APNs key without `key_id`", setting("APNS", "key_file = /etc/passwd"), "needs key_id and team_id"),
    Mistake("a CA file that is none", file_setting("WEBPUSH", "ca_file", "nonsense"), "holds no certificates"),
    Mistake("a CA file that is not there", setting("WEBPUSH", "ca_file = /no/such.pem"), "/no/such.pem"),
    Mistake("a service account that is not JSON", file_setting("FCM", "service_account_file", "{"), "service account"),
    Mistake("a service account that lacks a field", file_setting("FCM", "service_account_file", "{}"), "service account"),
    Mistake("a service account with a bad key", file_setting("FCM", "service_account_file", json.dumps(ACCOUNT)), "service account"),
    Mistake("FCM's `endpoint` without https", setting("FCM", "endpoint = fcm.googleapis.com"), "[FCM] endpoint must be an https: URL"),
    Mistake("`ca.crt` broken", broken("ca.crt"), "ca.crt"),
    Mistake("`server.key` broken", broken("server.key"), "server.key"),
    Mistake("`server.crt` missing", missing("server.crt"), "server.crt"),
    Mistake("`server.key` of another server", server_key_of_another, "is not the key of"),
    Mistake("certificates from the future", from_tomorrow, "put this machine's clock right"),
    Mistake("a `fingerprint` of another server", broken("fingerprint"), "fingerprint"),
    Mistake("the Web Push key broken", broken("vapid.pem"), "vapid.pem"),
    Mistake("a database of another program", another_program, "ntf-server.db belongs to another program: choose another folder"),
    Mistake("`cert` without the CA's key", missing("ca.key"), "bring it from where it is kept", ("cert",)),
    Mistake("`migrate` to a version that is none", nothing, "version", ("migrate", "--to", "999")),
    Mistake("`backup` into a folder in use", nothing, "/etc", ("backup", "/etc")),
    Mistake("`restore` of what is no backup", nothing, "is not a whole backup", ("restore", "/etc")),
    Mistake("`test` with what is no subscription", nothing, "is not a subscription", ("test", "--provider", "webpush", "--token", "abc")),
    Mistake("`test` of a provider that is not set up", nothing, "fcm is not set up; see [FCM]", ("test", "--provider", "fcm", "--token", "abc")),
    Mistake("`delete` where nothing is", lambda p: p.ini.unlink(), "nothing to delete", ("delete",)),
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    assert init(folder).returncode == 0
    return folder


@contextmanager
def copy_of(made: Path, folder: Path) -> Iterator[Place]:
    """A copy of a server that was made; afterwards logging and the environment are as before."""
    shutil.copytree(made, folder)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with pytest.MonkeyPatch.context() as monkeypatch:
        place = Place(folder, monkeypatch)
        place.ini.write_text(place.ini.read_text().replace(str(made), str(folder)))
        for name, value in ANY_PORT.items():
            place.setenv(name, value)
        try:
            yield place
        finally:
            root.handlers[:], root.level = handlers, level
            while TAKEN:
                TAKEN.pop().close()


def line_of(place: Place, mistake: Mistake) -> str:
    """What the operator is told."""
    mistake.prepare(place)
    arguments = [*mistake.arguments, "--config-dir", str(place.config_dir)]
    if mistake.arguments[0] in ("init", "restore"):
        arguments += ["--data-dir", str(place.data_dir)]
    with redirect_stderr(StringIO()) as shown:
        assert attempt(arguments) == 2, mistake.what
    (line,) = [line for line in shown.getvalue().splitlines() if line.startswith("ntf-server")]
    assert "Traceback" not in shown.getvalue()
    return line


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.what for mistake in MISTAKES])
def test_one_line(tmp_path: Path, made: Path, mistake: Mistake) -> None:
    with copy_of(made, tmp_path / "p") as place:
        assert mistake.says in line_of(place, mistake)


@needs_setpriv
@pytest.mark.parametrize("key", ["server.key", "vapid.pem", "apns.p8", "account.json"])
def test_a_key_that_cannot_be_read(tmp_path: Path, made: Path, key: str) -> None:
    with copy_of(made, tmp_path / "p") as place:
        place.set("APNS", f"key_file = {place.config_dir / 'apns.p8'}\nkey_id = K\nteam_id = T")
        if key == "account.json":
            place.set("FCM", f"service_account_file = {place.config_dir / key}")
        shutil.copy(place.config_dir / "vapid.pem", place.config_dir / "apns.p8")
        (place.config_dir / key).touch(mode=0)
        (place.config_dir / key).chmod(0)
        failed = ntf_server("start", "--config-dir", place.config_dir, user=without("all"))
    assert failed.returncode == 2
    assert f"cannot read {place.config_dir / key}: Permission denied; user " in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_running_server_keeps_its_identity(tmp_path: Path) -> None:
    init(tmp_path)
    identity = (tmp_path / "c" / CA_CERTIFICATE).read_bytes()
    with started(tmp_path) as (process, _):
        refused = init(tmp_path, "--force")
    assert (refused.returncode, refused.stderr) == (
        2,
        f"ntf-server: process {process.pid} runs with this configuration: stop it first\n",
    )
    assert (tmp_path / "c" / CA_CERTIFICATE).read_bytes() == identity


def attempt(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as stopped:  # argparse
        assert isinstance(stopped.code, int)  # noqa: PT017
        return stopped.code


def test_there_are_enough() -> None:
    assert len({mistake.what for mistake in MISTAKES}) == len(MISTAKES) >= 40


class Pieces(StringIO):
    """What is written, by calls: between two of them another thread may write."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def write(self, text: str, /) -> int:
        self.calls.append(text)
        return len(text)


def test_the_line_is_written_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = Pieces()
    monkeypatch.setattr("sys.stderr", pieces)
    assert main(["migrate", "--config-dir", str(tmp_path)]) == 2
    (line,) = pieces.calls
    assert re.fullmatch(r"ntf-server: .+\n", line)
