"""`distserve bench` as it is typed: what it prints and writes, its exit status, its errors."""

import asyncio
import json
import os
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from distserve.bench.answers import THROTTLED
from tests.integration.bench.scripted import Asked, Reply, Scripted, serving, streaming

FEW = ("--requests", "25", "--input", "20", "--output", "4", "--warmup", "2")


async def bench(*options: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "distserve.cli", "bench", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200", **(env or {})},
    )
    try:
        async with asyncio.timeout(60):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_the_table_says_what_was_measured_of_what_with_what() -> None:
    async with serving(Scripted(streaming(ttft_s=0.01, gap_s=0.002), model="tiny")) as server:
        status, out, err = await bench(
            server.url, "--concurrency", "2", *FEW, "--slo", "ttft=2s,tpot=1s", "--seed", "7"
        )
    assert status == 0, err
    for expected in (
        f"tiny at {server.url}/v1/chat/completions",
        "closed loop, 2 at once; input 20, output 4; seed 7",
        "25 of 25 requests ended well",
        "goodput",
        "(100.0% within the SLO)",
        "prompts of 20.0 tokens on average (25 of 25 as asked; lengths: by the server's /tokenize)",
        "answers of 4.0 (25 of 25 as asked)",
        "n/a: too few samples; needed are P90 100, P99 1,000, P99.9 10,000",
        "tokens are counted by the usage",
        "cores,",
        "alone, 2 streams: first token",
    ):
        assert expected in out, out
    row = re.search(r"time to first token +([\d.]+) \[([\d.]+), ([\d.]+)\] +n/a", out)
    assert row, out
    low, value, high = float(row[2]), float(row[1]), float(row[3])
    assert 9.5 <= low <= value <= high < 200


async def test_the_document_holds_every_request_and_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    async with serving(Scripted(streaming())) as server:
        options = ("--rate", "60", "--constant", *FEW, "--no-floor", "--json", str(path), "--header", "X-Token: hush")
        status, _, err = await bench(server.url, *options, env={"OPENAI_API_KEY": "sk-secret"})
        assert server.asked[0].headers["authorization"] == "Bearer sk-secret"
    assert status == 0, err
    text = path.read_text()
    document = json.loads(text)
    assert len(document["results"]) == 27
    assert document["format"] == 1
    assert document["client"]["floor"] is None
    assert document["client"]["hardware"]["CPU"]
    assert document["sides"][0]["server"]["facts"]["/version"] == {"version": "1.2.3"}
    assert document["sides"][0]["server"]["facts"]["server header"] == "scripted"
    assert "sk-secret" not in text
    assert "hush" not in text


async def test_the_page_is_one_file_with_its_pictures(tmp_path: Path) -> None:
    path = tmp_path / "out.html"

    async def script(asked: Asked, reply: Reply) -> None:
        if len(server.answers) % 5 == 4:
            await reply.document({"error": {"message": "<b>later</b>"}}, 429, {"Retry-After": "1"})
        else:
            await streaming(ttft_s=0.01, gap_s=0.002)(asked, reply)

    async with serving(Scripted(script)) as server:
        status, _, err = await bench(server.url, "--rate", "80", *FEW, "--html", str(path), "--slo", "ttft=1s")
    assert status == 0, err
    page = path.read_text()
    outside = re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!#)([^"')\s>]+)""", page)
    assert not outside
    assert "<script" not in page
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 3
    for picture in pictures:
        root = ET.fromstring(picture)
        assert root.attrib["aria-label"]
        assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 10
    words = re.sub(r"<[^>]+>", " ", page)
    for expected in (
        "time to first token",
        "needs at least 1,000 samples",
        THROTTLED,
        "seed 0",
        "failed",
        "client alone",
    ):
        assert expected in words, expected
    assert "&lt;b&gt;later&lt;/b&gt;" in page


async def test_a_comparison_prints_one_table_of_ratios(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    async with (
        serving(Scripted(streaming(ttft_s=0.01))) as a,
        serving(Scripted(streaming(ttft_s=0.03), model="b")) as b,
    ):
        options = ("--compare", b.url, "--concurrency", "1", "--requests", "30", "--input", "20", "--output", "4")
        status, out, err = await bench(a.url, *options, "--no-floor", "--html", str(path))
    assert status == 0, err
    assert "A: scripted at" in out
    assert "B: b at" in out
    assert re.search(r"ttft p50, ms +\d[\d.]* +\d[\d.]* +[12345][\d.]* +[\d.]+ to [\d.]+", out), out
    assert "B over A" in path.read_text()
    assert len(re.findall(r"<svg", path.read_text())) == 4


async def test_exit_status_1_if_nothing_ended_well() -> None:
    async def refuse_later(asked: Asked, reply: Reply) -> None:
        if server.answers:
            await reply.document({"error": {"message": "full"}}, 503)
        else:
            await streaming()(asked, reply)

    async with serving(Scripted(refuse_later)) as server:
        status, out, _ = await bench(server.url, *FEW, "--no-floor")
    assert status == 1
    assert "25 x HTTP 503: full" in out
    assert "warning: no request ended well" in out


@pytest.mark.parametrize(
    ("options", "status", "expected"),
    [
        (("http://127.0.0.1:1", "--no-floor"), 1, "http://127.0.0.1:1 does not answer GET /v1/models"),
        (("localhost:8000",), 2, "URL localhost:8000: it is http://HOST:PORT"),
        (("http://h", "--rate", "0"), 2, "--rate 0.0: requests a second, above 0"),
        (("http://h", "--input", "zipf:1"), 2, "--input zipf:1: it is a number, uniform:"),
        (("http://h", "--json", "/no/such/folder/x.json"), 2, "--json /no/such/folder/x.json: there is no folder"),
        (("http://h", "--tokenizer", "/no/such"), 2, "--tokenizer /no/such: it is a folder with a tokenizer.json"),
        (("http://h", "--no-such-option"), 2, "No such option"),
    ],
)
async def test_errors_name_option_value_and_what_would_do(options: tuple[str, ...], status: int, expected: str) -> None:
    found, out, err = await bench(*options)
    plain = re.sub(r"[│\s]+", " ", err)
    assert found == status, err
    assert expected in plain, err
    assert "Traceback" not in err
    assert not out
