"""Real processes kept running, restarted, stopped in order."""

import asyncio
import os
import re
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from distserve.supervisor import REFUSED, Backoff, Spec, Supervisor

STAYS = """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: (print("bye", flush=True), sys.exit(0)))
    print("hello", flush=True)
    time.sleep(60)
"""
DEAF = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("hello", flush=True)
    time.sleep(60)
"""


def spec(name: str, code: str, grace_s: float = 10.0, role: str = "") -> Spec:
    command = (sys.executable, "-c", textwrap.dedent(code))
    env = dict(os.environ)
    return Spec(name=name, role=role or name, command=command, env=env, id_variable="THE_ID", grace_s=grace_s)


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def emit(self, name: str, line: str) -> None:
        self.lines.append(f"{name}: {line}")

    def count(self, text: str) -> int:
        return sum(text in line for line in self.lines)


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@asynccontextmanager
async def supervised(*specs: Spec, backoff: Backoff | None = None) -> AsyncIterator[tuple[Supervisor, Log]]:
    log = Log()
    async with Supervisor(log.emit, backoff) as supervisor:
        for s in specs:
            supervisor.start(s)
        yield supervisor, log
    assert supervisor.pids() == []


async def test_output_comes_line_by_line_under_the_childs_name() -> None:
    code = """
        import sys
        print('out', flush=True)
        print('err ÿ', file=sys.stderr, flush=True)
        sys.stdout.write('tail')
    """
    async with supervised(spec("a", code), backoff=Backoff(first_s=30)) as (_, log):
        await until(lambda: log.count("died"))
    assert log.lines[:3] == ["a: out", "a: err ÿ", "a: tail"]


async def test_a_line_without_end_comes_in_pieces() -> None:
    code = "import sys; sys.stdout.write('x' * 200_000); sys.stdout.flush()"
    async with supervised(spec("a", code), backoff=Backoff(first_s=30)) as (_, log):
        await until(lambda: log.count("died"))
    pieces = [line.removeprefix("a: ") for line in log.lines if line.startswith("a: ")]
    assert "".join(pieces) == "x" * 200_000
    assert len(pieces) > 1


async def test_stop_lets_a_child_end_by_itself() -> None:
    async with supervised(spec("a", STAYS)) as (supervisor, log):
        await until(lambda: log.count("hello"))
        (pid,) = supervisor.pids()
        await asyncio.wait_for(supervisor.stop(), 15)
        assert not alive(pid)
    assert log.lines == ["a: hello", "a: bye"]


async def test_a_child_that_does_not_end_in_its_grace_time_is_killed() -> None:
    async with supervised(spec("a", DEAF, grace_s=0.3)) as (supervisor, log):
        await until(lambda: log.count("hello"))
        (pid,) = supervisor.pids()
        await asyncio.wait_for(supervisor.stop(), 15)
        assert not alive(pid)
    assert log.count("a did not end within 0.3 s: killed") == 1


async def test_roles_stop_one_after_the_other() -> None:
    specs = [spec(n, STAYS, role=n[0]) for n in ("c0", "a0", "b0", "a1")]
    async with supervised(*specs) as (supervisor, log):
        await until(lambda: log.count("hello") == 4)
        await asyncio.wait_for(supervisor.stop(["a", "b"]), 30)
    order = [line[0] for line in log.lines if "bye" in line]
    assert order == ["a", "a", "b", "c"]


async def test_a_child_that_dies_is_reported_and_started_again_under_a_new_id() -> None:
    code = "import os, time; print('id', os.environ['THE_ID'], flush=True); time.sleep(60)"
    async with supervised(spec("w-0", code), backoff=Backoff(first_s=0.05)) as (supervisor, log):
        await until(lambda: log.count("id w-0-") == 1)
        first = supervisor.children["w-0"].id
        os.kill(supervisor.pids()[0], signal.SIGKILL)
        await until(lambda: log.count("id w-0-") == 2)
        second = supervisor.children["w-0"].id
    assert log.count("w-0 died (SIGKILL") == 1
    assert first != second
    assert [line.split()[-1] for line in log.lines if "id w-0-" in line] == [first, second]


async def test_delays_between_deaths_grow_and_are_said() -> None:
    async with supervised(spec("a", "raise SystemExit(3)"), backoff=Backoff(first_s=0.02, most_s=0.08)) as (_, log):
        await until(lambda: log.count("died") >= 4)
    said = [line for line in log.lines if "died" in line]
    assert [re.search(r"again in (\S+) s", line)[1] for line in said[:4]] == ["0.02", "0.04", "0.08", "0.08"]  # type: ignore[index]
    assert "exit status 3" in said[0]
    assert "4 times in a row" in said[3]


async def test_a_healthy_life_resets_the_delay() -> None:
    backoff = Backoff(first_s=0.02, most_s=10, healthy_s=0.0)  # any life counts as healthy
    async with supervised(spec("a", "raise SystemExit(3)"), backoff=backoff) as (_, log):
        await until(lambda: log.count("again in 0.02 s") >= 4)


def test_the_delay_stays_finite_however_often_it_dies() -> None:
    assert Backoff().delay_s(1) == 0.5
    assert Backoff().delay_s(100_000) == 30.0


async def test_a_refused_start_is_not_tried_again() -> None:
    async with supervised(spec("a", f"raise SystemExit({REFUSED})"), backoff=Backoff(first_s=0.01)) as (
        supervisor,
        log,
    ):
        await until(lambda: supervisor.refused)
        assert supervisor.children["a"].num_starts == 1
        await asyncio.wait_for(supervisor.stop(), 5)
    assert supervisor.refused == ["a"]
    assert log.count("refused to start") == 1


async def test_a_command_that_does_not_exist_is_reported_and_retried() -> None:
    bad = Spec(name="a", role="a", command=("/nonexistent/binary",))
    async with supervised(bad, backoff=Backoff(first_s=0.01, most_s=0.01)) as (_, log):
        await until(lambda: log.count("can't be started") >= 2)


async def test_stopping_does_not_wait_for_a_back_off() -> None:
    async with supervised(spec("a", "raise SystemExit(3)"), backoff=Backoff(first_s=60)) as (supervisor, log):
        await until(lambda: log.count("died"))
        await asyncio.wait_for(supervisor.stop(), 5)


async def test_leaving_by_an_error_kills_what_runs() -> None:
    pids: list[int] = []

    async def fail() -> None:
        async with supervised(spec("a", DEAF)) as (supervisor, log):
            await until(lambda: log.count("hello"))
            pids.extend(supervisor.pids())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert [alive(pid) for pid in pids] == [False]


async def test_killing_reaches_a_child_that_is_only_being_started() -> None:
    async with supervised(spec("a", DEAF)) as (supervisor, _):
        child = supervisor.children["a"]
        await asyncio.wait_for(child.kill(), 10)
        assert child.pid is None


async def test_a_terminals_interrupt_does_not_reach_the_children() -> None:
    code = "import os; print(os.getpgrp() == os.getpid(), flush=True); import time; time.sleep(60)"
    async with supervised(spec("a", code)) as (_, log):
        await until(lambda: log.lines)
    assert log.lines[0] == "a: True"


async def test_names_are_unique() -> None:
    async with supervised(spec("a", STAYS)) as (supervisor, _):
        with pytest.raises(ValueError, match="running already"):
            supervisor.start(spec("a", STAYS))
