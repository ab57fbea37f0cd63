"""Who gets which cores of one machine, and settings that contradict each other there."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.cluster import Shape, settle
from distserve.config import Config, DecodeConfig, PrefillConfig, load_config, parse_cpus
from distserve.errors import ConfigError
from distserve.machine import online_cores, own_group
from distserve.sizing import Placement, place
from distserve.up import cores_in_words
from distserve.worker.process import in_ranges, other_cores, priority_of


def placed(num_cores: int, num_prefill: int = 1, num_decode: int = 1, **settings: str) -> Placement:
    """settings: prefill_cpus, prefill_realtime, and the same of decode."""
    config = load_config(overrides={key.replace("_", ".", 1): value for key, value in settings.items()})
    return place(config.prefill, config.decode, tuple(range(num_cores)), num_prefill, num_decode)


def test_without_real_time_all_cores_are_dealt_out_and_all_else_floats() -> None:
    assert placed(4) == Placement(((0, 1),), ((2, 3),), (0, 1, 2, 3))


def test_who_has_no_cores_set_gets_those_that_nobody_has() -> None:
    found = placed(8, num_decode=2, prefill_cpus="0-3")
    assert (found.prefill, found.decode) == (((0, 1, 2, 3),), ((4, 5), (6, 7)))


def test_where_too_few_are_left_they_share_those_and_take_nobody_s() -> None:
    found = placed(4, num_decode=2, prefill_cpus="0-2")
    assert (found.prefill, found.decode) == (((0, 1, 2),), ((3,), (3,)))
    found = placed(8, num_prefill=5, decode_cpus="4-7")
    assert (found.prefill, found.decode) == (((0, 1, 2, 3),) * 5, ((4, 5, 6, 7),))
    found = placed(4, prefill_cpus="0-3")
    assert (found.prefill, found.decode) == (((0, 1, 2, 3),), ((),)), "nothing is left: it floats"


def test_a_real_time_role_leaves_the_first_core_to_all_else() -> None:
    assert placed(5, prefill_realtime="10") == Placement(((1, 2),), ((3, 4),), (0, 3, 4))
    assert placed(5, prefill_realtime="10", decode_realtime="5") == Placement(((1, 2),), ((3, 4),), (0,))


def test_on_two_cores_all_else_shares_the_one_of_the_role_that_is_not_real_time() -> None:
    assert placed(2, prefill_realtime="10") == Placement(((0,),), ((1,),), (1,))


def test_cores_that_were_set_are_not_all_else_s_when_they_are_real_time() -> None:
    assert placed(4, prefill_cpus="2-3", prefill_realtime="10").others == (0, 1)
    assert placed(4, num_prefill=0, prefill_cpus="2-3", prefill_realtime="10").others == (0, 1, 2, 3)


CORES = st.integers(1, 24)


@given(
    CORES, st.integers(0, 4), st.integers(1, 4), st.sampled_from(["off", "7"]), st.sampled_from(["off", "7"]),
    st.sampled_from(["", "0", "0-3", "2,5"]), st.booleans(),
)  # fmt: skip
def test_real_time_cores_are_nobody_else_s_where_the_machine_has_enough(
    num_cores: int, num_prefill: int, num_decode: int, prefill: str, decode: str, cpus: str, deal: bool
) -> None:
    cores = tuple(range(num_cores))
    found = place(
        PrefillConfig(realtime=prefill, cpus=cpus), DecodeConfig(realtime=decode), cores, num_prefill, num_decode,
        deal=deal,
    )  # fmt: skip
    assert (len(found.prefill), len(found.decode)) == (num_prefill, num_decode)
    assert all(sets == parse_cpus(cpus) for sets in found.prefill if cpus)
    assert found.others
    ours = [set(sets) for sets in found.decode if sets]
    of_prefill = {cpu for sets in found.prefill for cpu in sets}
    num_free = len(set(cores) - set(parse_cpus(cpus) if num_prefill else ()))
    if num_free > num_decode + num_prefill:
        assert not any(sets & of_prefill for sets in ours)
        assert sum(map(len, ours)) == len(set().union(*ours))
        realtime = (of_prefill if prefill != "off" else set()) | (set().union(*ours) if decode != "off" else set())
        assert not realtime & set(found.others)
    if num_prefill and cpus:
        assert not any(sets & of_prefill for sets in ours), "what was set is not dealt out"
    if not deal:
        assert not ours


@given(st.sets(st.integers(0, 300)))
def test_cores_in_ranges_read_back_as_the_same(cpus: set[int]) -> None:
    assert set(parse_cpus(in_ranges(cpus))) == cpus


def test_up_says_who_computes_where() -> None:
    words = cores_in_words(Placement(((1, 2, 3),), ((4,), (5,)), (0, 4, 5)))
    assert words == "prefill-0 on 1-3; decode-0 on 4; decode-1 on 5; all else floats on 0,4-5"
    assert cores_in_words(Placement(((),), ((),), (0, 1))) == "nobody has cores of its own: all else floats on 0-1"


def config(**settings: Any) -> Config:
    return load_config(overrides={key.replace("__", "."): value for key, value in settings.items()})


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def test_up_refuses_real_time_on_cores_of_both_roles(model: str) -> None:
    both: dict[str, Any] = {"prefill__cpus": "0-3", "decode__cpus": "3-5", "model__path": model, "gateway__port": 0}
    with pytest.raises(ConfigError, match=r"decode\.cpus is '3-5', must have none of prefill\.cpus.*core 3 is in both"):
        settle(config(**both, decode__realtime="5"), Shape(1, 1), print)
    settle(config(**both), Shape(1, 1), print)
    settle(config(**both, decode__realtime="5", decode__colocated=True), Shape(0, 1), print)


def test_real_time_without_cores_is_refused_and_off_is_zero() -> None:
    with pytest.raises(ConfigError, match=r"prefill\.realtime is 10, must be off without prefill\.cpus"):
        priority_of("prefill", config(prefill__realtime="10"))
    assert priority_of("decode", config(prefill__realtime="10")) == 0
    assert priority_of("decode", config(decode__realtime="99", decode__cpus="1")) == 99


@pytest.mark.parametrize("value", ["0", "100", "on", "-1", "fifo"])
def test_a_priority_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"prefill\.realtime is"):
        config(prefill__realtime=value)


def test_a_part_of_a_gpu_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"decode\.mps_percentage is 40.*model\.device is auto"):
        config(decode__mps_percentage=40)
    assert config(decode__mps_percentage=40, model__device="cuda", decode__colocated=True).decode.mps_percentage == 40


@pytest.mark.parametrize("role", ["prefill", "decode", "gateway", "kvstore"])
def test_cores_of_any_role_are_checked(role: str) -> None:
    with pytest.raises(ConfigError, match=rf"{role}\.cpus is '3-1'"):
        load_config(overrides={f"{role}.cpus": "3-1"})


def test_threads_that_do_not_compute_keep_off_the_cores_of_every_real_time_role() -> None:
    both = config(prefill__cpus="1-2", prefill__realtime="9", decode__cpus="3", decode__realtime="9")
    assert other_cores(both, range(6), (1, 2), -1) == {0, 4, 5}
    assert other_cores(both, range(1, 4), (1, 2), -1) == {3}, "there is no other core: decided when all is known"
    assert other_cores(both, (1, 2), (1, 2), -1) == set()


def test_cores_of_the_machine_are_those_online(tmp_path: Path) -> None:
    assert online_cores(tmp_path) == ()
    (tmp_path / "sys/devices/system/cpu").mkdir(parents=True)
    (tmp_path / "sys/devices/system/cpu/online").write_text("0-2,5\n")
    assert online_cores(tmp_path) == (0, 1, 2, 5)


def test_a_group_without_memory_of_its_own_is_none(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    group = tmp_path / "sys/fs/cgroup/a/b"
    group.mkdir(parents=True)
    assert own_group(tmp_path) is None
    (group / "memory.max").write_text("max\n")
    assert own_group(tmp_path) == group
