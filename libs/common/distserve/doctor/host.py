"""The host as the checks see it: files below a root, and tools. Tests give both of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_TOOL_S = 5.0
_TOOL_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/local/sbin"])


@dataclass(frozen=True, slots=True)
class Output:
    """Of a tool that ran: `problem` is empty and `text` is its standard output. Else `problem` says why there is none,
    in a line; `missing` if it is not installed."""

    text: str = ""
    problem: str = ""
    missing: bool = False


Run = Callable[[Sequence[str]], Output]


def run_tool(command: Sequence[str]) -> Output:
    """Runs a tool that only reads. Never raises; one that takes longer than 5 s is ended."""
    path = shutil.which(command[0], path=_TOOL_PATH)
    if path is None:
        return Output(problem=f"{command[0]} is not installed", missing=True)
    try:
        done = subprocess.run(
            [path, *command[1:]],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TOOL_S,
            check=False,
            env=os.environ | {"LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        return Output(problem=f"{command[0]}: {e}")
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip() or f"ended with status {done.returncode}").splitlines()
        return Output(problem=f"{command[0]}: {lines[-1]}")
    return Output(done.stdout)


@dataclass(frozen=True, slots=True)
class Host:
    """`root` stands for `/`."""

    root: Path = Path("/")
    run: Run = run_tool

    def text(self, path: str) -> str:
        """A file's text without surrounding space; empty if it can't be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        """A file's decimal number; None if there is none."""
        try:
            return int(self.text(path))
        except ValueError:
            return None

    def names(self, path: str) -> list[str]:
        """What is in a folder, sorted; empty if there is none."""
        try:
            return sorted(os.listdir(self.root / path.lstrip("/")))
        except OSError:
            return []

    def has(self, path: str) -> bool:
        return (self.root / path.lstrip("/")).exists()
