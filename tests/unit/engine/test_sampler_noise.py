"""The noise: one value for each (seed, position, stream, id), distributed as standard Gumbel."""

import math

import torch

from distserve.engine.noise import BLOCK, Streams
from distserve.engine.sequence import Sequence
from distserve.messages import SequenceKey
from tests.unit.engine.sampling_cases import at_position, sequence

CPU = torch.device("cpu")


def gumbel(sequences: list[Sequence], vocab: int = 4 * BLOCK) -> torch.Tensor:
    return Streams.of(sequences, CPU).gumbel(torch.arange(vocab).expand(len(sequences), -1))


def test_noise_of_a_block_is_the_noise_of_its_ids() -> None:
    streams = Streams.of([at_position(7, seed=3), at_position(9, seed=2**64 - 1)], CPU)
    for block in range(5):
        ids = torch.arange(block * BLOCK, (block + 1) * BLOCK).expand(2, -1)
        assert torch.equal(streams.block_gumbel(torch.tensor([block, block])), streams.gumbel(ids))


def test_no_id_of_a_block_passes_its_bound() -> None:
    streams = Streams.of([at_position(i, seed=i) for i in range(200)], CPU)
    smallest, slot = streams.block_draws(torch.full((200, 1), 3))
    noise = streams.block_gumbel(torch.full((200,), 3))
    assert torch.equal(noise.argmax(dim=1), slot[:, 0])
    assert torch.equal(noise.amax(dim=1), -smallest[:, 0].log())


def test_each_part_of_the_stream_matters() -> None:
    base = gumbel([sequence(seed=5)])
    others = [
        sequence(seed=6),
        sequence(seed=5 + 2**32),
        sequence(seed=5 + 2**63),
        sequence(prompt=[1, 2, 3, 4], seed=5),
        sequence(stream=1, seed=5),
    ]
    for other in others:
        assert not (gumbel([other]) == base).any()


def test_history_does_not_matter() -> None:
    """The same place in the sequence: other tokens, another split of prompt and output, another attempt, another place
    in a list of prompts."""
    a = sequence(prompt=[1, 2, 3], output=[4, 5], seed=9)
    b = sequence(prompt=[9, 8, 7, 6, 5], seed=9)
    b.key = SequenceKey("another", 7, 2)
    b.num_preemptions, b.num_computed_tokens, b.block_table = 3, 4, [5, 6]
    assert torch.equal(gumbel([a]), gumbel([b]))


def test_noise_is_gumbel_distributed() -> None:
    """Kolmogorov-Smirnov against exp(-exp(-x)); the critical value is for a probability of 1e-6."""
    x = gumbel([at_position(i, seed=11) for i in range(1, 401)]).flatten().sort().values
    n = len(x)
    cdf = (-(-x).exp()).exp()
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = max(float((cdf - steps[:-1]).abs().max()), float((steps[1:] - cdf).abs().max()))
    assert distance < math.sqrt(-0.5 * math.log(1e-6 / 2) / n)


def test_ids_of_a_block_are_independent() -> None:
    """Ids share the draw of their block's smallest: no pair of them may be correlated for it, nor may neighbours
    across blocks, positions or outputs."""
    u = (-(-gumbel([at_position(i, seed=1) for i in range(1, 4001)])).exp()).exp() - 0.5  # uniform, mean 0
    correlation = (u.T @ u / len(u) * 12).fill_diagonal_(0.0)
    assert correlation.abs().max() < 5.5 / math.sqrt(len(u))  # 32,640 pairs: 5.5 sigma is 1e-3 in all
    assert abs(float((u[1:] * u[:-1]).mean()) * 12) < 5 / math.sqrt(u.numel())


def test_the_smallest_lies_in_every_slot_equally_often() -> None:
    _, slots = Streams.of([at_position(i, seed=4) for i in range(1, 6401)], CPU).block_draws(
        torch.zeros(6400, 1).long()
    )
    counts = torch.bincount(slots.flatten(), minlength=BLOCK)
    chi_square = float(((counts - 100.0) ** 2 / 100.0).sum())
    assert chi_square < 130.0  # 63 degrees of freedom: probability 1e-6
