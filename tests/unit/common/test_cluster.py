"""What a cluster's processes are started with."""

import os
from pathlib import Path

import pytest

from distserve import cluster
from distserve.cluster import Shape, placement_of, settle, specs
from distserve.config import Config, load_config
from distserve.errors import ConfigError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "a-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def environments(config: Config, shape: Shape, monkeypatch: pytest.MonkeyPatch, num_cores: int) -> dict[str, Config]:
    """By name, the configuration that each process will load."""
    monkeypatch.setattr(cluster, "usable_cores", lambda: tuple(range(num_cores)))
    env = {"PATH": "/bin", "DISTSERVE_KV_BLOCK_SIZE": "8", "DISTSERVE_CONFIG": "/x.yaml", "DISTSERVE_CACHE": "/cache"}
    found = {}
    for spec in specs(config, shape, placement_of(config, shape), env):
        assert spec.env["PATH"] == "/bin"
        assert spec.env["DISTSERVE_CACHE"] == "/cache"
        assert "DISTSERVE_CONFIG" not in spec.env
        found[spec.name] = load_config(env=dict(spec.env) | {spec.id_variable: f"{spec.name}-ab12"})
    return found


def test_every_process_gets_the_effective_configuration_and_not_the_shells(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(overrides={"kv.block_size": 64, "model.device": "cpu"})
    found = environments(config, Shape(2, 1), monkeypatch, num_cores=1)
    assert list(found) == ["prefill-0", "prefill-1", "decode-0", "gateway"]
    assert {c.kv.block_size for c in found.values()} == {64}
    assert found["prefill-1"].prefill.id == "prefill-1-ab12"
    assert found["gateway"].gateway.id == "gateway-ab12"


def test_workers_get_cores_of_their_own_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(overrides={"model.device": "cpu"})
    found = environments(config, Shape(1, 1), monkeypatch, num_cores=2)
    assert (found["prefill-0"].prefill.cpus, found["decode-0"].decode.cpus) == ("0", "1")
    found = environments(config, Shape(0, 1), monkeypatch, num_cores=2)
    assert found["decode-0"].decode.cpus == "0,1"
    found = environments(config, Shape(2, 2), monkeypatch, num_cores=2)
    assert {c.prefill.cpus + c.decode.cpus for c in found.values()} == {""}


def test_cores_that_were_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(overrides={"model.device": "cpu", "decode.cpus": "0-1"})
    found = environments(config, Shape(1, 1), monkeypatch, num_cores=3)
    assert (found["prefill-0"].prefill.cpus, found["decode-0"].decode.cpus) == ("2", "0-1")
    found = environments(config, Shape(2, 1), monkeypatch, num_cores=3)
    assert (found["prefill-0"].prefill.cpus, found["prefill-1"].prefill.cpus) == ("2", "2")
    found = environments(config, Shape(1, 1), monkeypatch, num_cores=2)
    assert (found["prefill-0"].prefill.cpus, found["decode-0"].decode.cpus) == ("", "0-1"), "nothing is left to it"


def test_a_store_node_gets_a_folder_that_its_next_life_finds_and_no_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTSERVE_CACHE", str(tmp_path))
    config = load_config(overrides={"model.path": "a/Model-1", "model.device": "cpu"})
    found = environments(config, Shape(1, 1, num_kvstore=2), monkeypatch, num_cores=2)
    assert list(found) == ["prefill-0", "decode-0", "kvstore-0", "kvstore-1", "gateway"]
    assert found["kvstore-1"].kvstore.folder == str(tmp_path / "kvstore" / "a-model-1" / "kvstore-1")
    assert found["kvstore-1"].kvstore.id == "kvstore-1-ab12"
    assert (found["prefill-0"].prefill.cpus, found["decode-0"].decode.cpus) == ("0", "1")
    assert 0 < found["kvstore-0"].kvstore.dram_bytes == found["kvstore-1"].kvstore.dram_bytes
    assert found["decode-0"].kvstore.folder == ""


def test_a_folder_that_was_set_is_shared_out_among_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(overrides={"kvstore.folder": "/nvme", "kvstore.dram_bytes": 1 << 20})
    one = environments(config, Shape(1, 1, num_kvstore=1), monkeypatch, num_cores=1)
    two = environments(config, Shape(1, 1, num_kvstore=2), monkeypatch, num_cores=1)
    assert one["kvstore-0"].kvstore.folder == "/nvme"
    assert [two[f"kvstore-{i}"].kvstore.folder for i in range(2)] == ["/nvme/kvstore-0", "/nvme/kvstore-1"]
    assert two["kvstore-0"].kvstore.dram_bytes == 1 << 20


def test_the_store_is_stopped_after_all_who_use_it() -> None:
    assert cluster.STOP_ORDER[-1] == "kvstore"
    assert set(Shape(1, 1, 1).names().values()) == set(cluster.STOP_ORDER)


def test_on_a_gpu_nobody_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(overrides={"model.device": "cuda", "decode.colocated": True})
    found = environments(config, Shape(0, 2), monkeypatch, num_cores=8)
    assert {c.decode.cpus for c in found.values()} == {""}


def test_a_device_that_nobody_chose_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine has: the engine takes "auto" for the CPU too."""
    monkeypatch.setattr(Path, "exists", lambda self: True)
    found = environments(load_config(), Shape(1, 1), monkeypatch, num_cores=2)
    assert (found["prefill-0"].prefill.cpus, found["decode-0"].decode.cpus) == ("0", "1")


def test_settling_fixes_what_all_must_share(model: Path) -> None:
    config = settle(load_config(overrides={"model.path": str(model), "gateway.port": 0}), Shape(2, 3), print)
    assert (config.model.path, config.model.name) == (str(model), "a-model")
    assert config.kv.workers_per_host == 5
    assert config.gateway.port > 0


@pytest.mark.parametrize(("shape", "colocated"), [(Shape(0, 1), False), (Shape(1, 0), False), (Shape(0, 0), True)])
def test_a_shape_that_cannot_answer_is_refused(model: Path, shape: Shape, colocated: bool) -> None:
    config = load_config(overrides={"model.path": str(model), "decode.colocated": colocated})
    with pytest.raises(ConfigError, match="can't answer"):
        settle(config, shape, print)


def test_prefill_workers_beside_colocated_ones_are_refused(model: Path) -> None:
    config = load_config(overrides={"model.path": str(model), "decode.colocated": True})
    with pytest.raises(ConfigError, match=r"--prefill is 1, .*--colocated \(decode\.colocated\)"):
        settle(config, Shape(1, 1), print)


def test_grace_times_leave_room_to_unwind() -> None:
    config = load_config(overrides={"decode.drain_s": 7})
    found = specs(config, Shape(1, 1), placement_of(config, Shape(1, 1)), os.environ)
    assert {s.role: s.grace_s for s in found} == {"gateway": 20.0, "prefill": 20.0, "decode": 17.0}
