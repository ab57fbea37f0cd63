"""Puts and gets in LMCache, in its own environment (peers/lmcache.py makes it). A driver (store_lines).

    python -m benchmarks.peers.lmcache_driver shm --url tcp://HOST:PORT --size 1MiB --mib 256      `lmcache server`
    python -m benchmarks.peers.lmcache_driver lm --url lm://HOST:PORT --size …                     `lmcache_server`
    python -m benchmarks.peers.lmcache_driver local --size …                                       in this process

shm goes by the client of LMCache's own `lmcache bench server`, with its KV as vLLM has it, a tensor a layer; the server
copies out of and into these tensors, which lie in shared memory. A put ends with the server's answer. lm and local go
by LMCache's StorageManager: values are copied into and out of its memory objects, as its engine does.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from typing import Any

import torch
from lmcache.cli.commands.bench.server_bench import helpers
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager

from benchmarks.store_bytes import Bytes
from benchmarks.store_lines import Store, own_stdout, serve
from benchmarks.store_values import BLOCK_SIZE, MIB, SIZES, Load

AT_ONCE = 4  # stores that the client does not wait for
ANSWER_S, SEEN_S = 30.0, 10.0
REGISTER_S = 60.0  # a busy machine takes longer than the client waits by itself


class Server:
    """A Store: `lmcache server`. Block 0 is what it calls the null block."""

    def __init__(self, load: Load, url: str) -> None:
        self._load = load
        size = load.size
        shape = f"(2,{load.num_values + 1},{BLOCK_SIZE},{size.num_kv_heads},{size.head_dim}):bfloat16:{size.num_layers}"
        config = BenchConfig(
            rpc_url=url,
            http_url="",
            mode="cpu",
            transfer_mode="lmcache_driven",
            tp_size=1,
            use_mla=False,
            num_tokens=load.num_a_request * BLOCK_SIZE,
            kvcache_shape_spec=shape,
            num_blocks=load.num_values + 1,
            block_size=BLOCK_SIZE,
        )
        helpers._DEFAULT_RPC_TIMEOUT_S = REGISTER_S
        client = ServerBenchClient(config, log=lambda text: None)
        client.start()
        [self._worker] = client._workers
        self._client: Any = client._req_client
        self._kv: dict[str, torch.Tensor] = self._worker.kv_caches
        self._source = {name: tensor.clone() for name, tensor in self._kv.items()}

    def put(self, turn: int) -> float:
        first = self._source["layer.0"].view(torch.int16)
        first[0, 1:, 0, 0, 0] = turn
        first[0, 1:, 0, 0, 1] = torch.arange(self._load.num_values, dtype=torch.int16)
        for name, tensor in self._kv.items():
            tensor.copy_(self._source[name])
        waiting: deque[Any] = deque()
        began = time.perf_counter()
        for values in self._load.requests():
            if len(waiting) == AT_ONCE:
                self._stored(waiting.popleft())
            key, request_id = self._key(turn, values, "put")
            event = self._worker.transfer_context.create_recorded_event()
            waiting.append(
                self._worker.transfer_context.submit_store(request_id, key, self._kv, [_blocks(values)], event, 1)
            )
        while waiting:
            self._stored(waiting.popleft())
        seconds = time.perf_counter() - began
        for values in self._load.requests():
            self._done(self._client.end_session(self._key(turn, values, "put")[1]))
        self._wait_until_seen(turn)
        return seconds

    def get(self, turn: int) -> float:
        for tensor in self._kv.values():
            tensor.zero_()
        began = time.perf_counter()
        for values in self._load.requests():
            key, request_id = self._key(turn, values, "get")
            if (found := self._lookup(key, request_id)) != len(values):
                raise ValueError(f"{found} of {len(values)} blocks were found")
            event = self._worker.transfer_context.create_recorded_event()
            future = self._worker.transfer_context.submit_retrieve(
                request_id, key, self._kv, [_blocks(values)], event, 1, skip_first_n_tokens=0
            )
            if not self._done(future):
                raise ValueError("not retrieved")
        seconds = time.perf_counter() - began
        for values in self._load.requests():
            self._done(self._client.end_session(self._key(turn, values, "get")[1]))
        for name, tensor in self._kv.items():
            if not torch.equal(tensor[:, 1:].view(torch.int16), self._source[name][:, 1:].view(torch.int16)):
                raise ValueError(f"{name} is wrong")
        return seconds

    def clear(self, turn: int) -> None:
        self._done(self._client.clear(True))

    def _wait_until_seen(self, turn: int) -> None:
        """A store that was answered is found a little later; not in the time, in its favour."""
        deadline = time.monotonic() + SEEN_S
        for values in self._load.requests():
            while True:
                key, request_id = self._key(turn, values, f"seen-{time.monotonic_ns()}")
                found = self._lookup(key, request_id)
                if found:
                    self._done(self._client.free_lookup_locks(key, 1))
                self._done(self._client.end_session(request_id))
                if found == len(values):
                    break
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{found} of {len(values)} blocks are found {SEEN_S:g} s after they were stored")

    def _lookup(self, key: Any, request_id: str) -> int:
        self._done(self._client.lookup(key, 1))
        return int(self._done(self._client.wait_prefetch_status(request_id, ANSWER_S)) or 0)

    def _key(self, turn: int, values: range, what: str) -> tuple[Any, str]:
        """Of a prompt whose first token no other request and no other turn has."""
        tokens = (turn * self._load.num_values + values.start, *range(1, len(values) * BLOCK_SIZE))
        request_id = f"{what}-{turn}-{values.start}"
        return helpers._make_key(tokens, request_id, start=0, end=len(tokens), worker_id=0, world_size=1), request_id

    def _stored(self, future: Any) -> None:
        if not self._done(future):
            raise ValueError("not stored")

    def _done(self, future: Any) -> Any:
        return future.result(timeout=ANSWER_S)


def _blocks(values: range) -> list[int]:
    return list(range(1 + values.start, 1 + values.stop))


class Manager:
    """A Store: LMCache's StorageManager, over the memory of this process or, with a URL, over a server alone."""

    def __init__(self, load: Load, url: str) -> None:
        self._load = load
        size = load.size
        hidden = size.num_kv_heads * size.head_dim
        self._shape = torch.Size([2, size.num_layers, BLOCK_SIZE, hidden])
        pool_gib = max(1.0, 2.5 * load.total_bytes / (1 << 30))
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=BLOCK_SIZE,
            local_cpu=not url,
            max_local_cpu_size=pool_gib,
            remote_url=url or None,
            remote_serde="naive",
        )
        metadata = LMCacheMetadata(
            model_name="m",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(size.num_layers, 2, BLOCK_SIZE, size.num_kv_heads, size.head_dim),
        )
        self._manager = StorageManager(config=config, metadata=metadata, event_manager=EventManager())
        self._remote = self._manager.storage_backends.get("RemoteBackend") if url else None
        if url and self._remote is None:
            raise RuntimeError(f"no remote backend for {url}, only {list(self._manager.storage_backends)}")
        self._where = "RemoteBackend" if url else "LocalCPUBackend"
        memory = torch.zeros(2 * load.total_bytes, dtype=torch.uint8)
        self._bytes = Bytes(load, memory.numpy())
        rows = memory.view(torch.bfloat16).view(2 * load.num_values, *self._shape)
        self._source, self._target = rows[: load.num_values], rows[load.num_values :]

    def put(self, turn: int) -> float:
        self._bytes.stamp(turn)
        began = time.perf_counter()
        for values in self._load.requests():
            keys = [self._key(turn, i) for i in values]
            objects = self._manager.batched_allocate(
                self._shape, torch.bfloat16, len(keys), fmt=MemoryFormat.KV_2LTD, eviction=True, busy_loop=True
            )
            if objects is None or len(objects) != len(keys):
                raise ValueError("no memory")
            for i, held in zip(values, objects, strict=True):
                held.tensor.copy_(self._source[i])
            self._manager.batched_put(keys, objects)
        if self._remote is not None:
            self._sent(turn)
        return time.perf_counter() - began

    def _sent(self, turn: int) -> None:
        """The server answers no put; but it does, in order, whether it has the last one."""
        deadline = time.monotonic() + ANSWER_S
        while self._remote.put_tasks or not self._remote.contains(self._key(turn, self._load.num_values - 1)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self._remote.put_tasks)} values not put after {ANSWER_S:g} s")
            time.sleep(0.0005)

    def get(self, turn: int) -> float:
        self._bytes.blank()
        began = time.perf_counter()
        for values in self._load.requests():
            objects = self._manager.batched_get([self._key(turn, i) for i in values], location=self._where)
            for i, held in zip(values, objects, strict=True):
                if held is None:
                    raise ValueError(f"value {i} was not found")
                self._target[i].copy_(held.tensor)
                held.ref_count_down()
        seconds = time.perf_counter() - began
        self._bytes.check()
        return seconds

    def clear(self, turn: int) -> None:
        """lm's server can delete nothing: it grows."""
        if self._remote is None:
            self._manager.clear()

    def _key(self, turn: int, value: int) -> CacheEngineKey:
        return CacheEngineKey("m", 1, 0, turn * self._load.num_values + value, torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=["shm", "lm", "local"])
    parser.add_argument("--url", default="")
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--mib", type=int, required=True)
    a = parser.parse_args()
    answers = own_stdout()
    torch.set_num_threads(1)  # a value is too small to be copied by several
    load = Load(SIZES[a.size], a.mib * MIB)
    store: Store = Server(load, a.url) if a.way == "shm" else Manager(load, a.url)
    serve(store, answers)


if __name__ == "__main__":
    main()
