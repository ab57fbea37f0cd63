"""The disk tier of a process that is killed with -9 in the middle of what it does, again and again in one folder."""

import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.kvstore.crashing_writer import LAYOUT, OPTIONS
from tests.unit.kvstore.stored_blocks import opened, served

NUM_LIVES = 50


class Books:
    """What must be in the folder, and what may be, by what its writer said."""

    def __init__(self) -> None:
        self.must: set[bytes] = set()
        self.may: set[bytes] = set()  # the writer was killed before it could say what has become of them
        self.forgotten: set[bytes] = set()
        self.under_way = ""

    def read(self, lines: list[str]) -> None:
        hashes: set[bytes] = set()
        for line in lines:
            what, *names = line.split()
            if what == "open":
                assert {bytes.fromhex(n) for n in names} == self.must, "another opening found something else"
            elif what == "full" or (what == "done" and self.under_way in ("free", "forget", "compact")):
                self.may -= hashes
                if self.under_way == "forget":
                    self.forgotten |= hashes
            elif what == "done":
                self.may -= hashes
                self.must |= hashes
            else:
                hashes = {bytes.fromhex(n) for n in names}
                self.must -= hashes
                self.may |= hashes
            self.under_way = "" if what in ("open", "done", "full") else what

    def settle(self, there: set[bytes]) -> None:
        assert self.must <= there, f"{len(self.must - there)} blocks are lost"
        assert there <= self.must | self.may, f"{len(there - self.must - self.may)} blocks have come back"
        assert not there & (self.forgotten - self.may)
        self.must, self.may = there, set()


def one_life(folder: Path, seed: int, rng: random.Random) -> list[str]:
    """Start a writer, kill it at some moment after it has said something; what it said."""
    command = [sys.executable, "-m", "tests.integration.kvstore.crashing_writer", str(folder), str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        watch = threading.Timer(60, writer.kill)  # a writer that hangs fails below: it has said too little
        watch.start()
        lines: list[str] = []
        wanted = rng.randint(1, 80)
        while len(lines) < wanted or (rng.random() < 0.97 and not lines[-1].startswith(("append", "compact"))):
            line = writer.stdout.readline()
            assert line, f"it ended by itself: {writer.stderr.read()}"
            lines.append(line)
        time.sleep(rng.uniform(0, 0.002))  # into the middle of it
        writer.kill()
        lines += writer.stdout.readlines()
        watch.cancel()
    if not lines[-1].endswith("\n"):
        lines.pop()  # it was killed while it said so, before it did it
    return lines


@pytest.mark.timeout(400)
def test_killed_fifty_times_nothing_is_lost_nothing_comes_back_and_nothing_wrong_is_served(tmp_path, caplog):
    folder, rng = tmp_path / "kv", random.Random(20)
    books, killed_in = Books(), Counter[str]()
    for life in range(NUM_LIVES):
        books.read(one_life(folder, life, rng))
        killed_in[books.under_way or "between"] += 1
        # A copy is looked at: the next writer has to recover from what this one left.
        shutil.copytree(folder, copy := tmp_path / f"copy{life}")
        with opened(copy, LAYOUT, OPTIONS) as (tier, there):
            errors = served(tier, list(there.values()), list(there), LAYOUT)
            assert errors == [None] * len(errors)
            books.settle(set(there))
        shutil.rmtree(copy)
    print(dict(killed_in), f"{len(books.must)} blocks, {caplog.text.count('are dropped')} torn tails")
    assert killed_in["append"] > 10, killed_in
    assert killed_in.total() - killed_in["between"] > NUM_LIVES // 2, killed_in
    assert not list(folder.glob("*.damaged"))
