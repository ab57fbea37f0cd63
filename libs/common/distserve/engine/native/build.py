"""Compiling the source, once for each compiler, machine and dtype: kept in the cache folder.

The library is for the processor it is compiled on (-march=native), so its name is a hash of all that shapes it: the
sources, the flags, the compiler's version, the processor's features. One process at a time compiles; it writes beside
and renames, so that a killed one leaves nothing that could be loaded.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from distserve.machine import cache_folder

SOURCES = Path(__file__).parent / "source"
DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
COMPILE_TIMEOUT_S = 300.0
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC", "-w")


class NativeUnavailable(Exception):
    """There is no compiled code for this model here; the text says why. Never an error for a user: it runs without."""


def library(dtype: str) -> ctypes.CDLL:
    """The library for that dtype, from the cache or compiled now (seconds). Raises NativeUnavailable."""
    compiler = _compiler()
    command = [compiler, *FLAGS, _processor_flag(), f"-DDISTSERVE_DTYPE={DTYPES[dtype]}"]
    place = cache_folder() / "native" / f"{dtype}-{_fingerprint(command)}.so"
    try:
        if not place.is_file():
            place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _compile(command, place)
        _require_own(place)
        return _load(command, place)
    except OSError as e:
        raise NativeUnavailable(f"compiled code can't be kept or loaded: {e}") from e


def _load(command: list[str], place: Path) -> ctypes.CDLL:
    """A file that can't be loaded (cut off by a crash, say) is made again, once."""
    try:
        return ctypes.CDLL(str(place))
    except OSError:
        place.unlink(missing_ok=True)
        _compile(command, place)
        return ctypes.CDLL(str(place))


def _require_own(place: Path) -> None:
    """It will run as us: nobody else may have written it, or be able to."""
    for path in (place.parent, place):
        status = path.lstat()
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022 or path.is_symlink():
            raise NativeUnavailable(f"{path} is another user's, or others may write to it")


def _compiler() -> str:
    named = os.environ.get("CXX", "")
    for name in (named,) if named else ("c++", "g++", "clang++"):
        if found := shutil.which(name):
            return found
    raise NativeUnavailable(f"no C++ compiler ({named or 'c++, g++ or clang++'})")


def _processor_flag() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _fingerprint(command: list[str]) -> str:
    about = hashlib.sha256()
    for part in (*command, _version(command[0]), _processor(), *platform.libc_ver()):
        about.update(part.encode() + b"\0")
    for source in sorted(SOURCES.iterdir()):
        about.update(source.name.encode() + b"\0" + source.read_bytes())
    return about.hexdigest()[:24]


def _version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise NativeUnavailable(f"{compiler} does not run: {e}") from e
    return done.stdout


def _processor() -> str:
    """Its architecture and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("flags", "Features", "model name", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))


def _compile(command: list[str], place: Path) -> None:
    deadline = time.monotonic() + COMPILE_TIMEOUT_S
    with open(place.with_suffix(".lock"), "w") as lock:
        while not place.is_file():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise NativeUnavailable("another process has been compiling for too long") from None
                time.sleep(0.05)
        if place.is_file():
            return
        for left in place.parent.glob(".compiling-*"):  # of one that was killed
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".compiling-") as folder:
            made = Path(folder) / "made.so"
            status, errors = _run([*command, str(SOURCES / "forward.cpp"), "-o", str(made)])
            if status:
                first = next(iter(errors.strip().splitlines()), f"exit status {status}")
                raise NativeUnavailable(f"{command[0]} can't compile it: {first}")
            made.chmod(0o700)
            with open(made, "rb") as whole:
                os.fsync(whole.fileno())
            made.replace(place)


def _run(command: list[str]) -> tuple[int, str]:
    """Exit status and what it said. It and the processes that it starts end with this one, at the latest."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0) as p:

        def end() -> None:
            if p.poll() is None:  # its group can't be another's as long as it is not reaped
                os.killpg(p.pid, signal.SIGKILL)

        atexit.register(end)
        try:
            _, errors = p.communicate(timeout=COMPILE_TIMEOUT_S)
        except subprocess.TimeoutExpired as e:
            end()
            raise NativeUnavailable(f"{command[0]} took longer than {COMPILE_TIMEOUT_S:.0f} s") from e
        finally:
            atexit.unregister(end)
        return p.returncode, errors
