"""Compiled passes against what they stand for: matrix products beside torch's, whole passes beside torch's products.

    python -m benchmarks.native_products [--model smollm2] [--threads 2] [--rounds 9] [--only products|passes]

Sides alternate in one process, so that what else the machine does hits all alike; the figure is the median. `packed`
are torch's products with weights packed once by oneDNN, which doubles the weights' memory. Weights are those of all
layers in turn, so they come from memory. Run it as a worker would: OMP_WAIT_POLICY=passive.
"""

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.native_products_passes import PASSES, Bench
from distserve.engine.loaded import LoadedModel
from distserve.engine.model import load_model
from distserve.engine.native.loader import Compiling
from distserve.engine.native.model import NativeModel
from distserve.models import resolve

ROWS = (1, 4, 8, 16, 32, 64, 128, 256, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=("products", "passes"))
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    model = load_model(resolve(a.model))
    compiling = Compiling(model.dtype)
    if not compiling.wait(300.0):
        raise SystemExit("compiling takes too long")
    library = compiling.result()
    native = NativeModel(model, library, a.threads)
    with torch.inference_mode():
        if a.only != "passes":
            products(model, library, a.threads, a.rounds)
        if a.only != "products":
            bench = Bench(model, native)
            for name, specs in PASSES.items():
                print(f"{name:24}", _line(alternate(bench.sides(specs), a.rounds), 1e3, "ms"), flush=True)


def products(model: LoadedModel, library: ctypes.CDLL, threads: int, rounds: int) -> None:
    """GFLOP/s of one product by each linear layer's weights."""
    weights = [x.weight for x in model.base.layers.modules() if isinstance(x, torch.nn.Linear)]
    for rows in ROWS:
        inputs = {n: torch.randn(rows, n).to(model.model.dtype) for n in {w.shape[1] for w in weights}}
        outputs = {n: torch.empty(rows, n, dtype=model.model.dtype) for n in {w.shape[0] for w in weights}}
        sides = {
            "torch": _torch(weights, inputs, outputs),
            "ours": _ours(weights, inputs, outputs, library, threads),
            **_packed(weights, inputs, rows),
        }
        operations = 2 * rows * sum(w.numel() for w in weights)
        rates = {name: operations / seconds for name, seconds in alternate(sides, rounds).items()}
        print(f"{rows:4} rows  ", _line(rates, 1e-9, "GFLOP/s"), flush=True)


def _torch(weights: list[Any], inputs: dict[int, Any], outputs: dict[int, Any]) -> Callable[[], None]:
    def run() -> None:
        for w in weights:
            torch.mm(inputs[w.shape[1]], w.t(), out=outputs[w.shape[0]])

    return run


def _ours(
    weights: list[Any], inputs: dict[int, Any], outputs: dict[int, Any], library: ctypes.CDLL, threads: int
) -> Callable[[], None]:
    def run() -> None:
        for w in weights:
            x, y = inputs[w.shape[1]], outputs[w.shape[0]]
            numbers = (x.data_ptr(), len(x), w.data_ptr(), *w.shape, y.data_ptr(), threads)
            library.distserve_linear(*map(ctypes.c_int64, numbers))

    return run


def _packed(weights: list[Any], inputs: dict[int, Any], rows: int) -> dict[str, Callable[[], None]]:
    """Nothing where this torch has no such products."""
    try:
        packed = [torch.ops.mkldnn._reorder_linear_weight(w.detach(), rows) for w in weights]
    except (AttributeError, RuntimeError):
        return {}

    def run() -> None:
        for w, p in zip(weights, packed, strict=True):
            torch.ops.mkldnn._linear_pointwise(inputs[w.shape[1]], p, None, "none", [], "")

    return {"packed": run}


def alternate(sides: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of each side, which take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in seconds.items()}


def _line(figures: dict[str, float], scale: float, unit: str) -> str:
    return "  ".join(f"{name} {scale * x:.1f}" for name, x in figures.items()) + f"  {unit}"


if __name__ == "__main__":
    main()
