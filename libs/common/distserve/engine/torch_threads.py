"""How many threads torch computes with in this process."""

import torch


def limit_threads(num_threads: int) -> None:
    """Of one operator; operators never run side by side here. Call it before the first operator."""
    torch.set_num_threads(num_threads)
    torch.set_num_interop_threads(1)
