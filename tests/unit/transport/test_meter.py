"""What is counted of transfers, and when it is forgotten."""

from distserve.transport.meter import Flow, Meter, Tally


def test_what_has_left_is_counted_no_more_and_the_others_are() -> None:
    meter = Meter()
    kept, gone = Flow("sent", "tcp", "prefill", "d1"), Flow("sent", "rdma", "decode", "d0")
    for flow in (kept, gone, Flow("sent", "tcp", "prefill", "d0")):
        meter.add(flow, 100, 0.5)
    meter.forget("d0")
    meter.forget("nobody")
    assert meter.snapshot() == {kept: Tally(1, 100, 0.5)}
    meter.add(gone, 7, 1.0)  # it is back, under the same name
    assert meter.snapshot()[gone] == Tally(1, 7, 1.0)
