"""Sizes that nobody set, worked out: KV blocks from free memory, batch limits from the pool and the model, threads
from cores. Pure arithmetic: machine.py reads the machine.

A pool that can't hold one sequence of the full length: if the length was set (`model.max_model_len`), that is a
contradiction and refused. If it is merely what the model could do, it is lowered to what fits, and said so: a model
with a context of 128K starts on a laptop too.
"""

from dataclasses import dataclass
from itertools import pairwise

from distserve.config import DecodeConfig, KVConfig, ModelConfig, PrefillConfig, parse_cpus
from distserve.errors import ConfigError
from distserve.messages import num_blocks_for

STORE_SHARE = 0.25  # of the free memory, for the KV store's nodes of a machine, where kvstore.dram_bytes is 0
MAX_NUM_SEQS = 256  # more in one step gains nothing on any device this runs on yet
PASS_TOKENS = {"cpu": 2048, "cuda": 8192}  # beyond it a longer pass is no faster per token, and delays who waits
ACTIVATION_SHARE = 0.1  # of free memory, for one pass's activations


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The KV pool of one worker. `how` says where num_blocks comes from; `warning` isn't empty if the length was cut.

    num_blocks includes block 0, which is never allocated.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    max_model_len: int
    how: str
    warning: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens that sequences can keep in it."""
        return (self.num_blocks - 1) * self.block_size

    def __str__(self) -> str:
        return (
            f"KV pool: {self.num_blocks - 1:,} blocks of {self.block_size} tokens = {self.num_tokens:,} tokens, "
            f"{in_words(self.num_blocks * self.block_bytes)} ({self.how})"
        )


def pool_size(
    kv: KVConfig, model: ModelConfig, *, block_bytes: int, model_max_len: int, available_bytes: int, max_num_seqs: int
) -> PoolSize:
    """How large a worker's pool is.

    block_bytes: of a full block. model_max_len: tokens, what the model can do. available_bytes: free now, after the
    weights were loaded. max_num_seqs: sequences that may hold blocks at once; 0: MAX_NUM_SEQS.
    Raises ConfigError when the pool couldn't hold one sequence of a length that was set.
    """
    wanted_len = min(model.max_model_len or model_max_len, model_max_len)
    if model.max_model_len > model_max_len:
        raise ConfigError(
            f"model.max_model_len is {model.max_model_len}, must be at most {model_max_len}, the model's own",
            key="model.max_model_len",
            value=model.max_model_len,
            expected=f"at most {model_max_len}",
        )
    per_seq = num_blocks_for(wanted_len, kv.block_size)
    if kv.num_blocks:
        num_blocks, how = kv.num_blocks, "kv.num_blocks"
    else:
        share = int(available_bytes * kv.memory_fraction / kv.workers_per_host)
        usable = (max_num_seqs or MAX_NUM_SEQS) * per_seq
        num_blocks = min(share // block_bytes, usable + 1)
        how = f"worked out: {kv.memory_fraction:.0%} of {in_words(available_bytes)} free"
        if kv.workers_per_host > 1:
            how += f", shared by {kv.workers_per_host} workers"
        if num_blocks == usable + 1:
            how = f"worked out: room for {max_num_seqs or MAX_NUM_SEQS} sequences of {wanted_len:,} tokens"
    if num_blocks > per_seq:
        return PoolSize(num_blocks, kv.block_size, block_bytes, wanted_len, how)
    fits = (num_blocks - 1) * kv.block_size
    if model.max_model_len or num_blocks < 2:
        needs = in_words((per_seq + 1) * block_bytes)
        raise ConfigError(
            f"the KV pool has room for {max(0, num_blocks - 1)} blocks of {kv.block_size} tokens ({how}), too few for "
            f"one sequence of {wanted_len:,} tokens, which needs {per_seq} ({needs}): set model.max_model_len to "
            f"{fits} or less, raise kv.memory_fraction or kv.num_blocks, or run fewer workers on this machine",
            key="model.max_model_len",
            value=wanted_len,
            expected=f"at most {fits}",
        )
    warning = (
        f"the longest sequence is {fits:,} tokens, not the model's {wanted_len:,}: the KV pool holds no more ({how}); "
        "raise kv.memory_fraction or run fewer workers on this machine"
    )
    return PoolSize(num_blocks, kv.block_size, block_bytes, fits, how, warning)


def max_num_seqs(decode: DecodeConfig, pool: PoolSize) -> int:
    """Sequences in one decode step: as set, else as many as the pool holds at a quarter of the full length, which is
    long for an answer, up to MAX_NUM_SEQS. (A pool that turns out too full preempts.)"""
    typical = max(pool.block_size, pool.max_model_len // 4)
    return decode.max_num_seqs or max(1, min(MAX_NUM_SEQS, pool.num_tokens // typical))


def max_batch_tokens(
    prefill: PrefillConfig, pool: PoolSize, *, activation_bytes_per_token: int, available_bytes: int, device: str
) -> int:
    """Tokens in one prefill pass: as set, else PASS_TOKENS of the device within ACTIVATION_SHARE of free memory, but
    never less than what one chunk (or, uncut, one whole prompt) needs.

    activation_bytes_per_token: what a pass holds at its widest, see activation_bytes().
    """
    least = max(pool.block_size, prefill.chunk_tokens or pool.max_model_len)
    if prefill.max_batch_tokens:
        if prefill.max_batch_tokens < least:
            raise ConfigError(
                f"prefill.max_batch_tokens is {prefill.max_batch_tokens}, must be at least {least}: prompts are not "
                "cut (prefill.chunk_tokens is 0), so a pass must hold a whole one",
                key="prefill.max_batch_tokens",
                value=prefill.max_batch_tokens,
                expected=f"at least {least}",
            )
        return prefill.max_batch_tokens
    affordable = int(available_bytes * ACTIVATION_SHARE) // max(1, activation_bytes_per_token)
    return max(least, min(PASS_TOKENS.get(device.split(":")[0], PASS_TOKENS["cpu"]), affordable))


def activation_bytes(hidden_size: int, intermediate_size: int, dtype_bytes: int) -> int:
    """About what one token of a pass holds at its widest: the residual, the projections of attention and the three
    of a gated MLP, once each, and a float32 copy of the residual in a norm."""
    return dtype_bytes * (6 * hidden_size + 3 * intermediate_size) + 4 * hidden_size


def num_threads(configured: int, cpus: str, num_cores: int, workers_per_host: int) -> int:
    """Torch threads of one worker: as set, else one for each core it is bound to, else its share of the cores."""
    return configured or len(parse_cpus(cpus)) or max(1, num_cores // workers_per_host)


def split_cores(cores: tuple[int, ...], num_workers: int) -> list[tuple[int, ...]]:
    """Cores for each of some workers, in contiguous runs that differ by at most one; the first get the odd ones.

    Fewer cores than workers can't be split: then each gets () and floats.
    """
    if num_workers == 0 or len(cores) < num_workers:
        return [()] * num_workers
    each, odd = divmod(len(cores), num_workers)
    starts = [i * each + min(i, odd) for i in range(num_workers + 1)]
    return [cores[a:b] for a, b in pairwise(starts)]


@dataclass(frozen=True, slots=True)
class Placement:
    """Cores of one machine: of each prefill and of each decode worker, () for one that floats, and of all else."""

    prefill: tuple[tuple[int, ...], ...]
    decode: tuple[tuple[int, ...], ...]
    others: tuple[int, ...]


def place(
    prefill: PrefillConfig,
    decode: DecodeConfig,
    cores: tuple[int, ...],
    num_prefill: int,
    num_decode: int,
    *,
    deal: bool = True,
) -> Placement:
    """Workers on cores as set, else on their own where there are enough, so that prefill's threads never take decode's;
    else those without share what the others leave, or float if they leave nothing, or if none were set.

    Where a role is real-time a core is left over, if there is one, and all else, its workers' event loops too, keeps
    off that role's. cores: the machine's. deal: false leaves those afloat for which none were set.
    """
    both: list[tuple[PrefillConfig | DecodeConfig, int]] = [(prefill, num_prefill), (decode, num_decode)]
    taken = {cpu for section, num in both if num for cpu in parse_cpus(section.cpus)}
    free = tuple(cpu for cpu in cores if cpu not in taken)
    num_unset = sum(num for section, num in both if not section.cpus)
    if any(section.realtime != "off" and num for section, num in both) and len(free) > num_unset:
        free = free[1:]  # the first one takes most interrupts, too
    shares = len(free) < num_unset and bool(taken)
    parts = iter([free] * num_unset if shares else split_cores(free, num_unset))
    placed = [
        tuple(parse_cpus(section.cpus) or (next(parts) if deal else ()) for _ in range(num)) for section, num in both
    ]
    realtime = {
        cpu
        for (section, _), sets in zip(both, placed, strict=True)
        if section.realtime != "off"
        for cpus in sets
        for cpu in cpus
    }
    others = tuple(cpu for cpu in cores if cpu not in realtime) or cores
    return Placement(placed[0], placed[1], others)


def in_words(num_bytes: float) -> str:
    """`1503238553` -> `1.4 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
