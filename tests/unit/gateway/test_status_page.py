"""The page's files: what they may do, and that they are in what is installed."""

import re
import zipfile
from pathlib import Path

import pytest

from distserve_gateway.status_page import FILES, FOLDER
from tests.unit.gateway.scripted import says, serving

ROOT = Path(__file__).parents[3]
TEXTS = {name: (FOLDER / name).read_text() for name, _ in FILES.values()}


async def test_the_page_and_its_files_are_served_to_everybody_under_a_strict_policy() -> None:
    async with serving(says("x")) as cluster, cluster.client() as client:
        for path, (name, content_type) in FILES.items():
            response = await client.get(path)
            assert response.status_code == 200
            assert response.text == TEXTS[name]
            assert response.headers["content-type"] == content_type
            policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
            assert policy["default-src"] == "'none'"
            assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
            assert response.headers["x-content-type-options"] == "nosniff"
        assert (await client.get("/page/../status_page.py")).status_code == 404
        assert (await client.get("/page/other.js")).status_code == 404


def test_every_file_of_the_folder_is_served_and_everything_that_files_name_is_there() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(TEXTS)
    html = TEXTS["index.html"]
    named = {f"/{name}" for name in re.findall(r'(?:src|href)="((?:page/)[^"]+)"', html)}
    imported = {f"/page/{name}" for text in TEXTS.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert named | imported == FILES.keys() - {"/"}


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_comes_from_elsewhere_and_data_is_never_markup(name: str) -> None:
    text = TEXTS[name].replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?:|(src|href|url\()[=\"']*//", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
    assert not re.search(r"\sstyle=|\son[a-z]+=", text)  # the policy would block these
    assert not re.search(r"localStorage|sessionStorage|document\.cookie", text)  # an API key stays in memory


def test_every_element_that_a_script_asks_for_is_in_the_page() -> None:
    ids = set(re.findall(r'\bid="([^"]+)"', TEXTS["index.html"]))
    asked = {i for text in TEXTS.values() for i in re.findall(r'byId\("([^"]+)"\)', text)}
    assert asked
    assert asked <= ids
    labels = set(re.findall(r'<label for="([^"]+)"', TEXTS["index.html"]))
    fields = set(re.findall(r'<(?:input|select|textarea) id="([^"]+)"', TEXTS["index.html"]))
    assert fields == labels


def test_the_wheel_and_the_installed_package_hold_the_page(tmp_path: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    wheel = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    with zipfile.ZipFile(wheel) as archive:
        for name, text in TEXTS.items():
            assert archive.read(f"distserve_gateway/page/{name}").decode() == text
