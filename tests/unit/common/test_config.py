"""Configuration: three sources, one tree, nothing unknown or impossible."""

import contextlib
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.bus import subjects
from distserve.config import Config, Setting, as_environment, as_yaml, get, load_config, parse_cpus, settings
from distserve.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    file = folder / "distserve.yaml"
    file.write_text(text)
    return file


def refused(match: str, **kwargs: object) -> ConfigError:
    with pytest.raises(ConfigError, match=match) as caught:
        load_config(**kwargs)  # type: ignore[arg-type]
    return caught.value


def test_nothing_given_is_all_defaults() -> None:
    assert load_config() == Config()


def test_command_line_beats_environment_beats_file(tmp_path: Path) -> None:
    file = write(tmp_path, "gateway:\n  port: 1\n  host: file\n  drain_s: 1\n")
    env = {"DISTSERVE_GATEWAY_HOST": "env", "DISTSERVE_GATEWAY_DRAIN_S": "2", "HOME": "/root"}
    gateway = load_config(file, env, {"gateway.drain_s": "3"}).gateway
    assert (gateway.port, gateway.host, gateway.drain_s) == (1, "env", 3.0)


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = write(tmp_path, "kv: {block_size: 32}")
    assert load_config(env={"DISTSERVE_CONFIG": str(file)}).kv.block_size == 32


def test_a_path_given_beats_the_one_of_the_environment(tmp_path: Path) -> None:
    file = write(tmp_path, "kv: {block_size: 32}")
    assert load_config(file, {"DISTSERVE_CONFIG": "/nowhere.yaml"}).kv.block_size == 32


@pytest.mark.parametrize("text", ["", "# nothing\n", "gateway:\n", "gateway:\n  # port: 1\nkv: {}\n"])
def test_empty_files_and_sections_change_nothing(tmp_path: Path, text: str) -> None:
    assert load_config(write(tmp_path, text)) == Config()


def test_text_is_typed_by_its_field(tmp_path: Path) -> None:
    file = write(
        tmp_path, 'prefill: {cpus: 3, keep_hidden: no}\ngateway: {port: "81"}\ntransport: {span_bytes: 2 MiB}\n'
    )
    c = load_config(file, {"DISTSERVE_DECODE_COLOCATED": "On"})
    assert (c.prefill.cpus, c.prefill.keep_hidden, c.gateway.port) == ("3", False, 81)
    assert (c.transport.span_bytes, c.decode.colocated) == (2 * 1024 * 1024, True)


def test_an_unknown_key_is_refused_with_its_line_and_the_closest_one(tmp_path: Path) -> None:
    error = refused(r"gateway\.prot \(.*distserve\.yaml:3\)", path=write(tmp_path, "gateway:\n  port: 1\n  prot: 2\n"))
    assert error.fields == {"key": "gateway.prot", "expected": "gateway.port"}


def test_an_unknown_section_is_refused_with_the_closest_one(tmp_path: Path) -> None:
    assert refused("gatway", path=write(tmp_path, "gatway: {port: 1}\n")).fields["expected"] == "gateway"


def test_a_key_under_the_wrong_section_is_pointed_to_the_right_one() -> None:
    assert refused("bus.block_size", overrides={"bus.block_size": 16}).fields["expected"] == "kv.block_size"


@pytest.mark.parametrize("name", ["DISTSERVE_GATEWAY_PROT", "DISTSERVE_GATWAY_PORT", "DISTSERVE_", "DISTSERVE_KV"])
def test_an_unknown_variable_is_refused(name: str) -> None:
    assert refused(f"{name} .*no setting", env={name: "1"}).fields["key"] == name


def test_a_close_variable_is_named() -> None:
    error = refused("did you mean DISTSERVE_GATEWAY_PORT", env={"DISTSERVE_GATEWAY_PROT": "1"})
    assert error.fields["expected"] == "DISTSERVE_GATEWAY_PORT"


def test_the_cache_folder_is_no_setting() -> None:
    assert load_config(env={"DISTSERVE_CACHE": "/tmp/x"}) == Config()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("gateway.port", "70000", "an integer from 0 to 65,535"),
        ("gateway.port", "eighty", "an integer from 0 to 65,535"),
        ("gateway.port", "80.5", "an integer from 0 to 65,535"),
        ("gateway.port", True, "an integer from 0 to 65,535"),
        ("gateway.request_timeout_s", "0", "a number over 0, at most 86,400"),
        ("bus.beat_s", "nan", "a number from 0.05 to 60"),
        ("bus.beat_s", "inf", "a number from 0.05 to 60"),
        ("transport.kind", "carrier pigeon", "one of auto, cuda_ipc, rdma, shm, tcp"),
        ("transport.classes.decode.dscp", 64, "an integer from 0 to 63"),
        ("transport.rdma.poll_cpu", "-2", "an integer from -1 to 65,535"),
        ("decode.colocated", "maybe", "true or false"),
        ("transport.span_bytes", "1 MoB", "an integer from 4,096 to 1,073,741,824"),
        ("transport.span_bytes", "1..5 MiB", "an integer from 4,096 to 1,073,741,824"),
        ("model.path", "", "text that is not empty"),
        ("gateway.id", "a.b", "text of at most 64 characters that matches ^[A-Za-z0-9_-]*$"),
    ],
)
def test_an_impossible_value_is_refused_with_what_would_do(key: str, value: object, expected: str) -> None:
    error = refused(key, overrides={key: value})
    assert error.fields == {"key": key, "value": value, "expected": expected}
    assert expected in str(error)
    assert "command line" in str(error)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"model.device": "cuda", "transport.kind": "tcp"}, "model.device"),
        ({"model.device": "cuda:1", "transport.kind": "shm"}, "model.device"),
        ({"model.name": "模型"}, "model.name"),
        ({"model.name": "-./"}, "model.name"),
        ({"model.path": "/models/模型"}, "model.name"),
        ({"kv.block_size": 24}, "kv.block_size"),
        ({"kv.num_blocks": 1}, "kv.num_blocks"),
        ({"kv.num_blocks": 10, "model.max_model_len": 145}, "kv.num_blocks"),
        ({"bus.ttl_s": 2.0}, "bus.ttl_s"),
        ({"prefill.chunk_tokens": 100}, "prefill.chunk_tokens"),
        ({"prefill.max_batch_tokens": 256}, "prefill.max_batch_tokens"),
        ({"decode.sample_first_token": True, "prefill.keep_hidden": False}, "prefill.keep_hidden"),
        ({"gateway.silence_s": 10, "gateway.request_timeout_s": 5}, "gateway.silence_s"),
        ({"bus.url": "localhost:4222"}, "bus.url"),
        ({"telemetry.otlp_endpoint": "localhost"}, "telemetry.otlp_endpoint"),
        ({"transport.rdma.subnet": "10.0.0.1/16"}, "transport.rdma.subnet"),
        ({"transport.rdma.devices": "mlx5_0,mlx5_0"}, "transport.rdma.devices"),
        ({"decode.cpus": "3-1"}, "decode.cpus"),
        ({"prefill.cpus": "a"}, "prefill.cpus"),
    ],
)
def test_values_that_contradict_each_other_are_refused(overrides: dict[str, object], key: str) -> None:
    assert refused(key, overrides=overrides).fields["key"] == key


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"transport.kind": "rdma"},
        {"transport.kind": "tcp", "transport.allow_fallback": True},
        {"transport.kind": "tcp", "decode.colocated": True},
    ],
)
def test_a_gpu_is_taken_where_nothing_or_rdma_hands_kv_over(others: dict[str, object]) -> None:
    assert load_config(overrides={"model.device": "cuda:1", **others}).model.on_gpu
    assert not load_config(overrides=others).model.on_gpu


@given(st.text(min_size=1, max_size=8))
def test_a_name_is_taken_if_a_subject_can_carry_it(name: str) -> None:
    try:
        subjects.slug(name)
    except ValueError:
        assert refused("model.name", overrides={"model.name": name}).fields["value"] == name
    else:
        assert load_config(overrides={"model.name": name}).model.served_name == name


def test_a_commands_own_defaults_give_way_to_everything(tmp_path: Path) -> None:
    file = write(tmp_path, "gateway: {port: 1}")
    defaults = {"gateway.port": 0, "kv.block_size": 32, "bus.beat_s": 0.5}
    c = load_config(file, {"DISTSERVE_KV_BLOCK_SIZE": "16"}, {"bus.beat_s": "1"}, defaults)
    assert (c.gateway.port, c.kv.block_size, c.bus.beat_s) == (1, 16, 1.0)
    c = load_config(defaults=defaults)
    assert (c.gateway.port, c.kv.block_size, c.bus.beat_s) == (0, 32, 0.5)


@pytest.mark.parametrize(
    "overrides",
    [
        {"model.device": "cuda", "decode.colocated": True},
        {"model.name": "模型-7"},
        {"model.name": "M", "model.path": "/models/模型"},
        {"kv.num_blocks": 10, "model.max_model_len": 144},
        {"bus.ttl_s": 2.001},
        {"prefill.chunk_tokens": 0},
        {"prefill.max_batch_tokens": 512},
        {"bus.url": "nats://a:4222,tls://b:4222"},
        {"decode.cpus": "0-3, 6"},
        {"telemetry.otlp_endpoint": "https://collector:4318/x"},
        {"transport.rdma.subnet": "fd00::/8"},
        {"transport.rdma.poll_cpu": -1, "transport.rdma.devices": ("mlx5_0", "mlx5_0:2")},
    ],
)
def test_values_at_the_edge_of_what_works_are_taken(overrides: dict[str, object]) -> None:
    config = load_config(overrides=overrides)
    assert all(get(config, key) == value for key, value in overrides.items())


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("gateway: [1]", "gateway .*:1.* must hold keys and values"),
        ("- 1", "must hold sections"),
        ("gateway: {port: [1]}", "port is 'a list or mapping'"),
        ("gateway: {port: }", "line left out"),
        ("gateway: {port: 1, port: 2}", "set twice"),
        ("gateway: {port: 1}\ngateway: {port: 2}", "set twice"),
        ("gateway: {port", "is not YAML"),
        ("? [a, b]\n: 1", "no setting"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, text: str, match: str) -> None:
    refused(match, path=write(tmp_path, text))


def test_sections_within_sections(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "transport:\n  classes:\n    prefill: {dscp: 26, service_level: 3}\n    decode:\n"
        "  rdma:\n    devices: [mlx5_0, 'mlx5_1:2']\n    use_windows: no\n",
    )
    env = {"DISTSERVE_TRANSPORT_RDMA_DEVICES": "rxe0, rxe1", "DISTSERVE_TRANSPORT_CLASSES_DECODE_DSCP": "46"}
    t = load_config(file).transport
    assert (t.rdma.devices, t.rdma.use_windows, t.rdma.depth) == (("mlx5_0", "mlx5_1:2"), False, 256)
    t = load_config(file, env, {"transport.rdma.subnet": "10.0.0.0/16"}).transport
    assert (t.rdma.devices, t.rdma.use_windows, t.rdma.subnet) == (("rxe0", "rxe1"), False, "10.0.0.0/16")
    assert [(c.dscp, c.service_level) for c in (t.classes.decode, t.classes.prefill, t.classes.background)] == [
        (46, 0),
        (26, 3),
        (0, 0),
    ]
    assert load_config(write(tmp_path, as_yaml(load_config(file, env)))) == load_config(file, env)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("transport: {rdma: 5}", r"transport\.rdma \(.*:1\) must hold keys and values"),
        ("transport:\n  rmda: {depth: 64}", r"transport\.rmda \(.*:2\) is no setting; did you mean transport\.rdma\?"),
        ("transport: {rdma: {deph: 64}}", r"did you mean transport\.rdma\.depth\?"),
        ("transport: {rdma: {devices: [a b]}}", "a list, with commas between"),
        ("transport: {rdma: {devices: [[mlx5_0]]}}", "a list, with commas between"),
        ("transport: {classes: {decode: {dscp: 1, dscp: 2}}}", "set twice"),
        ("transport: {classes: {decode: 48}}", r"transport\.classes\.decode .* must hold keys and values"),
    ],
)
def test_what_is_wrong_within_a_section_of_a_section_is_named(tmp_path: Path, text: str, match: str) -> None:
    refused(match, path=write(tmp_path, text))


def test_a_key_that_was_renamed_is_refused_with_its_new_name(tmp_path: Path) -> None:
    old = write(tmp_path, "transport:\n  dscp_prefill: 26\n")
    assert refused(r":2\) is now", path=old).fields["expected"] == "transport.classes.prefill.dscp"
    error = refused("environment", env={"DISTSERVE_TRANSPORT_DSCP_DECODE": "46"})
    assert error.fields["expected"] == "DISTSERVE_TRANSPORT_CLASSES_DECODE_DSCP"


def test_no_two_settings_share_a_variable() -> None:
    assert len({s.env for s in settings().values()}) == len(settings())


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    refused("nowhere.yaml can't be read", path=tmp_path / "nowhere.yaml")


def test_the_shown_configuration_loads_as_itself(tmp_path: Path) -> None:
    config = load_config(overrides={"kv.block_size": 64, "model.path": "a: b # c", "decode.colocated": True})
    assert load_config(write(tmp_path, as_yaml(config))) == config


def possible(setting: Setting) -> list[object]:
    """Values that the field alone allows, its default among them."""
    candidates: list[object] = [setting.default, True, False, 0, 1, 2, 16, 64, 512, 1024, 65536, 0.5, 0.75, 1.5, 7.25]
    candidates += [
        "debug",
        "json",
        "tcp",
        "float16",
        "cuda:1",
        "0-3",
        "nats://h:1",
        "http://h",
        "a: b #",
        "",
        ("mlx5_0:1", "rxe0"),
    ]
    found = []
    for value in candidates:
        with contextlib.suppress(ConfigError):
            found.append(setting.value(value, "test"))
    return found


@given(st.fixed_dictionaries({}, optional={k: st.sampled_from(possible(s)) for k, s in settings().items()}))
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.filter_too_much])
def test_the_environment_of_a_configuration_gives_it_again(values: dict[str, object]) -> None:
    try:
        config = load_config(overrides=values)
    except ConfigError:
        hypothesis.assume(False)
        raise
    assert load_config(env=as_environment(config)) == config
    assert all(get(config, key) == value for key, value in values.items())


def test_the_environment_holds_only_what_was_changed() -> None:
    config = load_config(overrides={"decode.colocated": True, "bus.beat_s": 0.5})
    assert as_environment(config) == {"DISTSERVE_DECODE_COLOCATED": "true", "DISTSERVE_BUS_BEAT_S": "0.5"}


def test_every_setting_has_words_and_a_default_within_its_range() -> None:
    for setting in settings().values():
        assert setting.description.endswith("."), setting.key
        assert setting.value(setting.default, "test") == setting.default
        assert setting.value(setting.text(setting.default), "test") == setting.default


@pytest.mark.parametrize(
    ("text", "cpus"), [("", ()), ("0", (0,)), ("0-3,6", (0, 1, 2, 3, 6)), (" 2 , 1-2 ", (1, 2)), ("5-5", (5,))]
)
def test_cpu_lists(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["a", "1-", "-1", "2-1", "1;2", "1--2", "0x1"])
def test_bad_cpu_lists_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="numbers and ranges"):
        parse_cpus(text)


@pytest.mark.parametrize(
    ("path", "name", "served"),
    [
        ("smollm2", "", "smollm2"),
        ("/models/Llama-3/", "", "Llama-3"),
        ("/models/x.gguf", "", "x"),
        ("models/x.gguf", "", "x"),
        ("org/Name-1B", "", "org/Name-1B"),
        ("./folder", "", "folder"),
        ("/models/Llama-3", "mine", "mine"),
    ],
)
def test_the_served_name_comes_from_the_path(path: str, name: str, served: str) -> None:
    assert load_config(overrides={"model.path": path, "model.name": name}).model.served_name == served
