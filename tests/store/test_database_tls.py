"""TLS to the database: all connections of a daemon use it, and a server that is not trusted is refused."""

from __future__ import annotations

import ipaddress
import os
import pwd
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from store.interface import StoreError
from store.postgres import PostgresStore
from tests.postgres import SERVICE_USER, PostgresCluster, running_cluster

_ON = "ALTER SYSTEM SET ssl = on", "SELECT pg_reload_conf()"
_ENCRYPTED = """
SELECT count(*) FILTER (WHERE ssl), count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid)
WHERE application_name = 'tls'
"""


def write_certificate(folder: Path, host: str) -> Path:
    """A certificate that signs itself, and its key, as PostgreSQL looks for them."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "database")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    file = folder / "server.crt"
    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.key").write_bytes(private)
    (folder / "server.key").chmod(0o600)
    if os.getuid() == 0:
        owner = pwd.getpwnam(SERVICE_USER)
        os.chown(folder / "server.key", owner.pw_uid, owner.pw_gid)
        os.chown(file, owner.pw_uid, owner.pw_gid)
    return file


@pytest.fixture(scope="module")
def plain() -> Iterator[PostgresCluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
async def url(plain: PostgresCluster) -> str:
    """Of a database whose server shows a certificate for its address."""
    write_certificate(plain.data, "127.0.0.1")
    url = plain.new_database()
    db = await asyncpg.connect(url)
    for statement in _ON:
        await db.execute(statement)
    await db.close()
    return url


async def test_every_connection_is_encrypted(url: str, plain: PostgresCluster) -> None:
    store = PostgresStore(
        f"{url}?sslmode=verify-full&sslrootcert={plain.data / 'server.crt'}", name="tls", pool_size=2
    )
    await store.open()
    try:
        await store.leases.join()
        await store.check()
        await store.set_sent([])
        db = await asyncpg.connect(url)
        encrypted, connections = await db.fetchrow(_ENCRYPTED)
        await db.close()
        assert encrypted == connections >= 3  # of both pools, and that of the leases
    finally:
        await store.close()


async def test_a_server_that_is_not_trusted(url: str, tmp_path: Path) -> None:
    other = write_certificate(tmp_path, "127.0.0.1")
    with pytest.raises(StoreError, match="cannot be trusted"):
        await PostgresStore(f"{url}?sslmode=verify-full&sslrootcert={other}").open()


async def test_a_server_under_another_name(url: str, plain: PostgresCluster) -> None:
    there = url.replace("127.0.0.1", "localhost")
    with pytest.raises(StoreError, match="cannot be trusted"):
        await PostgresStore(f"{there}?sslmode=verify-full&sslrootcert={plain.data / 'server.crt'}").open()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("?sslmode=nonsense", "an address that makes no sense"),
        ("?sslmode=verify-full&sslrootcert=/nowhere", "files that it names"),
    ],
)
async def test_an_address_that_is_wrong(url: str, wrong: str, says: str) -> None:
    with pytest.raises(StoreError, match=says):
        await PostgresStore(url + wrong).open()
