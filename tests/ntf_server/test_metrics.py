"""What Prometheus makes of our metrics, alerts and dashboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]  # it comes with mkdocs
from prometheus_client import REGISTRY, generate_latest

from ntf_server.app import running
from ntf_server.metrics import LATENCY_BUCKETS, OLD_GAUGES, PREFIX, LightHistogram, histogram
from tests.docs.pages import anchors, blocks
from tests.docs.reference import families
from tests.http import get
from tests.ntf_server.conftest import active_device, make_app, make_config
from tests.ntf_server.ntf_client import NtfClient
from tests.ports import free_port
from tests.test_architecture import ROOT

RULES = ROOT / "contrib" / "prometheus" / "alerts.yml"
RULES_TEST = RULES.with_name("alerts_test.yml")
DASHBOARD = ROOT / "contrib" / "grafana" / "ntf-server.json"
RUNBOOK = ROOT / "docs" / "runbook.md"
OLD_NAME = re.compile(r'(simplex_ntf_\w+) counter metrics should have "_total" suffix')
OLD_COUNT = re.compile(
    r'(simplex_ntf_\w+) non-histogram and non-summary metrics should not have "_count" suffix'
)
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian: apt install prometheus")


async def page(folder: Path, path: str) -> str:
    port = free_port()
    config = make_config(folder, METRICS={"port": port}, JOURNAL={"enabled": True})
    async with running(make_app(folder, config)) as app:
        client = await NtfClient.open(app.address)
        await active_device(app, client)
        client.close()
        return (await get(port, path)).partition("\r\n\r\n")[2]


def promtool(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], input=text, capture_output=True, text=True, timeout=60)


@needs_promtool
async def test_promtool_has_nothing_to_say(tmp_path: Path) -> None:
    checked = promtool("check", "metrics", text=await page(tmp_path, "/metrics/strict"))
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


@needs_promtool
async def test_names_that_existing_dashboards_know(tmp_path: Path) -> None:
    """They are there beside the others, of the same type, and all that promtool dislikes."""
    text = await page(tmp_path, "/metrics")
    checked = promtool("check", "metrics", text=text)
    for line in (checked.stdout + checked.stderr).splitlines():
        if found := OLD_NAME.fullmatch(line):
            assert f"# TYPE {found[1]}_total counter" in text
        else:
            found = OLD_COUNT.fullmatch(line)
            assert found is not None, line
            assert found[1] in OLD_GAUGES.values()
    for name in ("tokens_created", "notifications_received", "notifications_delivered"):
        assert f"# TYPE {PREFIX}{name} counter\n" in text
        assert f"# TYPE {PREFIX}{name}_total counter\n" in text
    assert f"\n{PREFIX}smp_sessions_count " in text


async def test_figures(tmp_path: Path) -> None:
    text = await page(tmp_path, "/metrics")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for name in ("database_bytes", "disk_free_bytes", "certificate_expiry_timestamp_seconds"):
        assert float(values[PREFIX + name]) > 0
    for name in ("loop_lag_seconds", "notifications_oldest_unsent_seconds", "journal_dropped_total"):
        assert float(values[PREFIX + name]) >= 0


@needs_promtool
def test_rules_fire_when_they_should() -> None:
    tested = promtool("test", "rules", str(RULES_TEST))
    assert tested.returncode == 0, tested.stdout + tested.stderr


@needs_promtool
def test_the_documented_configuration(tmp_path: Path) -> None:
    (block,) = [b for b in blocks(ROOT / "docs" / "operations.md") if "scrape_configs" in b.text]
    config = tmp_path / "prometheus.yml"
    config.write_text(block.text.replace("/etc/prometheus/ntf-server-alerts.yml", str(RULES)))
    checked = promtool("check", "config", str(config))
    assert (checked.returncode, f"{len(alerts())} rules found" in checked.stdout) == (0, True), checked
    assert f'up{{job="{yaml.safe_load(block.text)["scrape_configs"][0]["job_name"]}"}}' in RULES.read_text()


def alerts() -> set[str]:
    return set(re.findall(r"- alert: (\w+)", RULES.read_text()))


def test_every_alert_is_tested_and_has_its_section() -> None:
    sections = set(re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE))
    tested = set(re.findall(r"- name: (Ntf\w+)", RULES_TEST.read_text()))
    assert alerts() == sections == tested
    for anchor in re.findall(r"runbook: runbook.md#(\w+)", RULES.read_text()):
        assert anchor in anchors(RUNBOOK)


@pytest.mark.parametrize("path", [RULES, DASHBOARD], ids=lambda path: path.name)
def test_metrics_that_are_asked_for_exist(path: Path) -> None:
    known = {sample for family in families() for sample in (family.name, f"{family.name}_total")}
    named = set(re.findall(rf"{PREFIX}\w+", path.read_text()))
    assert {re.sub("_(bucket|count)$", "", word) for word in named} <= known


def test_the_dashboard_is_one() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert all(panel["targets"] and panel["title"] for panel in board["panels"])
    assert all(target["legendFormat"] for panel in board["panels"] for target in panel["targets"])
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.parametrize("label", ["", "provider"])
def test_light_histograms_look_like_the_library_s(label: str) -> None:
    library = histogram("test_seconds", "Seconds", [label] if label else [])
    theirs = library.labels("AT") if label else library
    values = [0.0, *LATENCY_BUCKETS, *(1.01 * bound for bound in LATENCY_BUCKETS)]
    for seconds in values:
        theirs.observe(seconds)
    expected = _lines("test_seconds")
    REGISTRY.unregister(library)
    light = LightHistogram("test_seconds", "Seconds", label)
    ours = light.labelled("AT") if label else light.labelled()
    for seconds in values:
        ours.observe(seconds)
    assert _lines("test_seconds") == expected
    REGISTRY.unregister(light)


def _lines(name: str) -> list[str]:
    return [line for line in generate_latest().decode().splitlines() if f"{PREFIX}{name}" in line]
