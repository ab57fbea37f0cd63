"""The guests' kernel: the distribution's own package, downloaded into a cache and unpacked, never installed, and an
initramfs with busybox, the modules that the lab loads and boot.sh."""

from __future__ import annotations

import fcntl
import gzip
import lzma
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from roce_lab import packages
from roce_lab.errors import LabError

BOOT = Path(__file__).with_name("boot.sh")

# Loaded in this order, after what they depend on. A name that the kernel has built in is skipped.
MODULES = (
    "crc32_generic",
    "virtio_pci",
    "virtio_console",
    "virtio_rng",
    "9p",
    "9pnet_virtio",
    "overlay",
    "virtio_net",
    "rdma_rxe",
    "ib_uverbs",
    "rdma_ucm",
    "sch_netem",
    "sch_prio",
)
PROVED = ("rdma_rxe", "9pnet_virtio", "overlay")  # without these there is no lab


@dataclass(frozen=True, slots=True)
class Kernel:
    vmlinuz: Path
    initramfs: Path
    release: str


def default_cache() -> Path:
    """$ROCE_LAB_CACHE, else /var/cache/distserve-roce-lab for root, else $XDG_CACHE_HOME/distserve/roce-lab."""
    if chosen := os.environ.get("ROCE_LAB_CACHE"):
        return Path(chosen)
    if os.geteuid() == 0:
        return Path("/var/cache/distserve-roce-lab")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "distserve" / "roce-lab"


def prepare(cache: Path) -> Kernel:
    """The kernel, downloaded once, about 70 MB. Raises LabError if no package can be had."""
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / "lock"):
        tree = cache / "tree"
        if not (tree / "complete").exists():
            try:
                _download(cache, tree)
            except LabError:
                if os.geteuid() != 0:
                    raise
                packages.update()  # apt has no lists yet, or names a kernel that is gone
                _download(cache, tree)
        vmlinuz = next((tree / "boot").glob("vmlinuz-*"))
        release = vmlinuz.name.removeprefix("vmlinuz-")
        initramfs = cache / "initramfs.gz"
        _pack(tree, release, initramfs)
        return Kernel(vmlinuz, initramfs, release)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def _download(cache: Path, tree: Path) -> None:
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        _run(["apt-get", "download", *_kernel_packages()], cwd=folder)
        for package in Path(folder).glob("*.deb"):
            _run(["dpkg-deb", "-x", str(package), str(tree)])
    if (tree / "usr/lib/modules").is_dir() and not (tree / "lib").exists():
        (tree / "lib").symlink_to("usr/lib")
    images = list((tree / "boot").glob("vmlinuz-*"))
    if len(images) != 1:
        raise LabError(f"the kernel packages hold {len(images)} kernels in {tree}/boot, expected one")
    _run([packages.find("depmod"), "-b", str(tree), images[0].name.removeprefix("vmlinuz-")])
    (tree / "complete").touch()


def _kernel_packages() -> list[str]:
    """What the distribution's newest generic kernel consists of: one package on Debian, three on Ubuntu."""
    for meta in ("linux-image-amd64", "linux-image-generic"):
        depends = subprocess.run(
            ["apt-cache", "depends", meta], capture_output=True, text=True, timeout=60, check=False
        )
        names = re.findall(r"Depends: ((?:linux-image|linux-modules-extra)-\d\S+)", depends.stdout)
        if not names:
            continue
        images = [n for n in names if n.startswith("linux-image-")]
        depends = subprocess.run(
            ["apt-cache", "depends", images[0]], capture_output=True, text=True, timeout=60, check=False
        )
        modules = re.findall(r"Depends: (linux-modules-\d\S+)", depends.stdout)
        return list(dict.fromkeys([images[0], *modules, *(n for n in names if n not in images)]))
    raise LabError("apt knows no kernel package (linux-image-amd64 or linux-image-generic): run apt-get update as root")


def _pack(tree: Path, release: str, initramfs: Path) -> None:
    """Packed anew when boot.sh has changed."""
    stamp = initramfs.with_suffix(".made-of")
    made_of = f"{release}\n{' '.join(MODULES)}\n{BOOT.read_text()}"
    if initramfs.exists() and stamp.exists() and stamp.read_text() == made_of:
        return
    modules = tree / "lib/modules" / release
    order = _load_order((modules / "modules.dep").read_text(), (modules / "modules.builtin").read_text())
    with tempfile.TemporaryDirectory(dir=initramfs.parent) as folder:
        root = Path(folder)
        (root / "bin").mkdir()
        (root / "modules").mkdir()
        shutil.copy(packages.find("busybox"), root / "bin/busybox")
        names = [f"{_module_name(module)}.ko" for module in order]
        for module, name in zip(order, names, strict=True):
            (root / "modules" / name).write_bytes(_unpacked(modules / module))
        (root / "modules/order").write_text("".join(f"{name}\n" for name in names))
        shutil.copy(BOOT, root / "init")
        (root / "init").chmod(0o755)
        listing = "\n".join(str(p.relative_to(root)) for p in sorted(root.rglob("*")))
        packed = subprocess.run(
            [packages.find("cpio"), "-o", "-H", "newc", "--quiet", "-R", "0:0"],
            cwd=root,
            input=listing.encode(),
            capture_output=True,
            check=True,
            timeout=60,
        )
    initramfs.write_bytes(gzip.compress(packed.stdout, 1))
    stamp.write_text(made_of)


def _load_order(dependencies: str, builtin: str) -> list[str]:
    """Paths of MODULES and of what they need, each after what it needs. Arguments: the texts of modules.dep and
    modules.builtin (kmod's modules.dep(5)). Raises LabError if one of PROVED is neither there nor built in."""
    needs = {}
    for line in dependencies.splitlines():
        module, _, others = line.partition(":")
        needs[module] = others.split()
    by_name = {_module_name(path): path for path in needs}
    built_in = {_module_name(path) for path in builtin.split()}
    order: list[str] = []

    def add(path: str) -> None:
        for other in needs[path]:
            add(other)
        if path not in order:
            order.append(path)

    for name in MODULES:
        if name in by_name:
            add(by_name[name])
        elif name in PROVED and name not in built_in:
            raise LabError(f"the kernel has no module {name}: the lab needs a distribution's generic kernel")
    return order


def _module_name(path: str) -> str:
    return Path(path).name.partition(".")[0].replace("-", "_")


def _unpacked(module: Path) -> bytes:
    """Distributions compress modules, each in its way; busybox loads plain ones."""
    if module.suffix == ".xz":
        return lzma.decompress(module.read_bytes())
    if module.suffix == ".zst":
        command = [packages.find("zstd"), "-dc", str(module)]
        return subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    return module.read_bytes()


def _run(command: list[str], cwd: str | None = None) -> None:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=packages.DOWNLOAD_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise LabError(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stderr[-2000:]}")
