"""Where weights lie in memory. What they compute is untouched."""

from __future__ import annotations

import torch

from distserve.engine.loaded import LoadedModel


def arrange_weights(loaded: LoadedModel) -> None:
    """On CPUs, lay the half-precision weights of linear layers out input-major.

    oneDNN's small-batch matrix kernels read that order as it is, and repack the other on every call: decode steps and
    short chunks are a tenth to a fifth faster (long ones equal). The output layer stays: it may be the embedding,
    which is read by rows.
    """
    if loaded.device.type != "cpu" or loaded.dtype == "float32":
        return
    output = loaded.model.get_output_embeddings()
    for module in loaded.base.modules():
        if type(module) is torch.nn.Linear and module is not output:
            module.weight.data = module.weight.data.t().contiguous().t()
