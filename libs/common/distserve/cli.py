"""`distserve …`: the command line. Services are found by entry point, never imported from here."""

import asyncio
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from distserve import __version__
from distserve.bench.command import bench
from distserve.config import Config, as_yaml, get, load_config
from distserve.config.table import markdown
from distserve.errors import ConfigError, DistServeError, ModelUnsupported
from distserve.key_commands import key_app
from distserve.kv_commands import kv_app
from distserve.lifecycle import die_with
from distserve.supervisor import REFUSED
from distserve.telemetry import setup_logging
from distserve.worker import process

EXTRA = {"gateway": "gateway", "prefill": "engine", "decode": "engine", "kvstore": "kvstore"}
DEMO_DEFAULTS = {"gateway.port": 0, "telemetry.log_level": "warning"}  # beside a server that runs; only the answers

app = typer.Typer(
    help="Disaggregated LLM serving: prefill and decode apart, coordinated over NATS.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Models.", no_args_is_help=True)
config_app = typer.Typer(help="Settings.", no_args_is_help=True)
app.add_typer(model_app, name="model")
app.add_typer(config_app, name="config")
app.add_typer(kv_app, name="kv")
app.add_typer(key_app, name="key")
app.command()(bench)

ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file; else $DISTSERVE_CONFIG.")]
NatsOption = Annotated[str | None, typer.Option("--nats-url", help="NATS server, e.g. nats://10.0.0.1:4222.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="Catalogue name, folder, .gguf file or hub id.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="section.key=value; may be repeated.")]
LevelOption = Annotated[str | None, typer.Option("--log-level", help="debug, info, warning or error.")]
PortOption = Annotated[int | None, typer.Option("--port", help="Port of the HTTP API; 0: any free one.")]
DieWithOption = Annotated[int | None, typer.Option("--die-with", hidden=True)]
PrefillOption = Annotated[int | None, typer.Option("--prefill", min=0, help="Prefill workers (1; 0 if colocated).")]
DecodeOption = Annotated[int, typer.Option("--decode", min=1, help="Decode workers.")]
PrefillCpusOption = Annotated[str | None, typer.Option("--prefill-cpus", help="Cores of prefill workers, e.g. 0-3.")]
DecodeCpusOption = Annotated[str | None, typer.Option("--decode-cpus", help="Cores of decode workers, e.g. 4-7.")]
MpsPrefillOption = Annotated[
    int | None, typer.Option("--mps-prefill", min=0, max=100, help="Share of the GPU for a prefill worker, percent.")
]
MpsDecodeOption = Annotated[
    int | None, typer.Option("--mps-decode", min=0, max=100, help="Share of the GPU for a decode worker, percent.")
]
KVStoreOption = Annotated[int, typer.Option("--kvstore", min=0, help="Nodes of the KV store.")]
ColocatedOption = Annotated[bool, typer.Option("--colocated", help="Decode workers do all prefill, in chunks.")]


def effective(
    file: Path | None,
    sets: list[str] | None,
    options: Mapping[str, object],
    defaults: Mapping[str, object] | None = None,
) -> Config:
    """The configuration from the command's own defaults, file, environment, `--set` and named options (which win), in
    this order."""
    overrides: dict[str, object] = {}
    for text in sets or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--set {text!r} must be section.key=value", value=text, expected="section.key=value")
        overrides[key.strip()] = value
    overrides |= {key: value for key, value in options.items() if value is not None}
    return load_config(file, os.environ, overrides, defaults)


# ---------------------------------------------------------------- one machine


@app.command()
def up(
    config: ConfigOption = None,
    model: ModelOption = None,
    prefill: PrefillOption = None,
    decode: DecodeOption = 1,
    kvstore: KVStoreOption = 0,
    prefill_cpus: PrefillCpusOption = None,
    decode_cpus: DecodeCpusOption = None,
    mps_prefill: MpsPrefillOption = None,
    mps_decode: MpsDecodeOption = None,
    colocated: ColocatedOption = False,
    port: PortOption = None,
    nats_url: NatsOption = None,
    log_level: LevelOption = None,
    sets: SetOption = None,
) -> None:
    """Start a cluster on this machine and keep it running until Ctrl-C."""
    from distserve.cluster import Shape
    from distserve.up import run_up

    options = _cluster_options(model, colocated, port, nats_url, log_level)
    options |= {"prefill.cpus": prefill_cpus, "decode.cpus": decode_cpus}
    options |= {"prefill.mps_percentage": mps_prefill, "decode.mps_percentage": mps_decode}
    c = effective(config, sets, options)
    raise SystemExit(run_up(c, Shape(_num_prefill(prefill, c), decode, kvstore)))


@app.command()
def demo(
    config: ConfigOption = None,
    model: ModelOption = None,
    prefill: PrefillOption = None,
    decode: DecodeOption = 1,
    kvstore: KVStoreOption = 0,
    prefill_cpus: PrefillCpusOption = None,
    decode_cpus: DecodeCpusOption = None,
    colocated: ColocatedOption = False,
    port: PortOption = None,
    nats_url: NatsOption = None,
    log_level: LevelOption = None,
    sets: SetOption = None,
) -> None:
    """Start a cluster, ask it three questions, show where the time went, and stop it again.

    Unless told otherwise it takes any free port and logs warnings and errors only.
    """
    from distserve.cluster import Shape
    from distserve.up import run_demonstration

    options = _cluster_options(model, colocated, port, nats_url, log_level)
    options |= {"prefill.cpus": prefill_cpus, "decode.cpus": decode_cpus}
    c = effective(config, sets, options, DEMO_DEFAULTS)
    raise SystemExit(run_demonstration(c, Shape(_num_prefill(prefill, c), decode, kvstore)))


def _cluster_options(
    model: str | None, colocated: bool, port: int | None, nats_url: str | None, log_level: str | None
) -> dict[str, object]:
    return {
        "model.path": model,
        "decode.colocated": colocated or None,
        "gateway.port": port,
        "bus.url": nats_url,
        "telemetry.log_level": log_level,
    }


def _num_prefill(asked: int | None, config: Config) -> int:
    return asked if asked is not None else 0 if config.decode.colocated else 1


# ---------------------------------------------------------------- one service


@app.command()
def gateway(
    config: ConfigOption = None,
    nats_url: NatsOption = None,
    model: ModelOption = None,
    port: PortOption = None,
    log_level: LevelOption = None,
    sets: SetOption = None,
    die_with: DieWithOption = None,
) -> None:
    """Run one gateway: the HTTP and NATS front doors."""
    options = {"bus.url": nats_url, "model.path": model, "gateway.port": port, "telemetry.log_level": log_level}
    _run_role("gateway", effective(config, sets, options), die_with)


@app.command()
def prefill(
    config: ConfigOption = None,
    nats_url: NatsOption = None,
    model: ModelOption = None,
    log_level: LevelOption = None,
    sets: SetOption = None,
    die_with: DieWithOption = None,
) -> None:
    """Run one prefill worker."""
    options = {"bus.url": nats_url, "model.path": model, "telemetry.log_level": log_level}
    _run_role("prefill", effective(config, sets, options), die_with)


@app.command()
def decode(
    config: ConfigOption = None,
    nats_url: NatsOption = None,
    model: ModelOption = None,
    colocated: ColocatedOption = False,
    log_level: LevelOption = None,
    sets: SetOption = None,
    die_with: DieWithOption = None,
) -> None:
    """Run one decode worker."""
    options = {
        "bus.url": nats_url,
        "model.path": model,
        "decode.colocated": colocated or None,
        "telemetry.log_level": log_level,
    }
    _run_role("decode", effective(config, sets, options), die_with)


@app.command()
def kvstore(
    config: ConfigOption = None,
    nats_url: NatsOption = None,
    model: ModelOption = None,
    log_level: LevelOption = None,
    sets: SetOption = None,
    die_with: DieWithOption = None,
) -> None:
    """Run one node of the KV store."""
    options = {"bus.url": nats_url, "model.path": model, "telemetry.log_level": log_level}
    _run_role("kvstore", effective(config, sets, options), die_with)


def _run_role(role: str, config: Config, parent_pid: int | None) -> None:
    if parent_pid is not None:
        die_with(parent_pid)
    if not config.bus.url:
        raise ConfigError(
            f"bus.url is empty, but a {role} alone needs a NATS server: --nats-url nats://HOST:4222 "
            "(`distserve up` starts one by itself)",
            key="bus.url",
            value="",
            expected="nats://HOST:PORT",
        )
    own_id = get(config, f"{role}.id") or role
    # Under `up` every line has the service's name in front already.
    setup_logging("" if parent_pid else own_id, level=config.telemetry.log_level, fmt=config.telemetry.log_format)
    process.enter(role, config)
    load_service(role)(config)


def load_service(role: str) -> Callable[[Config], None]:
    """The `main(config)` that the entry point group `distserve.services` names for this role."""
    found = [e for e in entry_points(group="distserve.services") if e.name == role]
    if not found:
        known = ", ".join(sorted(e.name for e in entry_points(group="distserve.services")))
        raise ConfigError(f"no service {role!r} is installed (installed: {known or 'none'})", value=role)
    try:
        main: Callable[[Config], None] = found[0].load()
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("distserve"):
            raise  # our own fault, not a missing extra
        raise ConfigError(
            f"the {role} service needs {e.name}: pip install 'distserve[{EXTRA.get(role, role)}]'",
            value=role,
        ) from e
    return main


@app.command()
def doctor(
    config: ConfigOption = None,
    nats_url: NatsOption = None,
    peer: Annotated[
        str, typer.Option("--peer", metavar="HOST", help="Measure each transport to this host, which runs --serve.")
    ] = "",
    serve: Annotated[bool, typer.Option("--serve", help="Answer another host's --peer until Ctrl-C.")] = False,
    bind: Annotated[
        str, typer.Option("--bind", metavar="ADDR[:PORT]", help="With --serve: the address that the peer reaches.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of the table.")] = False,
    sets: SetOption = None,
) -> None:
    """Check this host: RDMA, marks, clocks, NATS, ports; say what mends what is not right.

    Exit status: 0 if nothing failed (warnings are no failure), 1 if something did.
    """
    from distserve.doctor.command import run_doctor, run_serve

    if (bind and not serve) or (serve and (peer or as_json)):
        raise typer.BadParameter("--serve takes --bind alone, and --peer and --json go without --serve")
    c = effective(config, sets, {"bus.url": nats_url})
    raise SystemExit(run_serve(c, bind) if serve else run_doctor(c, peer=peer, as_json=as_json))


@app.command()
def monitor(
    url: Annotated[str, typer.Option("--url", help="A gateway.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str, typer.Option("--api-key", envvar="DISTSERVE_API_KEY", help="Where the gateway has keys.")
    ] = "",
    interval: Annotated[str, typer.Option("--interval", help="Between two looks: 500ms, 1s, 2m.")] = "1s",
    once: Annotated[bool, typer.Option("--once", help="One look, then end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Each look a line of JSON.")] = False,
    metric: Annotated[
        str,
        typer.Option("--metric", metavar="NAME", help="One figure, e.g. gateway.ttft.p99: each look a line of it."),
    ] = "",
) -> None:
    """Watch a cluster: services, latencies, KV, transports, what is wrong. q or Ctrl-C ends it.

    Without a terminal it prints plain pictures.
    """
    from distserve.monitor.command import run_monitor

    raise SystemExit(run_monitor(url, api_key, interval=interval, once=once, as_json=as_json, metric=metric))


# ---------------------------------------------------------------- models, settings


@model_app.command("fetch")
def model_fetch(name: Annotated[str, typer.Argument(help="Catalogue name, e.g. smollm2.")]) -> None:
    """Download a model of the catalogue, check it, and keep it ready in the cache folder."""
    from distserve.models.fetch import fetch

    print(fetch(name, report=lambda line: print(line, file=sys.stderr, flush=True)))


@model_app.command("synth")
def model_synth(
    folder: Annotated[Path, typer.Argument(help="Folder to make.")],
    like: Annotated[str, typer.Option(help="Shape: llama-1b, llama-8b, llama-70b, qwen3-8b, smollm2.")] = "llama-8b",
    layers: Annotated[int, typer.Option(min=0, help="Layers; 0: as many as the shape has.")] = 0,
    tokenizer: Annotated[
        str, typer.Option(help="Model whose tokenizer it gets: catalogue name or folder.")
    ] = "smollm2",
    seed: Annotated[int, typer.Option(min=0, help="Of the weights.")] = 0,
) -> None:
    """Make a model of any size with random weights: its speed is that of the shape, what it says means nothing."""
    from distserve.models.resolve import resolve
    from distserve.models.synth import synth

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    of = Path(resolve(tokenizer, report=report))
    print(synth(folder, like, num_layers=layers, tokenizer=of, seed=seed, report=report))


@config_app.command("show")
def config_show(config: ConfigOption = None, sets: SetOption = None) -> None:
    """Print the effective configuration as YAML, without secrets."""
    c = effective(config, sets, {})
    breaker = c.breaker
    if breaker.fallback_key:
        print("breaker.fallback_key is set, and left out here: it is a secret", file=sys.stderr)
        breaker = msgspec.structs.replace(breaker, fallback_key="")
    if (url := re.sub(r"(?<=://)[^/]*@", "", breaker.fallback_url)) != breaker.fallback_url:
        print("breaker.fallback_url names a user, left out here: the password is a secret", file=sys.stderr)
        breaker = msgspec.structs.replace(breaker, fallback_url=url)
    print(as_yaml(msgspec.structs.replace(c, breaker=breaker)), end="")


@config_app.command("table")
def config_table() -> None:
    """Print every setting with its default, range and meaning, as Markdown."""
    print(markdown(), end="")


@app.command()
def version() -> None:
    """Print the version."""
    print(f"distserve {__version__}")


def main() -> None:
    """Entry point. Exit status: 0 done, 1 failed, 2 wrong usage, 78 refused configuration or model, 130 interrupted."""
    try:
        app()
    except (ConfigError, ModelUnsupported) as e:
        print(f"distserve: {e}", file=sys.stderr)
        raise SystemExit(REFUSED) from None
    except DistServeError as e:
        logging.getLogger("distserve").debug("failed", exc_info=True)
        print(f"distserve: {e}", file=sys.stderr)
        raise SystemExit(1) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
