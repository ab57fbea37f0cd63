"""How busy a decode worker is, as the registry is told."""

from distserve.kv.block_pool import BlockPool
from distserve.messages import Load
from distserve_decode.prospects import Prospects
from distserve_decode.scheduler import Scheduler


def load_of(
    scheduler: Scheduler, prospects: Prospects, pool: BlockPool, *, num_leases: int, tokens_per_s: float
) -> Load:
    """num_leases: hand-overs that wait for room."""
    return Load(
        num_running=len(scheduler.running),
        num_waiting=scheduler.num_waiting + num_leases,
        num_waiting_tokens=scheduler.num_waiting_tokens,
        free_blocks=pool.num_available,
        total_blocks=pool.num_total,
        tokens_per_s=tokens_per_s,
        max_num_seqs=scheduler.max_num_seqs,
        speed=prospects.speed(),
        pass_tokens=scheduler.pass_tokens,
        backlog=prospects.backlog(),
        step_s=scheduler.speeds.step_s(scheduler.running),
        num_preemptions=scheduler.num_preemptions,
    )
