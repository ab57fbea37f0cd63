"""Which decode worker to hand a sequence to. A pure function of the registry's snapshot."""

from collections.abc import Mapping

from distserve.messages import KVLayout, SubmitRequest, WorkerInfo


def decode_candidates(
    snapshot: Mapping[str, WorkerInfo], request: SubmitRequest, layout: KVLayout, tried: set[str]
) -> str | None:
    """The one that the gateway chose, then the others with the same model and layout, degraded ones last, those with
    most free blocks first. None if every one was tried."""
    fit = [
        w
        for w in snapshot.values()
        if w.role == "decode"
        and w.status in ("ok", "degraded")
        and w.layout == layout
        and w.model == request.model
        and not w.colocated
    ]
    fit.sort(
        key=lambda w: (
            w.worker_id != request.decode_worker,
            w.status == "degraded",
            -w.load.free_blocks,
            w.worker_id,
        )
    )
    chosen = request.decode_worker
    if chosen is not None and chosen not in snapshot and chosen not in tried:
        return chosen  # perhaps newer than our snapshot: the bus tells at once if it isn't there
    return next((w.worker_id for w in fit if w.worker_id not in tried), None)
