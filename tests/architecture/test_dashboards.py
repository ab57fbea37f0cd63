"""Dashboards and rules as files: current, whole, of a kind that Grafana reads. tests/compose asks what they ask."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
GRAFANA, PROMETHEUS = DEPLOY / "grafana", DEPLOY / "prometheus"
DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))


def test_the_files_are_what_their_source_makes() -> None:
    command = [sys.executable, str(GRAFANA / "source" / "build.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_alert_has_a_test_that_it_fires() -> None:
    tested = set()
    for file in (PROMETHEUS / "tests").glob("*.yml"):
        for test in yaml.safe_load(file.read_text())["tests"]:
            tested |= {case["alertname"] for case in test.get("alert_rule_test", ()) if case.get("exp_alerts")}
    alerts = {
        r["alert"]
        for f in (PROMETHEUS / "rules").glob("*.yml")
        for g in yaml.safe_load(f.read_text())["groups"]
        for r in g["rules"]
        if "alert" in r
    }
    assert tested == alerts


@pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: str(file.stem))
def test_a_dashboard_is_one_that_grafana_reads(file: Path) -> None:
    board = json.loads(file.read_text())
    assert board["uid"] == f"distserve-{file.stem}"
    assert (board["schemaVersion"], board["tags"]) == (39, ["distserve"])
    found = board["panels"]
    assert len({panel["id"] for panel in found}) == len({panel["title"] for panel in found}) == len(found)
    taken: set[tuple[int, int]] = set()
    for panel in found:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24, panel["title"]
        assert not cells & taken, f"{panel['title']} lies on another"
        taken |= cells
        assert panel["type"] in {"row", "text", "stat", "timeseries", "bargauge", "heatmap", "table"}, "no plug-in"
        if panel["type"] not in ("row", "text"):
            assert panel["description"], panel["title"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "prometheus"}
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert all(target["datasource"]["uid"] == "prometheus" for target in panel["targets"])
    [how] = [panel for panel in found if panel["type"] == "text"]
    assert len(how["options"]["content"]) > 200


def test_grafana_is_given_the_source_and_the_folder_that_compose_mounts() -> None:
    [source] = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert (source["uid"], source["type"], source["url"]) == ("prometheus", "prometheus", "http://prometheus:9090")
    [provider] = yaml.safe_load((GRAFANA / "provisioning/dashboards/distserve.yml").read_text())["providers"]
    volumes = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())["services"]["grafana"]["volumes"]
    assert f"../grafana/dashboards:{provider['options']['path']}:ro" in volumes
    assert "../grafana/provisioning:/etc/grafana/provisioning:ro" in volumes
