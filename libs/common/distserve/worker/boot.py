"""From a configuration to a model that runs: what prefill and decode workers do alike at start."""

import logging
import os
import time
from dataclasses import dataclass

from distserve.config import Config, parse_cpus
from distserve.engine.loaded import LoadedModel
from distserve.engine.model import likely_dtype, load_model
from distserve.engine.native.loader import Candidate, Compiling
from distserve.engine.paged_cache import PagedCache
from distserve.engine.runner import ModelRunner
from distserve.engine.torch_threads import limit_threads
from distserve.kv.block_pool import BlockPool
from distserve.kv.layout import block_bytes
from distserve.machine import available_bytes, usable_cores
from distserve.models import resolve
from distserve.sizing import PoolSize, in_words, num_threads, pool_size
from distserve.transport.base import PoolMemory
from distserve.transport.cuda_pool import cuda_pool_memory
from distserve.worker.warmup import warm_up

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class EngineParts:
    """Owned by the worker process for its whole life. `memory` is the pool as transports see it."""

    model: LoadedModel
    size: PoolSize
    cache: PagedCache
    pool: BlockPool
    runner: ModelRunner
    memory: PoolMemory


def build_engine(config: Config, *, threads: int, cpus: str, max_num_seqs: int, keep_hidden: bool) -> EngineParts:
    """Load the model and make its pool, as sized by the configuration. Blocks for seconds: not for an event loop."""
    started = time.monotonic()
    if bound := parse_cpus(cpus):
        os.sched_setaffinity(0, bound)
    num = num_threads(threads, cpus, len(usable_cores()), config.kv.workers_per_host)
    limit_threads(num)
    device = "cpu" if config.model.device == "auto" else config.model.device
    path = resolve(config.model.path)
    # Compiled beside the loading. The type is a guess if the weights are to tell; a wrong one is put right below.
    compile_here = config.model.compiled == "auto" and device == "cpu"
    compiling = Compiling(likely_dtype(path, config.model.dtype)) if compile_here else None
    model = load_model(path, config.model.dtype, device, config.kv.block_size)
    if compiling is not None and compiling.dtype != model.dtype:
        compiling = Compiling(model.dtype)
    candidate = None if compiling is None else Candidate(model, compiling, num)
    size = pool_size(
        config.kv,
        config.model,
        block_bytes=block_bytes(model.layout),
        model_max_len=model.max_model_len,
        available_bytes=available_bytes(),
        max_num_seqs=max_num_seqs,
    )
    if size.warning:
        log.warning("%s", size.warning)
    cache = PagedCache(model.layout, size.num_blocks, device)
    runner = ModelRunner(model, cache, keep_hidden=keep_hidden, candidate=candidate)
    weights = sum(p.numel() * p.element_size() for p in model.model.parameters())
    log.info(
        "%s: %s %s on %s, %s, loaded in %.1f s",
        config.model.served_name,
        in_words(weights),
        model.dtype,
        device,
        f"{num} thread{'s' * (num > 1)}",
        time.monotonic() - started,
    )
    log.info("%s; longest sequence %s tokens", size, f"{size.max_model_len:,}")
    pool = BlockPool(size.num_blocks, keep=config.kv.prefix_cache)
    began = time.monotonic()
    warm_up(runner, pool)
    log.info("warmed up in %.1f s", time.monotonic() - began)
    on_gpu = cache.device.type == "cuda"
    memory = cuda_pool_memory(cache.pool, model.layout) if on_gpu else PoolMemory(model.layout, cache.memory, cache.fd)
    return EngineParts(model, size, cache, pool, runner, memory)
