"""From a configuration to a model that runs: what prefill and decode workers do alike at start."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from distserve.config import Config
from distserve.engine.device import free_bytes, uuid_of
from distserve.engine.loaded import LoadedModel
from distserve.engine.model import likely_dtype, load_model
from distserve.engine.native.loader import Candidate, Compiling
from distserve.engine.paged_cache import PagedCache
from distserve.engine.runner import ModelRunner
from distserve.engine.torch_threads import limit_threads
from distserve.kv.block_pool import BlockPool
from distserve.kv.layout import block_bytes
from distserve.machine import available_bytes
from distserve.models import resolve
from distserve.sizing import PoolSize, in_words, pool_size
from distserve.sizing import max_num_seqs as decode_seqs
from distserve.transport.base import PoolMemory
from distserve.transport.cuda_pool import cuda_pool_memory
from distserve.worker.gpu import Gpu
from distserve.worker.isolation import EngineBounds, Isolation
from distserve.worker.realtime import EngineRole
from distserve.worker.warmup import warm_up

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class EngineParts:
    """Owned by the worker process for its whole life. `memory` is the pool as transports see it, `isolation` what the
    process is kept to, `gpu` what says how busy the device is, if it is one."""

    model: LoadedModel
    size: PoolSize
    cache: PagedCache
    pool: BlockPool
    runner: ModelRunner
    memory: PoolMemory
    isolation: Isolation
    gpu: Gpu | None = None


def build_engine(config: Config, *, role: EngineRole, max_num_seqs: int, keep_hidden: bool) -> EngineParts:
    """Load the model and make its pool, as sized by the configuration, within what `role` may have of the host. Runs on
    the thread that will compute, and takes seconds."""
    started = time.monotonic()
    bounds = EngineBounds(role, config)
    bounds.enter()
    num = bounds.num_threads
    limit_threads(num)
    device = "cpu" if config.model.device == "auto" else config.model.device
    path = resolve(config.model.path)
    if device == "cpu":
        bounds.require_room_for_model(Path(path))
    # Compiled beside the loading. The type is a guess if the weights are to tell; a wrong one is put right below.
    compile_here = config.model.compiled == "auto" and device == "cpu"
    with bounds.beside():
        compiling = Compiling(likely_dtype(path, config.model.dtype)) if compile_here else None
    model = load_model(path, config.model.dtype, device, config.kv.block_size)
    if compiling is not None and compiling.dtype != model.dtype:
        with bounds.beside():
            compiling = Compiling(model.dtype)
    candidate = None if compiling is None else Candidate(model, compiling, num)
    size = pool_size(
        config.kv,
        config.model,
        block_bytes=block_bytes(model.layout),
        model_max_len=model.max_model_len,
        available_bytes=bounds.left_bytes(available_bytes()) if device == "cpu" else free_bytes(device),
        max_num_seqs=max_num_seqs,
    )
    if size.warning:
        log.warning("%s", size.warning)
    pool_bytes = size.num_blocks * size.block_bytes if device == "cpu" else 0
    bounds.require_room_for_pool(pool_bytes)
    cache = PagedCache(model.layout, size.num_blocks, device)
    runner = ModelRunner(model, cache, keep_hidden=keep_hidden, attention=config.model.attention, candidate=candidate)
    weights = sum(p.numel() * p.element_size() for p in model.model.parameters())
    log.info(
        "%s: %s %s on %s, %s, loaded in %.1f s",
        config.model.served_name,
        in_words(weights),
        model.dtype,
        device,
        f"{num} thread{'s' * (num > 1)}, attention by {runner.attention}",
        time.monotonic() - started,
    )
    log.info("%s; longest sequence %s tokens", size, f"{size.max_model_len:,}")
    pool = BlockPool(size.num_blocks, keep=config.kv.prefix_cache)
    began = time.monotonic()
    if device != "cpu" and config.model.compiled == "auto":
        runner.fuse()
        if role == "decode":
            runner.record_steps(decode_seqs(config.decode, size), size.max_model_len)
    warm_up(runner, pool)
    log.info("warmed up in %.1f s", time.monotonic() - began)
    on_gpu = cache.device.type == "cuda"
    memory = cuda_pool_memory(cache.pool, model.layout) if on_gpu else PoolMemory(model.layout, cache.memory, cache.fd)
    gpu = Gpu(str(cache.device), uuid_of(str(cache.device))) if on_gpu else None
    return EngineParts(model, size, cache, pool, runner, memory, bounds.close(pool_bytes), gpu)
