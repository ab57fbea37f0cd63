"""The files of deploy/ by the tools that know them, and what must agree between them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prepare
import pytest
import requirements
import yaml

from distserve.config import load_config
from distserve.config.load import get
from distserve.config.settings import settings

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE, SYSTEMD = DEPLOY / "compose", DEPLOY / "systemd"
ROLES = ("gateway", "prefill", "decode", "kvstore")
ALWAYS = {"nats", "model", "gateway", "kvstore"}
PROFILES = {
    "cpu": {"prefill", "decode"},
    "gpu": {"decode-gpu"},
    "rdma": {"prefill-rdma", "decode-rdma"},
    "cpu,observe": {"prefill", "decode", "jaeger", "prometheus", "grafana"},
}
GRACE_MARGIN_S = 5.0  # between a service's own grace time and that of whoever would kill it


def run(*command: str, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{' '.join(command)}: status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def effective(prepared: prepare.Prepared, profiles: str, *others: str) -> dict[str, Any]:
    """compose.yaml as Compose understands it with the committed .env."""
    files = [part for name in ("compose.yaml", *others) for part in ("-f", str(COMPOSE / name))]
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "COMPOSE_PROFILES": profiles}
    found: dict[str, Any] = json.loads(
        run(prepared.tool("docker-compose"), *files, "config", "--format", "json", env=env)
    )
    return found


# ---------------------------------------------------------------- by their tools


@pytest.mark.compose
def test_compose_files_are_of_the_specification(prepared: prepare.Prepared) -> None:
    names = sorted(str(path) for path in COMPOSE.glob("compose*.yaml"))
    run(prepared.tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *names)


@pytest.mark.compose
def test_the_dockerfile_has_nothing_to_find_fault_with(prepared: prepare.Prepared) -> None:
    run(prepared.tool("hadolint"), str(COMPOSE / "Dockerfile"))


@pytest.mark.compose
@pytest.mark.parametrize("profiles", PROFILES)
def test_a_profile_has_its_services(prepared: prepare.Prepared, profiles: str) -> None:
    config = effective(prepared, profiles)
    assert set(config["services"]) == ALWAYS | PROFILES[profiles]
    for name, service in config["services"].items():
        for bind in (v for v in service.get("volumes", ()) if v["type"] == "bind"):
            assert Path(bind["source"]).exists(), f"{name} mounts {bind['source']}, which is not there"
        for port in service.get("ports", ()):
            assert port["host_ip"] == "127.0.0.1", f"{name} listens on more than loopback by default"


@pytest.mark.compose
def test_what_docker_compose_up_starts_is_everything(prepared: prepare.Prepared) -> None:
    """The committed .env alone says which profiles."""
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    listed = run(prepared.tool("docker-compose"), "-f", str(COMPOSE / "compose.yaml"), "config", "--services", env=env)
    assert set(listed.split()) == ALWAYS | PROFILES["cpu,observe"]


@pytest.mark.compose
@pytest.mark.parametrize("profiles", ["cpu", "gpu", "rdma"])
def test_services_take_the_settings_that_compose_gives_them(prepared: prepare.Prepared, profiles: str) -> None:
    for name, service in effective(prepared, profiles)["services"].items():
        if name in ("nats", "model"):
            continue
        config = load_config(env={**dockerfile_settings(), **service["environment"]})  # raises what a service would say
        role = name.partition("-")[0]
        assert config.bus.url.startswith(f"nats://{role}:{role}@"), "a user of its own (nats/users.conf)"
        grace_s = float(service["stop_grace_period"].removesuffix("s"))
        assert grace_s >= get(config, f"{role}.drain_s") + GRACE_MARGIN_S
    rdma = effective(prepared, "rdma")["services"]["prefill-rdma"]
    assert rdma["network_mode"] == "host"
    assert rdma["cap_add"] == ["IPC_LOCK"]
    assert rdma["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
    assert rdma["devices"][0]["source"] == "/dev/infiniband"


@pytest.mark.compose
def test_keys_come_as_a_secret(prepared: prepare.Prepared, tmp_path: Path) -> None:
    gateway = effective(prepared, "cpu", "compose.keys.yaml")["services"]["gateway"]
    config = load_config(env={k: v for k, v in gateway["environment"].items() if k.startswith("DISTSERVE_")})
    assert config.gateway.keys_file == f"/run/secrets/{gateway['secrets'][0]['source']}"


# ---------------------------------------------------------------- among each other: plain pytest runs these too


def dockerfile_settings() -> dict[str, str]:
    text = (COMPOSE / "Dockerfile").read_text()
    return {name: value for name, value in re.findall(r"(DISTSERVE_[A-Z_]+)=(\S+)", text) if name != "DISTSERVE_CACHE"}


def test_the_dockerfiles_settings_are_settings() -> None:
    config = load_config(env=dockerfile_settings())
    assert config.gateway.host == config.telemetry.metrics_host == "0.0.0.0"


def test_the_dockerfile_has_the_base_that_is_prepared_and_no_host_of_anybodys_own() -> None:
    text = (COMPOSE / "Dockerfile").read_text()
    assert f"ARG PYTHON_IMAGE={prepare.BASE_TAG}\n" in text
    assert set(re.findall(r"https?://([\w.-]+)", text)) == {"download.pytorch.org"}


def test_the_example_of_keys_is_one() -> None:
    from distserve.api_keys import load_keys

    assert [key.name for key in load_keys(COMPOSE / "keys.example.yaml")] == ["support"]


def test_requirements_are_those_of_the_project_with_its_extras() -> None:
    project = {
        "dependencies": ["a"],
        "optional-dependencies": {"x": ["b>=1"], "y": ["distserve[x,z]", "c"], "z": ["d"]},
    }
    assert list(requirements.requirements(project, ["y"])) == ["a", "b>=1", "d", "c"]
    with pytest.raises(KeyError):
        list(requirements.requirements(project, ["w"]))


def test_the_model_that_is_prepared_is_the_catalogues() -> None:
    from distserve.models.catalog import entry_for

    assert entry_for("smollm2").requirement == prepare.MODEL


# ---------------------------------------------------------------- systemd


def units() -> list[Path]:
    return sorted([*SYSTEMD.glob("*.service"), *SYSTEMD.glob("*.target")])


def test_units_are_as_systemd_wants_them(tmp_path: Path) -> None:
    """`systemd-analyze verify`, with programs in place of those that the units name."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    for unit in units():
        (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/distserve/bin/", "/bin/true "))
    names = [str(tmp_path / unit.name.replace("@.", "@1.")) for unit in units()]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *names],
        env={"PATH": os.environ["PATH"], "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    complaints = [line for line in done.stderr.splitlines() if str(tmp_path) in line or "distserve" in line]
    assert (complaints, done.returncode) == ([], 0), done.stderr


@pytest.mark.parametrize("unit", [u for u in units() if u.suffix == ".service"], ids=lambda unit: unit.name)
def test_a_unit_is_hardened_stops_in_time_and_belongs_to_the_target(unit: Path) -> None:
    lines = unit.read_text().splitlines()
    for wanted in ("NoNewPrivileges=true", "ProtectSystem=strict", "PartOf=distserve.target", "User=distserve"):
        assert wanted in lines
    assert any(line.startswith("MemoryMax=") for line in lines)
    role = unit.name.removeprefix("distserve-").partition(".")[0].rstrip("@")
    if role in ROLES:
        assert "RestartPreventExitStatus=78" in lines
        timeout_s = next(float(line.partition("=")[2]) for line in lines if line.startswith("TimeoutStopSec="))
        assert timeout_s >= get(load_config(env={}), f"{role}.drain_s") + GRACE_MARGIN_S
        assert f"ExecStart=/opt/distserve/bin/distserve {role}" in lines
    assert ("LimitMEMLOCK=infinity" in lines) == (role in ("prefill", "decode", "kvstore"))


def test_the_units_configuration_is_one() -> None:
    env = dict(line.split("=", 1) for name in ("decode", "decode-1") for line in environment_file(name))
    config = load_config(SYSTEMD / "distserve.yaml", env=env)
    assert config.bus.url == "nats://decode:decode@127.0.0.1:4222"
    assert {line.partition("=")[0] for line in environment_file("nats")} == users()


def environment_file(name: str) -> list[str]:
    return [line for line in (SYSTEMD / "env" / f"{name}.env").read_text().splitlines() if line and line[0] != "#"]


def users() -> set[str]:
    """Variables with the passwords of nats/users.conf."""
    return set(re.findall(r"password: \$(\w+)", (COMPOSE / "nats" / "users.conf").read_text()))


def test_every_user_of_the_bus_has_a_password_everywhere() -> None:
    compose = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    assert set(compose["services"]["nats"]["environment"]) == users()
    assert users() <= set(re.findall(r"^(\w+)=", (COMPOSE / ".env").read_text(), re.MULTILINE))


def test_settings_named_in_the_documents_exist() -> None:
    documents = [DEPLOY.parent / "docs" / f"{name}.md" for name in ("compose", "kubernetes", "systemd")]
    named = set(re.findall(r"DISTSERVE_[A-Z_0-9]+", "".join(path.read_text() for path in documents)))
    known = {setting.env for setting in settings().values()} | {"DISTSERVE_CACHE", "DISTSERVE_CONFIG"}
    assert named <= known, named - known
