"""One worker with the null engine: `python -m benchmarks.null_engine prefill|decode`.

Settings come from the environment and --set, as for `distserve prefill` and `distserve decode`.
"""

import argparse
import functools
import os
from types import ModuleType

import distserve_decode.main as decode
import distserve_decode.sharing as sharing
import distserve_prefill.main as prefill
from benchmarks.null_engine.engine import NullEngineThread, build_null_engine
from benchmarks.null_engine.kv import null_plan, null_receivers, null_senders
from distserve.config import load_config
from distserve.lifecycle import die_with
from distserve.telemetry import setup_logging
from distserve.worker.store import sharing as shared

SERVICES: dict[str, ModuleType] = {"prefill": prefill, "decode": decode}


def without_engine(*, keep_thread: bool, pass_s: float) -> None:
    """Have both services build the doubles where they would build engine and transports."""
    prefill.build_engine = decode.build_engine = build_null_engine
    if not keep_thread:
        prefill.EngineThread = decode.EngineThread = functools.partial(NullEngineThread, pass_s)
    prefill.plan = sharing.plan = null_plan
    prefill.senders = sharing.senders = null_senders
    shared.receivers = null_receivers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=sorted(SERVICES))
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--engine-thread", action="store_true", help="run passes on a thread, as the services do")
    parser.add_argument("--pass-ms", type=float, default=0.0, help="how long each pass lasts, without using the CPU")
    parser.add_argument("--die-with", type=int, metavar="PID", help="end with this parent")
    a = parser.parse_args()
    if a.die_with is not None:
        die_with(a.die_with)
    overrides = dict(setting.split("=", 1) for setting in a.set)
    config = load_config(None, os.environ, overrides, {})
    setup_logging(a.role, level=config.telemetry.log_level, fmt=config.telemetry.log_format)
    without_engine(keep_thread=a.engine_thread, pass_s=a.pass_ms / 1e3)
    SERVICES[a.role].main(config)


if __name__ == "__main__":
    main()
