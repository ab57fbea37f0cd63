"""The status page in a browser, at a real cluster: what people see, and that it asks nobody else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.cluster import Cluster
from tests.compose.browser import Browser, Page, chromium
from tests.tiny_models import make_tiny

try:
    chromium()
    MISSING = ""
except FileNotFoundError as e:
    MISSING = str(e)

pytestmark = [pytest.mark.compose, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

LIVE = "document.getElementById('link').textContent === 'live'"
KEY = "a key for this test alone"


def text(element: str) -> str:
    return f"document.getElementById('{element}').textContent"


def tile(name: str) -> str:
    """The number that a tile shows."""
    return f"[...document.querySelectorAll('#tiles div')].find((t) => t.firstChild.textContent === '{name}')"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("page")
    model = make_tiny("llama", folder / "model")
    settings = {"transport.kind": "tcp", "decode.max_local_prefill_tokens": 0}
    with Cluster(model, folder / "run", kvstore=[{}], settings=settings) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, cluster: Cluster) -> Page:
    page = browser.open(f"{cluster.url}/")
    page.wait_for(LIVE)
    return page


def ask(page: Page, prompt: str, **fields: str) -> None:
    """As a person would: values into fields, a click."""
    for name, value in {"prompt": prompt, **fields}.items():
        page.evaluate(f"document.getElementById('{name.replace('_', '-')}').value = {value!r}")
    page.evaluate("document.getElementById('send').click()")


def is_clean(page: Page, cluster: Cluster) -> None:
    """Nothing was complained of, and nobody else was asked."""
    assert page.errors == []
    hosts = {urlsplit(url).netloc for url in page.requests if not url.startswith("data:")}
    assert hosts == {urlsplit(cluster.url).netloc}


def test_figures_of_every_service_appear(page: Page, cluster: Cluster) -> None:
    shown = page.evaluate("[...document.querySelectorAll('#services tbody tr')].map((row) => row.innerText)")
    assert [row.split("\n")[0].split("\t")[0] for row in shown] == ["gateway-0", "prefill-0", "decode-0", "kvstore-0"]
    assert all("\tok\t" in row for row in shown)
    assert "2047" in shown[1]
    assert page.evaluate(text("model")) == "tiny"
    tiers = page.evaluate("[...document.querySelectorAll('#tiers tbody td:first-child')].map((c) => c.textContent)")
    assert tiers == ["workers' pools", "dram", "disk"]
    assert page.evaluate("document.getElementById('warnings').hidden")
    is_clean(page, cluster)


def test_they_move_while_the_cluster_works(page: Page, cluster: Cluster) -> None:
    asked = "performance.getEntriesByName(new URL('status', location).href).length"
    before = page.evaluate(asked)
    assert cluster.post("/v1/completions", {"prompt": "In the beginning", "max_tokens": 40})[0] == 200
    page.wait_for(f"parseFloat({tile('tokens/s')}.lastChild.textContent) > 0")
    page.wait_for("document.querySelectorAll('#ttft-line .p50')[0].getAttribute('d') !== ''")
    page.wait_for("[...document.querySelectorAll('#flows tbody tr')].some((r) => r.innerText.includes('prefill'))")
    page.wait_for(f"{asked} >= {before + 2}")
    is_clean(page, cluster)


def test_a_prompt_is_answered_and_its_time_is_drawn_to_scale(page: Page, cluster: Cluster) -> None:
    ask(page, "Tell me about blocks. " * 20, max_tokens="32", promise="20000", priority="vip")
    page.wait_for("!document.getElementById('timeline').hidden", 30)
    assert len(page.evaluate(text("answer"))) > 10
    assert "32 output tokens" in page.evaluate(text("said"))
    legend = page.evaluate("[...document.querySelectorAll('#legend li')].map((item) => item.textContent)")
    assert [item.split(" ")[0] for item in legend] == ["gateway", "queue", "prefill", "transfer", "decode", "rest"]
    boxes = page.evaluate(
        "[...document.querySelectorAll('#bar rect')].map((r) => ['x', 'width'].map((a) => Number(r.getAttribute(a))))"
    )
    for (x, width), (following, _) in pairwise(boxes):
        assert following == pytest.approx(x + width, abs=0.01)  # without holes
    widths = [width for _, width in boxes]
    assert sum(widths) <= 1000.01
    assert widths[2] > 0  # prefill
    assert widths[4] > 0  # decode
    shares = [int(item.split("(")[1].split(" ")[0]) for item in legend]
    assert shares == [pytest.approx(100 * width / sum(widths), abs=0.6) for width in widths]
    assert "of KV by tcp as decode" in page.evaluate(text("beside"))  # vip's class
    assert page.evaluate("document.querySelectorAll('#bar .tick').length") > 3
    is_clean(page, cluster)


def test_an_answer_can_be_stopped_and_an_error_is_told(page: Page, cluster: Cluster) -> None:
    ask(page, "On and on", max_tokens="1500")
    page.wait_for(f"{text('answer')}.length > 5")
    page.evaluate("document.getElementById('stop').click()")
    page.wait_for(f"{text('said')} === 'stopped'")
    assert not page.evaluate("document.getElementById('send').disabled")
    is_clean(page, cluster)
    ask(page, "Far too much", max_tokens="99999")
    page.wait_for(f"{text('said')}.startsWith('failed: 400')")
    assert "max_tokens" in page.evaluate(text("said"))


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("", "failed: the answer broke off"),
        ("data: [DO", "failed: the answer broke off"),
        ("data: [DONE]\n\n", "ended: done"),
        ('data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\n', "ended: length"),
    ],
)
def test_a_stream_that_breaks_off_is_no_answer(page: Page, ending: str, said: str) -> None:
    stream = 'data: {"choices": [{"delta": {"content": "half"}}]}\n\n' + ending
    page.evaluate(
        f"""(() => {{
        const real = window.fetch;
        window.fetch = async (url, ...more) => url === 'status' ? real(url, ...more) : new Response({stream!r});
        }})()"""
    )
    ask(page, "Hello")
    page.wait_for(f"{text('said')}.startsWith('failed') || {text('said')}.startsWith('ended')")
    assert (page.evaluate(text("said")), page.evaluate(text("answer"))) == (said, "half")
    assert page.evaluate("document.getElementById('said').classList.contains('failed')") == said.startswith("failed")
    assert not page.evaluate("document.getElementById('send').disabled")


def test_what_comes_from_outside_is_text_and_never_markup(page: Page, cluster: Cluster) -> None:
    odd = "<img src=x onerror=\"document.title='gone'\">"
    page.evaluate(
        f"""(async () => {{
        const real = window.fetch;
        const status = await (await real('status')).json();
        for (const one of status.services) one.reasons = [{odd!r}], one.id = {odd!r} + one.id, one.host = {odd!r};
        status.warnings = [{{rule: 'slo', message: {odd!r}}}];
        status.troubles = [{{at_unix_s: 1, service: {odd!r}, code: {odd!r}, message: {odd!r}}}];
        status.model = {odd!r};
        window.fetch = async () => new Response(JSON.stringify(status));
        }})()"""
    )
    page.wait_for(f"{text('model')}.startsWith('<img')")
    page.wait_for(f"{text('troubles')}.includes('onerror')")
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.evaluate(text("warning-list")) == odd
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200  # however long names are
    assert not page.evaluate("document.getElementById('warnings').hidden")


def test_a_gateway_that_goes_away_is_told_and_found_again(browser: Browser, cluster: Cluster) -> None:
    first = cluster.url
    other = cluster.start_gateway("gateway-1")
    try:
        page = browser.open(f"{cluster.url}/")
        page.wait_for(LIVE)
        other.freeze()
        page.wait_for(f"{text('link')}.startsWith('no figures')", 20)
        assert "trying again in 2 s" in page.evaluate(text("link"))
        other.thaw()
        page.wait_for(LIVE, 20)
    finally:
        cluster.url = first
        other.thaw()
        assert other.terminate() == 0
        cluster.services.remove(other)


def test_an_api_key_is_asked_for_where_one_is_needed(browser: Browser, cluster: Cluster, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(f'- {{name: one, sha256: "{hashlib.sha256(KEY.encode()).hexdigest()}"}}\n')
    first = cluster.url
    keyed = cluster.start_gateway("gateway-2", {"gateway.keys_file": str(keys)})
    try:
        page = browser.open(f"{cluster.url}/")
        page.wait_for(LIVE)
        assert not page.evaluate("document.getElementById('key-field').hidden")
        ask(page, "Hello", max_tokens="8", key="not it")
        page.wait_for(f"{text('said')}.startsWith('failed: 401')")
        ask(page, "Hello", max_tokens="8", key=KEY)
        page.wait_for("!document.getElementById('timeline').hidden", 30)
        assert page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length") == 0
    finally:
        cluster.url = first
        assert keyed.terminate() == 0
        cluster.services.remove(keyed)


@pytest.mark.parametrize("width", [360, 390, 600, 768, 1120, 1121, 1200, 1900])
def test_nothing_runs_out_of_the_page_at_any_width(browser: Browser, cluster: Cluster, width: int) -> None:
    page = browser.open(f"{cluster.url}/", width=width)
    page.wait_for(LIVE)
    ask(page, "Hello " * 50, max_tokens="16")
    page.wait_for("!document.getElementById('timeline').hidden", 30)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    inside = """[...document.querySelectorAll('section *')].filter((e) => {
        const box = e.getBoundingClientRect();
        return box.width && box.right > innerWidth + 1;
    }).map((e) => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(inside) == []
    is_clean(page, cluster)


def test_the_page_can_be_used_without_a_mouse_and_read_out(page: Page) -> None:
    """What a screen reader is told: names of fields and pictures, headers of tables."""
    nodes = page.accessibility()
    names = {(node["role"], node["name"]) for node in nodes}
    for role, name in (
        ("textbox", "Prompt"),
        ("spinbutton", "Max tokens"),
        ("combobox", "Priority"),
        ("button", "Send"),
        ("heading", "Services"),
        ("columnheader", "KV blocks"),
    ):
        assert (role, name) in names, (role, name)
    assert all(name for role, name in names if role in ("img", "image", "textbox", "button", "link", "spinbutton"))
    focusable = page.evaluate(
        "[...document.querySelectorAll('a, button, input, textarea, select')].map((e) => e.tabIndex)"
    )
    assert set(focusable) == {0}
    contrast = "getComputedStyle(document.body).color !== getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(contrast)
