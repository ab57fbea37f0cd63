"""The manifests of deploy/kubernetes: as kustomize builds them, by Kubernetes' own schemas, and whether what they name
is there."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prepare
import pytest
import yaml

from distserve.config import load_config
from distserve.config.load import get

KUBERNETES = Path(__file__).parents[2] / "deploy" / "kubernetes"
BASE = KUBERNETES / "base"
OVERLAYS = ("cpu", "gpu")
ROLES = ("gateway", "prefill", "decode", "kvstore")
GRACE_MARGIN_S = 5.0
KINDS = {"Deployment", "StatefulSet"}

Manifest = dict[str, Any]


def built(overlay: str) -> list[Manifest]:
    """By kubectl, where there is one."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl to build overlays with")
    done = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES / "overlays" / overlay)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def base() -> list[Manifest]:
    """The base as it is written, with what its kustomization.yaml generates."""
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    found = [m for name in kustomization["resources"] for m in yaml.safe_load_all((BASE / name).read_text())]
    for generator in kustomization["configMapGenerator"]:
        files = {Path(name).name: (BASE / name).read_text() for name in generator["files"]}
        found.append({"kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": files})
    for generator in kustomization["secretGenerator"]:
        lines = [line for name in generator["envs"] for line in (BASE / name).read_text().split()]
        data = dict(line.split("=", 1) for line in lines)
        found.append({"kind": "Secret", "metadata": {"name": generator["name"]}, "data": data})
    return found


@pytest.fixture(params=["base", *OVERLAYS])
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return base() if request.param == "base" else built(request.param)


def workloads(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Name and pod template of each."""
    for manifest in manifests:
        if manifest["kind"] in KINDS:
            yield manifest["metadata"]["name"], manifest["spec"]["template"]


def containers(template: Manifest) -> list[Manifest]:
    spec = template["spec"]
    return [*spec.get("initContainers", ()), *spec["containers"]]


def named(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {m["metadata"]["name"]: m for m in manifests if m["kind"] == kind}


@pytest.mark.compose
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_what_kubernetes_takes(prepared: prepare.Prepared, overlay: str, tmp_path: Path) -> None:
    path = tmp_path / "built.yaml"
    path.write_text(yaml.safe_dump_all(built(overlay)))
    command = [prepared.tool("kubernetes-validate"), "--strict", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_selector_finds_pods(manifests: list[Manifest]) -> None:
    labels = [template["metadata"]["labels"] for _, template in workloads(manifests)]
    for manifest in manifests:
        spec, kind = manifest.get("spec", {}), manifest["kind"]
        if kind not in KINDS | {"Service", "PodDisruptionBudget"}:
            continue
        selector = spec["selector"].get("matchLabels", spec["selector"])
        assert any(selector.items() <= own.items() for own in labels), f"{kind} {manifest['metadata']['name']}"


def test_every_port_that_is_named_is_a_containers(manifests: list[Manifest]) -> None:
    ports = {
        name: {port["name"] for c in template["spec"]["containers"] for port in c["ports"]}
        for name, template in workloads(manifests)
    }
    for name, template in workloads(manifests):
        for container in template["spec"]["containers"]:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert container[probe]["httpGet"]["port"] in ports[name]
    for name, service in named(manifests, "Service").items():
        owner = service["spec"]["selector"]["app.kubernetes.io/name"]
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports[owner], name


def test_every_object_and_volume_that_is_named_is_there(manifests: list[Manifest]) -> None:
    config_maps, secrets = named(manifests, "ConfigMap"), named(manifests, "Secret")
    for name, template in workloads(manifests):
        claims = [
            claim["metadata"]["name"]
            for m in manifests
            if m["kind"] == "StatefulSet" and m["metadata"]["name"] == name
            for claim in m["spec"].get("volumeClaimTemplates", ())
        ]
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        for volume in volumes.values():
            assert "configMap" not in volume or volume["configMap"]["name"] in config_maps
        for container in containers(template):
            assert {mount["name"] for mount in container["volumeMounts"]} <= {*volumes, *claims}
            for variable in container.get("env", ()):
                if (secret := variable.get("valueFrom", {}).get("secretKeyRef")) is not None:
                    assert secret["key"] in secrets[secret["name"]]["data"]
            for source in container.get("envFrom", ()):
                assert source["secretRef"]["name"] in secrets
    for hpa in named(manifests, "HorizontalPodAutoscaler").values():
        target = hpa["spec"]["scaleTargetRef"]
        assert target["name"] in named(manifests, target["kind"])


def test_pods_are_restricted_bounded_and_stop_in_time(manifests: list[Manifest]) -> None:
    defaults = load_config(env={})
    for name, template in workloads(manifests):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert not spec["automountServiceAccountToken"]
        assert not spec["enableServiceLinks"]
        if name in ROLES:
            assert spec["terminationGracePeriodSeconds"] >= get(defaults, f"{name}.drain_s") + GRACE_MARGIN_S
        for container in containers(template):
            assert container["resources"]["requests"]
            assert container["resources"]["limits"]
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"]
            assert not own["allowPrivilegeEscalation"]
            assert own["capabilities"] == {"drop": ["ALL"]}


def test_pods_are_given_settings_that_exist(manifests: list[Manifest]) -> None:
    """And each its own user of the bus."""
    for name, template in workloads(manifests):
        if name not in ROLES:
            continue
        env = {v["name"]: v.get("value", "x") for v in template["spec"]["containers"][0]["env"]}
        env = {key: value for key, value in env.items() if key.startswith("DISTSERVE_")}
        assert env.pop("DISTSERVE_CONFIG") == "/etc/distserve/distserve.yaml"
        config = load_config(BASE / "distserve.yaml", env=env)
        assert config.bus.url == f"nats://{name}:$(NATS_{name.upper()}_PASSWORD)@nats:4222"


def test_the_servers_of_the_bus_know_each_other_and_the_same_users(manifests: list[Manifest]) -> None:
    config = next(m for n, m in named(manifests, "ConfigMap").items() if n.startswith("nats"))["data"]
    nats = next(m for n, m in named(manifests, "StatefulSet").items() if n == "nats")["spec"]
    assert config["users.conf"] == (KUBERNETES.parent / "compose" / "nats" / "users.conf").read_text()
    routes = re.findall(r"nats://(nats-\d+)\.([\w-]+):6222", config["nats.conf"])
    assert routes == [(f"nats-{i}", nats["serviceName"]) for i in range(nats["replicas"])]


def test_images_are_those_that_the_dockerfile_makes(manifests: list[Manifest]) -> None:
    targets = set(re.findall(r"AS (\w+)$", (KUBERNETES.parent / "compose" / "Dockerfile").read_text(), re.MULTILINE))
    for _, template in workloads(manifests):
        for container in containers(template):
            name = container["image"].partition(":")[0].removeprefix("distserve/").removesuffix("-gpu")
            assert name in targets
