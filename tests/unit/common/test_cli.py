"""The command line as a user meets it: a process, its output, its exit status."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distserve.cli import effective, load_service
from distserve.config import Config, load_config
from distserve.errors import ConfigError


def distserve(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DISTSERVE_")}
    return subprocess.run(
        [sys.executable, "-m", "distserve.cli", *args],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean | {"COLUMNS": "200", "NO_COLOR": "1"} | env,
        check=False,
    )


def test_version() -> None:
    from distserve import __version__

    done = distserve("version")
    assert (done.stdout, done.returncode) == (f"distserve {__version__}\n", 0)


@pytest.mark.parametrize(
    "command", ["up", "demo", "doctor", "gateway", "prefill", "decode", "model fetch", "config table", "config show"]
)
def test_every_command_explains_itself(command: str) -> None:
    done = distserve(*command.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage" in done.stdout


def test_config_show_keeps_the_fallbacks_key_to_itself() -> None:
    done = distserve("config", "show", DISTSERVE_BREAKER_FALLBACK_KEY="very-secret")
    assert done.returncode == 0
    assert "very-secret" not in done.stdout + done.stderr
    assert "fallback_key: ''" in done.stdout
    assert "left out" in done.stderr


def test_config_show_merges_all_sources(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("gateway: {port: 1, host: file}\n")
    done = distserve("config", "show", "--config", str(file), "--set", "kv.block_size=32", DISTSERVE_GATEWAY_HOST="env")
    assert done.returncode == 0, done.stderr
    (tmp_path / "shown.yaml").write_text(done.stdout)
    shown = load_config(tmp_path / "shown.yaml")
    assert (shown.gateway.port, shown.gateway.host, shown.kv.block_size) == (1, "env", 32)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["config", "show", "--set", "gateway.prot=1"], "did you mean gateway.port?"),
        (["config", "show", "--set", "gateway.port"], "must be section.key=value"),
        (["config", "show", "--config", "/nowhere.yaml"], "/nowhere.yaml can't be read"),
        (["decode"], "bus.url is empty, but a decode alone needs a NATS server: --nats-url"),
        (["up", "--decode", "1", "--prefill", "0"], "at least one of each"),
        (["up", "--colocated", "--prefill", "2"], "--prefill is 2, must be 0 or left out with --colocated"),
        (["demo", "--set", "decode.colocated=true", "--prefill", "1"], "--prefill is 1, must be 0"),
        (
            ["up", "--set", "model.device=cuda", "--set", "transport.kind=tcp"],
            "model.device is 'cuda' (command line), must be auto or cpu with transport.kind tcp: only",
        ),
        (["up", "--model", "/nowhere/model"], "'/nowhere/model'"),
        (["up", "--log-level", "loud"], "telemetry.log_level is 'loud' (command line), must be one of debug, error"),
    ],
)
def test_a_refusal_is_one_line_and_its_own_exit_status(args: list[str], message: str) -> None:
    done = distserve(*args)
    assert done.returncode == 78
    assert done.stderr.startswith("distserve: ")
    assert len(done.stderr.splitlines()) == 1
    assert message in done.stderr


def test_wrong_usage_is_told_apart() -> None:
    assert distserve("up", "--decode", "0").returncode == 2
    assert distserve("nonsense").returncode == 2


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    import socket

    # Whatever the model: a folder that looks like one gets as far as the port.
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = distserve("up", "--model", str(tmp_path), "--port", str(port))
    assert (done.returncode, done.stdout) == (78, "")
    assert f"gateway.port is {port}" in done.stderr


def test_named_options_win_over_set() -> None:
    c = effective(None, ["gateway.port=1", "kv.block_size=32"], {"gateway.port": 2, "model.path": None})
    assert (c.gateway.port, c.kv.block_size, c.model.path) == (2, 32, "smollm2")


def test_what_is_given_anywhere_wins_over_the_demos_own_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distserve.cli import demo

    taken: list[Config] = []
    monkeypatch.setattr("distserve.up.run_demonstration", lambda config, *shape: taken.append(config) or 0)
    for name in [name for name in os.environ if name.startswith("DISTSERVE_")]:
        monkeypatch.delenv(name)
    file = tmp_path / "c.yaml"
    file.write_text("gateway: {port: 81}\n")

    def asked(**options: Any) -> tuple[int, str]:
        with pytest.raises(SystemExit, match=r"^0$"):
            demo(**options)
        return taken[-1].gateway.port, taken[-1].telemetry.log_level

    assert asked() == (0, "warning")
    assert asked(config=file) == (81, "warning")
    assert asked(config=file, sets=["telemetry.log_level=debug"]) == (81, "debug")
    assert asked(sets=["gateway.port=8000"], log_level="info") == (
        8000,
        "info",
    )  # the settings' own defaults, but asked
    monkeypatch.setenv("DISTSERVE_GATEWAY_PORT", "82")
    assert asked(config=file) == (82, "warning")
    assert asked(port=83) == (83, "warning")


@pytest.mark.parametrize("role", ["gateway", "prefill", "decode"])
def test_services_are_found_by_entry_point(role: str) -> None:
    main = load_service(role)
    assert main.__module__ == f"distserve_{role}.main"


def test_an_unknown_service_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="installed: decode, gateway, kvstore, prefill"):
        load_service("kvstor")


def test_a_default_configuration_asks_for_the_default_model() -> None:
    assert Config().model.path == "smollm2"
