"""Dashboards and rules against a real cluster and a real Prometheus: every query parses, and finds what it asks for."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prepare import Prepared, find

from tests.cluster import Cluster, wait_until
from tests.compose.prometheus import SETTINGS, Prometheus
from tests.tiny_models import make_tiny

pytestmark = [pytest.mark.compose, pytest.mark.timeout(300)]

GRAFANA = SETTINGS.parent / "grafana"
DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))
RULES = sorted((SETTINGS / "rules").glob("*.yml"))

# What a healthy cluster on CPUs, with nobody in trouble, has nothing of. A part of a query -> why.
NOTHING = {
    "ALERTS{": "nothing is wrong",
    "distserve_worker_gpu_": "no GPU",
    "distserve_transport_fallbacks_total": "no transport failed",
    "distserve_store_failed_fetches_total": "no fetch failed",
    "distserve_store_dropped_blocks_total": "every block was given",
    "distserve_kvstore_failed_fetches_total": "no fetch failed",
    "distserve_kvstore_evicted_blocks_total": "tiers have room",
    "distserve_gateway_retries_total": "no request was submitted twice",
}


def queries() -> dict[str, str]:
    """PromQL of every panel, annotation and variable, by where it is; with variables filled in."""
    found: dict[str, str] = {}
    for file in DASHBOARDS:
        board = json.loads(file.read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                found[f"{file.stem}, {panel['id']} {panel['title']} {target['refId']}"] = target["expr"]
        for variable in board["templating"]["list"]:
            metric = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert metric is not None, variable
            found[f"{file.stem}, ${variable['name']}"] = f"count by ({metric[2]}) ({metric[1]})"
        for annotation in board["annotations"]["list"]:
            found[f"{file.stem}, annotation"] = annotation["expr"]
    return {where: filled(expr) for where, expr in found.items()}


def filled(expr: str) -> str:
    for variable in ("model", "worker", "node"):
        expr = expr.replace(f"${variable}", ".*")
    expr = expr.replace("$__rate_interval", "60s")
    assert "$" not in expr, expr
    return expr


def rules() -> dict[str, str]:
    """What each rule looks at: of an alert without its conditions, which do not hold in a healthy cluster."""
    found: dict[str, str] = {}
    for file in RULES:
        for group in yaml.safe_load(file.read_text())["groups"]:
            for rule in group["rules"]:
                if "record" in rule:
                    found[rule["record"]] = rule["expr"]
                else:
                    for i, part in enumerate(re.split(r"\band\b|\bunless on \(model\)|[<>]=?|==", rule["expr"])):
                        if "_" in part:
                            found[f"{rule['alert']} {i}"] = part.replace("offset 10m", "").strip()
    return found


# ---------------------------------------------------------------- without a cluster


def run(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_promtool_accepts_configuration_and_rules(prepared: Prepared) -> None:
    for kind, files in (("config", [SETTINGS / "prometheus.yml"]), ("rules", RULES)):
        done = run(find("promtool"), "check", kind, *map(str, files))
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", sorted((SETTINGS / "tests").glob("*.yml")), ids=lambda file: str(file.stem))
def test_rules_do_what_they_say(prepared: Prepared, file: Path) -> None:
    done = run(find("promtool"), "test", "rules", file.name, cwd=file.parent)
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------- with one


@pytest.fixture(scope="module")
def prometheus(prepared: Prepared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One that has scraped a cluster, with a store node, before, between and after requests of all kinds."""
    folder = tmp_path_factory.mktemp("dashboards")
    model = make_tiny("llama", folder / "model")
    settings = {"transport.kind": "tcp", "breaker.mode": "on", "breaker.ttft_p99_ms": 60_000}
    settings |= {"decode.max_local_prefill_tokens": 0}  # a prefix that decode holds is fetched from it
    with Cluster(model, folder / "cluster", prefill=[{"kv.num_blocks": 112}], kvstore=[{}], settings=settings) as c:
        targets: dict[str, list[str]] = {"gateway": [c.url.removeprefix("http://")]}
        for info in c.registry().values():
            if info.role != "gateway":
                targets.setdefault(info.role, []).append(info.http_url.removeprefix("http://"))
        with Prometheus(folder / "prometheus", targets) as p:
            for i in range(3):
                requests(c, first=5 + 40 * i)
                p.wait_for_scrapes(2)
            yield p


def requests(c: Cluster, first: int) -> None:
    """Promised and not, of each class; one refused; prompts that were there before, in a pool or only in the store: the
    prefill worker's pool holds a few of them."""
    for i in range(10):
        body: dict[str, Any] = {"prompt": [first + i] * 128, "max_tokens": 6, "ignore_eos": True}
        if i % 3:
            body |= {"priority": ("vip", "normal", "batch")[i % 3], "ttft_slo_ms": 20_000, "tpot_slo_ms": 5_000}
        assert c.post("/v1/completions", body)[0] == 200
    for token_id in (first + 9, first, max(6, first - 39)):
        assert c.post("/v1/completions", {"prompt": [token_id] * 128 + [3], "max_tokens": 4})[0] == 200
    assert c.post("/v1/completions", {"prompt": [first] * 1500, "ttft_slo_ms": 1})[0] == 429


def excused(expr: str) -> bool:
    return any(part in expr for part in NOTHING)


def test_every_query_of_every_dashboard_finds_data(prometheus: Prometheus) -> None:
    found = {where: prometheus.query(expr) for where, expr in queries().items()}
    assert len(found) > 100
    empty = {where: queries()[where] for where, series in found.items() if not series and not excused(queries()[where])}
    assert not empty


def test_every_rule_looks_at_something_that_is_there(prometheus: Prometheus) -> None:
    empty = {name: expr for name, expr in rules().items() if not prometheus.query(expr) and not excused(expr)}
    assert not empty


def test_recorded_series_are_there_and_no_alert_fires(prometheus: Prometheus) -> None:
    recorded = [
        r["record"] for f in RULES for g in yaml.safe_load(f.read_text())["groups"] for r in g["rules"] if "record" in r
    ]
    wait_until(lambda: all(prometheus.query(name) for name in recorded), 10, "all are recorded")
    groups = prometheus.get("rules")["groups"]
    bad = {rule["name"]: rule["lastError"] for g in groups for rule in g["rules"] if rule["health"] != "ok"}
    assert not bad
    assert prometheus.query('ALERTS{alertstate="firing"}') == []


def test_what_is_excused_has_a_metric_in_the_code() -> None:
    """A name that nothing exposes would be excused for ever."""
    sources = "\n".join(
        path.read_text() for room in ("libs", "services") for path in (SETTINGS.parents[1] / room).rglob("*.py")
    )
    for part in NOTHING:
        if part.startswith("distserve_"):
            stem = re.sub(r"^distserve_(worker|gateway|kvstore|store|transport)_|_total$", "", part).strip("_")
            assert re.search(rf'["_]{re.escape(stem)}["_]', sources), part
