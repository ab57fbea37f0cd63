"""The house as ARCHITECTURE.md draws it: who imports whom, sizes of files, pins, documents that keep to the code."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILES = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "constraints.txt")
ROOMS = ("libs", "services", "tests", "benchmarks", "examples", "docs", "deploy")
MOST_LINES = {True: 400, False: 500}  # of what is shipped; of the rest


def sources() -> list[Path]:
    return [p for room in ROOMS for p in (ROOT / room).rglob("*.py") if "__pycache__" not in p.parts]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100, check=False)


def test_imports_keep_to_the_contracts() -> None:
    done = run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache")
    assert done.returncode == 0, done.stdout[-3000:]


def test_pyverbs_is_imported_only_where_the_device_is() -> None:
    """As text: it is looked for when it is needed, by importlib, which import-linter does not see."""
    imports = re.compile(r"""^\s*(import|from)\s+pyverbs\b|(import_module|__import__)\(f?["']pyverbs\b""", re.MULTILINE)
    found = [path.relative_to(ROOT) for path in sources() if imports.search(path.read_text())]
    room = Path("libs/common/distserve/transport/rdma")
    assert found, "this looks for the wrong thing"
    assert not [str(path) for path in found if room not in path.parents]


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("distserve_gateway.main", ("torch", "transformers", "numpy", "distserve_prefill", "distserve_decode")),
        ("distserve_prefill.main", ("fastapi", "uvicorn", "distserve_gateway", "distserve_decode")),
        ("distserve_decode.main", ("fastapi", "uvicorn", "distserve_gateway", "distserve_prefill")),
        (
            "distserve_kvstore.main",
            ("torch", "transformers", "fastapi", "distserve_gateway", "distserve_prefill", "distserve_decode"),
        ),
        ("distserve.cli", ("torch", "transformers", "numpy", "nats", "fastapi", "distserve_gateway")),
        ("distserve.up", ("torch", "transformers", "numpy", "fastapi", "distserve_gateway", "distserve_prefill")),
    ],
)
def test_a_process_loads_only_what_is_its_own(module: str, unwanted: tuple[str, ...]) -> None:
    done = run(sys.executable, "-c", f"import sys, {module}; print(*sys.modules)")
    assert done.returncode == 0, done.stderr[-3000:]
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & set(unwanted)


def test_no_file_grows_beyond_one_noun() -> None:
    assert len(sources()) > 50
    long = {}
    for path in sources():
        name, num_lines = path.relative_to(ROOT), len(path.read_text().splitlines())
        if num_lines > MOST_LINES[name.parts[0] in ("libs", "services")]:
            long[str(name)] = num_lines
    assert not long, f"over {MOST_LINES} lines: look for a second noun"


def test_the_house_has_its_files() -> None:
    assert not [name for name in FILES if not (ROOT / name).is_file()]
    assert (ROOT / ".ci/run").stat().st_mode & 0o100


def pins(text: str) -> dict[str, str]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    assert len(found) == len(lines), "pinned twice"
    return found


def needed() -> dict[str, list[Requirement]]:
    """Every package that an installation of everything takes, by name, with what its dependents ask of it: ours in
    pyproject.toml, those of others in the metadata of what is installed."""
    project = PROJECT["project"]
    ours = [*project["dependencies"], *PROJECT["build-system"]["requires"], "editables"]  # editables: in the Makefile
    ours += [text for extra in project["optional-dependencies"].values() for text in extra]
    todo = [r for r in map(Requirement, ours) if r.name != "distserve"]
    found: dict[str, list[Requirement]] = {}
    walked: set[tuple[str, str]] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        found.setdefault(name, []).append(requirement)
        for extra in {"", *requirement.extras} - {e for n, e in walked if n == name}:
            walked.add((name, extra))
            theirs = map(Requirement, requires(name) or [])
            todo += [r for r in theirs if r.marker is None or r.marker.evaluate({"extra": extra})]
    return found


def unpinned(pinned: dict[str, str]) -> list[str]:
    return sorted(
        str(requirement)
        for name, asked in needed().items()
        for requirement in asked
        if name not in pinned or not requirement.specifier.contains(pinned[name], prereleases=True)
    )


def test_everything_that_is_installed_has_a_pin_that_satisfies_it() -> None:
    bad = unpinned(pins((ROOT / "constraints.txt").read_text()))
    assert not bad, "not in constraints.txt, or pinned to a version that a dependent excludes"


@pytest.mark.parametrize("package", ["msgspec", "setuptools", "googleapis-common-protos"])
def test_a_missing_pin_is_noticed_however_deep(package: str) -> None:
    text = (ROOT / "constraints.txt").read_text()
    without = re.sub(rf"^{package}==.*\n", "", text, flags=re.MULTILINE)
    assert {Requirement(r).name for r in unpinned(pins(without))} == {package}


def test_every_package_of_the_wheel_is_under_the_import_contracts() -> None:
    shipped = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert {Path(p).name for p in shipped} == set(PROJECT["tool"]["importlinter"]["root_packages"])


def test_the_table_of_settings_is_current() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from generate import with_table
    finally:
        sys.path.pop(0)
    text = (ROOT / "docs/configuration.md").read_text()
    assert with_table(text) == text, "run `make docs`"


def commands(document: Path) -> list[str]:
    """Lines of its shell blocks, without prompt, comment and variables in front."""
    blocks = re.findall(r"```(?:sh|shell|bash|console)\n(.*?)```", document.read_text(), re.DOTALL)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [re.sub(r"^([A-Z_]+=\S+\s+)+", "", line) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_commands_of_the_documents_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in commands(ROOT / name):
        if line.startswith("make "):
            assert line.split()[1] in targets, line
        if line.startswith("distserve "):
            words = line.split("#")[0].split()[1:]
            command = words[: 2 if words[0] in ("model", "config", "kv", "key") else 1]
            shown = run(sys.executable, "-m", "distserve.cli", *command, "--help")
            assert shown.returncode == 0, line
            for option in (w.partition("=")[0] for w in words if w.startswith("--")):
                assert option in shown.stdout, f"{option} of: {line}"


@pytest.mark.parametrize(
    "name", [n for n in FILES if n.endswith(".md")] + [f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")]
)
def test_links_within_the_documents_lead_somewhere(name: str) -> None:
    document = ROOT / name
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert not missing
