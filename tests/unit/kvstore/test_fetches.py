"""What a fetch costs the loop."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

from distserve.transport.base import Span, Transfer
from distserve_kvstore.fetches import Fetches
from distserve_kvstore.promotion import Promotion
from tests.unit.kvstore.tier_parts import names, parts

NUM = 20_000


class Counting:
    """A transfer that takes everything."""

    failure = None

    def __init__(self) -> None:
        self.num = 0

    def write(self, spans: tuple[Span, ...], *, awaited: bool = False) -> None:
        self.num += sum(len(span.targets) for span in spans)


async def test_the_blocks_of_a_large_fetch_are_queued_in_a_moment(tmp_path: Path) -> None:
    async with parts(tmp_path, num_rows=4, write_through=False) as at:
        entries = at.adopt(1).repeat(NUM)
        assert at.holdings.is_here(names(1)) == [True]
        fetches = Fetches(at.holdings, Promotion(at.holdings, {}, at.states), {}, cast(Any, None), "kvstore-me")
        here: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        here.set_result(True)
        transfer = Counting()
        began = time.monotonic()
        await fetches._write(cast(Transfer, transfer), entries, [here] * NUM)
        assert transfer.num == NUM
        assert time.monotonic() - began < 2  # comparing each with each takes more than that by far
