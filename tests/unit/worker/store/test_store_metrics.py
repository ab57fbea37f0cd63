from distserve.messages import WorkerInfo
from distserve.worker.metrics import exposition
from distserve.worker.report import Report
from distserve.worker.store.metrics import families
from tests.unit.worker.store.peers import chain, net


async def test_the_metrics_say_what_came_of_it():
    async with net() as n:
        node = await n.peer("node", "kvstore")
        worker = await n.peer("worker")
        c = chain(20)
        node.holds(c, 0, 12)
        found = await worker.store.client.lookup(c, 0)
        ours = worker.pool.allocate(12)
        assert await worker.store.client.fetch(found, ours, timeout_s=10) == 12
        info = WorkerInfo(worker_id="worker", role="decode", model="m")
        report = Report(info=info, bus_connected=True, also=families(worker.store.client, "decode"))
        lines = exposition(report).decode().splitlines()
        assert 'distserve_store_hit_blocks_total{role="decode",tier="pool"} 12.0' in lines
        assert 'distserve_store_sought_blocks_total{role="decode"} 20.0' in lines
        assert f'distserve_store_fetched_bytes_total{{role="decode"}} {12 * 8192}.0' in lines
        assert 'distserve_store_held_blocks{role="decode"} 0.0' in lines


async def test_a_snapshot_of_the_counts_stays_as_it_is():
    async with net() as n:
        worker = await n.peer("worker")
        before = worker.store.counts.snapshot()
        worker.store.counts.num_dropped_blocks["full"] += 3
        worker.store.counts.num_lookups += 1
        assert (before.num_lookups, before.num_dropped_blocks) == (0, {})
