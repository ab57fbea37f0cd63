"""Worked-out sizes: arithmetic with the bounds that matter."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distserve.config import DecodeConfig, KVConfig, ModelConfig, PrefillConfig
from distserve.errors import ConfigError
from distserve.sizing import (
    MAX_NUM_SEQS,
    activation_bytes,
    in_words,
    max_batch_tokens,
    max_num_seqs,
    num_threads,
    pool_size,
    split_cores,
)

GIB = 1 << 30
BLOCK = 368_640  # of a 135M model: 30 layers, 3 KV heads of 64, bfloat16, 16 tokens


def pool(available: int = 8 * GIB, kv: KVConfig | None = None, model: ModelConfig | None = None, **kwargs: int):  # type: ignore[no-untyped-def]
    arguments = {"block_bytes": BLOCK, "model_max_len": 8192, "max_num_seqs": 0} | kwargs
    return pool_size(kv or KVConfig(), model or ModelConfig(), available_bytes=available, **arguments)


def test_the_pool_takes_its_fraction_of_free_memory() -> None:
    size = pool(8 * GIB)
    assert size.num_blocks == 8 * GIB // 2 // BLOCK
    assert "50% of 8.0 GiB" in str(size)
    assert f"{size.num_blocks - 1:,} blocks of 16 tokens = {size.num_tokens:,} tokens" in str(size)


def test_workers_on_one_machine_share_it() -> None:
    assert pool(8 * GIB, KVConfig(workers_per_host=4)).num_blocks == 8 * GIB // 8 // BLOCK


def test_a_pool_is_no_larger_than_could_ever_be_used() -> None:
    size = pool(8 * GIB, block_bytes=1024, model_max_len=2048, max_num_seqs=10)
    assert size.num_blocks == 10 * 128 + 1
    assert "room for 10 sequences of 2,048 tokens" in size.how


def test_a_number_of_blocks_that_was_set_stays() -> None:
    size = pool(1, KVConfig(num_blocks=600))
    assert (size.num_blocks, size.how, size.max_model_len) == (600, "kv.num_blocks", 8192)


def test_the_models_own_length_is_lowered_to_what_fits_and_said_so() -> None:
    size = pool(512 * 2 * BLOCK)  # 512 blocks, of which one is never given
    assert size.max_model_len == 511 * 16
    assert "8,176 tokens, not the model's 8,192" in size.warning


def test_one_block_more_holds_the_full_length() -> None:
    size = pool(513 * 2 * BLOCK)
    assert (size.max_model_len, size.warning) == (8192, "")


def test_a_length_that_was_set_is_refused_if_it_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"needs 512 .*set model.max_model_len to 8176 or less") as caught:
        pool(512 * 2 * BLOCK, model=ModelConfig(max_model_len=8192))
    assert caught.value.fields["key"] == "model.max_model_len"


def test_a_length_beyond_the_models_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be at most 8192"):
        pool(model=ModelConfig(max_model_len=8193))


@pytest.mark.parametrize("available", [0, 1, BLOCK, 4 * BLOCK - 1])
def test_a_pool_without_one_usable_block_is_refused(available: int) -> None:
    with pytest.raises(ConfigError, match=r"raise kv\.memory_fraction"):
        pool(available)


@given(
    available=st.integers(0, 1 << 42),
    block_bytes=st.integers(1, 1 << 28),
    model_max_len=st.integers(1, 1 << 20),
    block_size=st.sampled_from([8, 16, 32, 256]),
    workers=st.integers(1, 16),
)
def test_a_pool_fits_its_share_and_holds_a_full_sequence(
    available: int, block_bytes: int, model_max_len: int, block_size: int, workers: int
) -> None:
    kv = KVConfig(block_size=block_size, workers_per_host=workers)
    try:
        size = pool(available, kv, block_bytes=block_bytes, model_max_len=model_max_len)
    except ConfigError:
        assume(False)
        raise
    assert size.num_blocks * block_bytes * workers <= available * 0.5 + 1
    assert 1 <= size.max_model_len <= min(model_max_len, size.num_tokens)
    assert (size.max_model_len < model_max_len) == bool(size.warning)
    assert 1 <= max_num_seqs(DecodeConfig(), size) <= MAX_NUM_SEQS


def test_sequences_in_a_step_follow_the_pool() -> None:
    assert max_num_seqs(DecodeConfig(), pool(513 * 2 * BLOCK)) == 4
    assert max_num_seqs(DecodeConfig(), pool(100_000 * 2 * BLOCK)) == MAX_NUM_SEQS
    assert max_num_seqs(DecodeConfig(max_num_seqs=7), pool()) == 7


def batch(prefill: PrefillConfig, available: int = 8 * GIB, device: str = "cpu", per_token: int = 20_000) -> int:
    return max_batch_tokens(
        prefill, pool(), activation_bytes_per_token=per_token, available_bytes=available, device=device
    )


def test_tokens_in_a_pass() -> None:
    assert batch(PrefillConfig()) == 2048
    assert batch(PrefillConfig(), device="cuda:1") == 8192
    assert batch(PrefillConfig(), available=200_000_000) == 1000  # a tenth of it at 20 kB a token
    assert batch(PrefillConfig(), available=1) == 512  # a chunk must fit
    assert batch(PrefillConfig(chunk_tokens=0)) == 8192  # a whole prompt must fit
    assert batch(PrefillConfig(max_batch_tokens=640)) == 640


def test_a_pass_too_small_for_an_uncut_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 8192"):
        batch(PrefillConfig(chunk_tokens=0, max_batch_tokens=4096))


def test_activations_of_a_token() -> None:
    assert activation_bytes(576, 1536, 2) == 2 * (6 * 576 + 3 * 1536) + 4 * 576


@pytest.mark.parametrize(
    ("configured", "cpus", "cores", "workers", "threads"),
    [(0, "", 8, 2, 4), (0, "", 2, 4, 1), (3, "0-7", 8, 2, 3), (0, "1,3", 8, 1, 2)],
)
def test_threads(configured: int, cpus: str, cores: int, workers: int, threads: int) -> None:
    assert num_threads(configured, cpus, cores, workers) == threads


@pytest.mark.parametrize(
    ("cores", "workers", "split"),
    [
        ((0, 1), 2, [(0,), (1,)]),
        ((0, 1, 2), 2, [(0, 1), (2,)]),
        ((4, 5, 6, 7), 1, [(4, 5, 6, 7)]),
        ((0, 1), 3, [(), (), ()]),
        ((0,), 0, []),
    ],
)
def test_cores_are_split(cores: tuple[int, ...], workers: int, split: list[tuple[int, ...]]) -> None:
    assert split_cores(cores, workers) == split


@given(st.integers(1, 200), st.integers(1, 200))
def test_a_split_uses_every_core_once_and_evenly(num_cores: int, num_workers: int) -> None:
    cores = tuple(range(num_cores))
    parts = split_cores(cores, num_workers)
    assert len(parts) == num_workers
    if num_cores >= num_workers:
        assert sum(parts, ()) == cores
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1503238553, "1.4 GiB"), (1 << 41, "2.0 TiB")],
)
def test_bytes_in_words(num_bytes: int, words: str) -> None:
    assert in_words(num_bytes) == words
