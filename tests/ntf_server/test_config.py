"""The configuration file: declared once, checked strictly."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ntf_server.config import SECTIONS, Config, ConfigError, load_config, parse_config, render_config

SAMPLE = Path(__file__).parents[2] / "ntf-server.ini"


def test_sample_at_the_root_is_generated() -> None:
    assert SAMPLE.read_text("utf-8") == render_config(Config())


def test_rendered_configuration_reads_back() -> None:
    config = Config()
    changed = dataclasses.replace(
        config,
        PUSH=dataclasses.replace(config.PUSH, coalesce=False, concurrency=7),
        METRICS=dataclasses.replace(config.METRICS, file=Path("/tmp/metrics")),
    )
    assert parse_config(render_config(changed), "x.ini", {}) == changed


def test_every_key_is_documented_in_the_sample() -> None:
    text = SAMPLE.read_text("utf-8")
    for name, make in SECTIONS.items():
        assert f"[{name}]" in text
        for key in dataclasses.fields(make):
            assert f"# {key.name} =" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[NOPE]\n", "f.ini:1: unknown section [NOPE]"),
        ("\n[PUSH]\nspeed = 1\n", "f.ini:3: unknown key speed in [PUSH]"),
        (
            "[PUSH]\nconcurrency = many\n",
            "f.ini:2: [PUSH] concurrency must be a whole number from 1 to 10000",
        ),
        ("[PUSH]\nconcurrency = 0\n", "f.ini:2: [PUSH] concurrency must be"),
        ("[PUSH]\ncoalesce = perhaps\n", "must be on or off, not 'perhaps'"),
        ("[LOG]\nlevel = loud\n", "one of debug, info, warning, error"),
        ("[PUSH]\ncoalesce = on\ncoalesce = off\n", "f.ini:3: coalesce of [PUSH] was set in line 2 already"),
        ("coalesce = on\n", "there is no [SECTION]"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "f.ini", {})
    assert message in str(caught.value)


def test_environment_overrides_the_file() -> None:
    env = {"NTF_PUSH_CONCURRENCY": "9", "APNS_KEY_ID": "ABC", "NTF_APNS_TOPIC": "my.app", "OTHER": "x"}
    config = parse_config("[PUSH]\nconcurrency = 5\n[APNS]\ntopic = file.app\n", "f.ini", env)
    assert (config.PUSH.concurrency, config.APNS.key_id, config.APNS.topic) == (9, "ABC", "my.app")


def test_a_section_may_be_continued_further_down() -> None:
    config = parse_config("[PUSH]\ninterval = 2\n[LOG]\nlevel = debug\n[PUSH]\ncoalesce = no\n", "f.ini", {})
    assert (config.PUSH.interval, config.PUSH.coalesce, config.LOG.level) == (2.0, False, "debug")


def test_bad_environment_is_named() -> None:
    with pytest.raises(ConfigError, match="NTF_PUSH_CONCURRENCY must be a whole number"):
        parse_config("", "f.ini", {"NTF_PUSH_CONCURRENCY": "x"})


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; `ntf-server init` makes it"):
        load_config(tmp_path / "none.ini", {})
    marked = tmp_path / "m.ini"
    marked.write_bytes(b"\xef\xbb\xbf[LOG]\nlevel = debug\n")
    assert load_config(marked, {}).LOG.level == "debug"
    binary = tmp_path / "b.ini"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(binary, {})


def test_passwords_are_not_shown() -> None:
    config = parse_config("[AUTH]\ncontrol_port_admin_password = hunter2\n", "f.ini", {})
    assert config.AUTH.control_port_admin_password == "hunter2"
    assert "hunter2" not in repr(config)


def test_own_hosts_are_spelt_as_in_addresses_of_routers() -> None:
    config = parse_config(
        "[SUBSCRIBER]\nown_hosts = smp1.example.org., [2001:db8::1] 2001:db8::2\n", "f.ini", {}
    )
    assert config.SUBSCRIBER.own_hosts == ("smp1.example.org", "[2001:db8::1]", "[2001:db8::2]")
