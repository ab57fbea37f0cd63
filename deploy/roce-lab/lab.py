#!/usr/bin/env python3
"""Two hosts with RoCE v2 (Soft-RoCE in QEMU guests) on this machine, and DistServe across them. See docs/roce-lab.md.

lab.py up                       boot both, run DistServe across them, until Ctrl-C
lab.py up --bare                boot both, nothing more
lab.py run 1 'rdma link'        a command on a host of the lab that is up
lab.py run-both 'A' 'B'         boot, run A on host 1 and B on host 2, end; status 0 if both have 0
lab.py prepare                  packages (as root) and kernel, so that the next start is quick
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from roce_lab import door, kernel, packages
from roce_lab.errors import LabError
from roce_lab.host import Process, follow
from roce_lab.lab import Lab
from roce_lab.machine import Hardware

DEFAULT_DIR = Path(tempfile.gettempdir()) / f"distserve-roce-lab-{os.getuid()}"


def main() -> int:
    options = _parser().parse_args()
    # So that everything entered is left, also where a shell has started this in the background, SIGINT ignored.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status: int = options.act(options)
        return status
    except LabError as e:
        print(f"lab: {e}", file=sys.stderr)
        return 69  # EX_UNAVAILABLE of sysexits.h
    except KeyboardInterrupt:
        return 130


def _prepare(options: argparse.Namespace) -> int:
    packages.require(install=options.install or os.geteuid() == 0)
    image = kernel.prepare(kernel.default_cache())
    print(f"lab: kernel {image.release} in {image.vmlinuz.parents[1]}")
    return 0


def _up(options: argparse.Namespace) -> int:
    from roce_lab import serving  # the rest needs none of the project

    with _lab(options, forwards=() if options.bare else serving.PORTS) as lab, door.Door(lab):
        print(f"lab: both hosts are up ({lab.boot_s:.0f} s), 10.77.0.1 and 10.77.0.2; {lab.folder} is /tmp/lab there")
        run = f"{sys.argv[0]} run" + (f" --dir {options.dir}" if options.dir != DEFAULT_DIR else "")
        print(f"lab: in another terminal: {run} 1 'rdma link'", flush=True)
        if options.bare:
            _until_interrupted(lab)
            return 0
        with serving.Serving(lab, model=options.model, settings=options.set) as served:
            print(served.what_to_try(run), flush=True)
            _until_interrupted(lab)
    return 0


def _until_interrupted(lab: Lab) -> None:
    print("lab: Ctrl-C ends it", flush=True)
    while not any(host.gone for host in lab.hosts):
        time.sleep(1.0)
    raise LabError(f"a host is gone:\n{lab.host1.last_words()}\n{lab.host2.last_words()}")


def _run(options: argparse.Namespace) -> int:
    return door.run(options.dir, options.node, options.command, options.timeout)


def _run_both(options: argparse.Namespace) -> int:
    with _lab(options) as lab:
        processes = [lab.host(n).start(c) for n, c in ((1, options.command1), (2, options.command2))]
        statuses = _follow_both(processes, options.timeout)
    print(f"lab: host 1 ended with status {statuses[0]}, host 2 with {statuses[1]}")
    return max(statuses)


def _follow_both(processes: list[Process], timeout_s: float) -> list[int]:
    """Prints each line with its host's number before it."""
    statuses = [255, 255]
    errors: list[LabError] = []

    def show(i: int) -> None:
        def line(text: str) -> None:
            print("".join(f"{i + 1}| {part}" for part in text.splitlines(keepends=True)), end="", flush=True)

        try:
            statuses[i] = follow(processes[i], timeout_s, line)
        except LabError as e:
            errors.append(e)

    threads = [threading.Thread(target=show, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return statuses


def _lab(options: argparse.Namespace, forwards: tuple[int, ...] = ()) -> Lab:
    hardware = Hardware(memory=options.memory, cpus=options.cpus, accelerator=options.accel)
    return Lab(options.dir, hardware=hardware, forwards=forwards, install=options.install)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--dir", type=Path, default=DEFAULT_DIR, help="shared with the hosts, which see /tmp/lab")
    common.add_argument("--install", action="store_true", help="as root: install packages that are missing")
    common.add_argument("--timeout", type=float, default=600.0, help="seconds for a command (default 600)")
    boots = argparse.ArgumentParser(add_help=False)
    boots.add_argument("--memory", default="2G", help="of each host (default 2G)")
    boots.add_argument("--cpus", type=int, default=1, help="of each host (default 1)")
    boots.add_argument("--accel", choices=("auto", "kvm", "tcg"), default="auto", help="tcg: plain emulation")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser("up", parents=[common, boots], help="boot, and run DistServe across the two")
    up.add_argument("--bare", action="store_true", help="boot only")
    up.add_argument("--model", type=Path, help="model folder (default: a tiny random one)")
    up.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a setting of DistServe")
    up.set_defaults(act=_up)
    run = commands.add_parser("run", parents=[common], help="a command on a host of the lab that is up")
    run.add_argument("node", type=int, choices=(1, 2))
    run.add_argument("command")
    run.set_defaults(act=_run)
    both = commands.add_parser("run-both", parents=[common, boots], help="boot, run a command on each, end")
    both.add_argument("command1")
    both.add_argument("command2")
    both.set_defaults(act=_run_both)
    prepare = commands.add_parser("prepare", parents=[common], help="packages and kernel")
    prepare.set_defaults(act=_prepare)
    return parser


if __name__ == "__main__":
    sys.exit(main())
