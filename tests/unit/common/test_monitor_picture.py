"""The picture at many sizes: never larger than the screen, the important first."""

import io
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from distserve.monitor.picture import TWO_COLUMNS, Picture
from distserve.status import ClusterStatus, GatewayStatus, ServiceStatus, Warning
from tests.status_server import busy_status

EMPTY = ClusterStatus(
    at_unix_s=0.0, interval_s=0.0, model="m", version="1", gateway=GatewayStatus(id="g", status="warming")
)


def drawn(
    status: ClusterStatus | None,
    width: int = 80,
    height: int | None = 24,
    *,
    colour: bool = False,
    trouble: str = "",
    age_s: float = 0.0,
) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height or 1000, force_terminal=colour, highlight=False)
    console.print(Picture(status, height, trouble=trouble, age_s=age_s, foot="q quits"), end="")
    return out.getvalue()


@settings(max_examples=40)
@given(
    status=st.sampled_from([None, EMPTY, busy_status(0), busy_status(2), busy_status(40)]),
    width=st.integers(20, 260),
    height=st.integers(1, 90),
    trouble=st.sampled_from(["", "http://127.0.0.1:8000: Connection refused"]),
)
def test_it_is_never_larger_than_the_screen(
    status: ClusterStatus | None, width: int, height: int, trouble: str
) -> None:
    lines = drawn(status, width, height, trouble=trouble).splitlines()
    assert len(lines) <= height
    assert max(map(cell_len, lines), default=0) <= width


def test_a_small_terminal_has_what_matters() -> None:
    text = drawn(busy_status())
    for words in (
        "DistServe 1.2.3  tiny  gateway-0 degraded  breaker closed",
        "12 live  3.42 req/s, 3.30 good, 0 failed  412 tok/s",
        "! Decode steps take too long: add decode workers.",
        "! prefill-1: rdma cannot be used here: no device",
        "TTFT         41.2 ms   78.3 ms    136 ms",
        "prefill-1  prefill  degraded",
        "kvstore-0  kvstore  silent",
        "normal 98.9 % of 180, 3 refused",
        "q quits",
    ):
        assert words in text
    assert re.search(r"tok/s [▁-█]{10,} 412", text)
    assert text.count("rdma cannot be used here") == 1  # the gateway says the same of it
    assert "\x1b" not in text
    assert "! !" not in text


def test_a_larger_one_has_the_rest() -> None:
    text = drawn(busy_status(), 120, 40)
    for words in (
        "E2E           1.80 s",
        "transfer      900 us   1.71 ms   2.97 ms",
        "decode-1   decode   ok          4     0  █████▒▒··· 51.2 %    206       -  8.10 ms   3.50",
        "normal         190       180       178  98.9 %        3",
        "hbm       2,000  350.0 MiB  ██········ 25.0 %  40.0 %",
        "shm          prefill       10  85.8 MiB/s  8.0 GiB      3.10           -",
        "tcp          background     8       0 B/s  2.0 GiB         0       0.2 %",
        "1 min ago  decode-7  worker_lost  decode-7 left?[31m, unasked",
    ):
        assert words in text, words


def test_a_wide_one_has_two_columns() -> None:
    lines = drawn(busy_status(), TWO_COLUMNS, 40).splitlines()
    assert any("LAST 1 MIN" in line and "PRIORITY" in line for line in lines)


def test_of_too_many_services_those_in_trouble_are_shown() -> None:
    status = busy_status(40)
    services = [*status.services, ServiceStatus(id="decode-x", role="decode", status="draining")]
    text = drawn(msgspec.structs.replace(status, services=services))
    assert "decode-x" in text
    assert "kvstore-0" in text
    assert re.search(r"… \d\d more", text)


def test_a_long_warning_is_whole_where_there_is_room_and_cut_where_not() -> None:
    message = "It is " + "very " * 30 + "wrong, so do this."
    status = msgspec.structs.replace(busy_status(), warnings=[Warning(rule="slo", message=message)])
    assert "so do this." in drawn(status, 80, 60)
    small = drawn(status, 80, 20)
    assert "so do this." not in small
    assert "! It is very" in small
    assert "! prefill-1" in small


def test_several_warnings_go_before_old_errors() -> None:
    warnings = [Warning(rule="slo", message=f"Warning {i}: " + "see to it. " * 20) for i in range(5)]
    text = drawn(msgspec.structs.replace(busy_status(), warnings=warnings), 80, 24)
    for words in ("! Warning 0", "! Warning 2", "… 3 more", "TTFT", "SERVICE", "KV TIER"):
        assert words in text
    assert "ERRORS" not in text


def test_without_a_server_it_says_so_and_the_last_picture_is_grey() -> None:
    text = drawn(busy_status(), colour=True, trouble="http://h:1: Connection refused", age_s=72.0)
    first, *rest = text.splitlines()
    assert "http://h:1: Connection refused." in first
    assert "The last picture, 1 min old:" in first
    assert "TTFT" in text
    codes = set(re.findall(r"\x1b\[([\d;]*)m", "\n".join(rest)))
    assert codes <= {"2", "0"}, "only dim"
    assert {"32", "1"} <= set(re.findall(r"\x1b\[([\d;]*)m", drawn(busy_status(), colour=True)))


def test_before_the_first_answer_it_says_what_it_waits_for() -> None:
    assert "waiting for the first answer" in drawn(None)
    assert "Connection refused. Trying again." in drawn(None, trouble="http://h:1: Connection refused")


def test_an_empty_cluster_has_a_picture_too() -> None:
    text = drawn(EMPTY)
    assert "nobody is registered" in text
    assert "gateway" not in text.replace("g warming", "")


def test_as_tall_as_it_takes_nothing_is_left_out() -> None:
    text = drawn(busy_status(40), 100, None)
    assert len(re.findall(r"decode-\d+ +decode ", text)) == 40
    assert "more" not in text


@pytest.mark.parametrize("width", [80, 120])
def test_no_column_heading_is_cut(width: int) -> None:
    head, *rest = drawn(busy_status(1), width, 60).splitlines()
    assert "breaker closed" in head
    assert "…" not in "".join(rest)
