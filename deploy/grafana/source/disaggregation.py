"""Prefill, the hand-over, decode: who is short of what."""

from common import MODEL, OF_WORKER, WORKER, mean, quantile, quantiles, rate
from dashboard import Dashboard, Row
from panels import Query, curves, heatmap, words

_TEXT = """
A request goes through the rows from top to bottom. **Prefill:** a queue that grows while passes are full means too few
prefill workers; passes that are long and nearly empty mean long prompts. **Hand-over:** from the first token drawn to
the sequence's adoption by decode. If it takes long while few bytes move, decode has no room (*Waiting for room*);
if many move, the network is the limit. **Decode:** the time of a step grows with the sequences in it; when it is longer
than the pace that was promised, add decode workers. Preemptions mean that pools are too small.
"""
_PREFILL = OF_WORKER + ', role="prefill"'
_DECODE = OF_WORKER + ', role="decode"'
_ANY = 'instance=~"$worker"'
_SENT = _ANY + ', direction="sent"'

DASHBOARD = Dashboard(
    uid="distserve-disaggregation",
    title="DistServe disaggregation",
    text="Prefill, the hand-over and decode, each by itself.",
    variables=(MODEL, WORKER),
    first=(words(_TEXT),),
    rows=(
        Row(
            "Prefill",
            (
                curves(
                    "Queue",
                    *quantiles("distserve_worker_queue_seconds", _PREFILL, 0.5, 0.99),
                    text="A sequence's receipt to its first pass.",
                    unit="s",
                    width=6,
                ),
                curves(
                    "Waiting",
                    Query(f"sum by (instance) (distserve_worker_waiting_tokens{{{_PREFILL}}})", "{{instance}}"),
                    text="Prompt tokens that are still to be computed.",
                    unit="suffix: tok",
                    width=6,
                ),
                curves(
                    "Computing a prompt",
                    *quantiles("distserve_worker_prefill_seconds", _PREFILL, 0.5, 0.99),
                    text="A sequence's first pass to its first token.",
                    unit="s",
                    width=6,
                ),
                curves(
                    "In a pass",
                    Query(
                        mean("distserve_worker_batch_tokens", OF_WORKER + ', phase="prefill"', "instance"),
                        "{{instance}} tokens",
                    ),
                    Query(
                        mean("distserve_worker_batch_sequences", OF_WORKER + ', phase="prefill"', "instance"),
                        "{{instance}} sequences",
                    ),
                    text="Means of passes that compute prompts.",
                    width=6,
                    logarithmic=True,
                ),
                heatmap(
                    "Prompts' passes by their time",
                    "distserve_worker_pass_seconds",
                    OF_WORKER + ', phase="prefill"',
                    text="Also those of decode workers in which others step beside the prompt.",
                ),
                curves(
                    "Prompt tokens begun",
                    Query(rate("distserve_prompt_tokens_total", _ANY, "role"), "{{role}}"),
                    Query(rate("distserve_cached_prompt_tokens_total", _ANY, "role"), "{{role}}, of those in its pool"),
                    text="Tokens a second of prompts whose turn came, by who computes them.",
                    unit="suffix: tok/s",
                    width=12,
                ),
            ),
        ),
        Row(
            "Hand-over",
            (
                curves(
                    "First token to adoption",
                    Query(
                        quantile(0.5, "distserve_worker_handoff_seconds", _PREFILL, "transport"), "{{transport}} p50"
                    ),
                    Query(
                        quantile(0.99, "distserve_worker_handoff_seconds", _PREFILL, "transport"), "{{transport}} p99"
                    ),
                    text="What a hand-over delays the second token by.",
                    unit="s",
                    width=6,
                ),
                curves(
                    "Waiting for room",
                    Query(f"sum by (instance) (distserve_worker_waiting_sequences{{{_DECODE}}})", "{{instance}}"),
                    text="Sequences that wait at decode workers for blocks, or for a place in a step.",
                    width=6,
                ),
                curves(
                    "KV moved",
                    Query(
                        rate("distserve_transfer_bytes_total", _SENT, "transport", "traffic_class"),
                        "{{transport}} {{traffic_class}}",
                    ),
                    text="Bytes a second, as senders count them: between workers, and to and from the store.",
                    unit="Bps",
                    width=6,
                    stacked=True,
                ),
                curves(
                    "Time of a lease",
                    Query(
                        f"{rate('distserve_transfer_seconds_total', _SENT, 'transport', 'traffic_class')}"
                        f" / {rate('distserve_transfers_total', _SENT, 'transport', 'traffic_class')}",
                        "{{transport}} {{traffic_class}}",
                    ),
                    text="Mean seconds from opening it to its commit. Of a prompt it is open while that is computed.",
                    unit="s",
                    width=6,
                ),
                curves(
                    "Sent again",
                    Query(
                        f"{rate('distserve_transport_retransmitted_packets_total', _ANY, 'instance', 'transport')}"
                        f" / {rate('distserve_transport_packets_total', _ANY, 'instance', 'transport')}",
                        "{{instance}} {{transport}}",
                    ),
                    text="Of packets (rdma) or segments (tcp). Over 0.1 %: look at QoS. shm has none.",
                    unit="percentunit",
                ),
                curves(
                    "Transports that stood in",
                    Query(
                        rate("distserve_transport_fallbacks_total", _ANY, "transport", "peer"),
                        "{{transport}} to {{peer}}",
                    ),
                    text="Times a second that this transport could not reach a peer and another was taken.",
                    unit="ops",
                ),
                curves(
                    "Sequences that left a worker",
                    Query(
                        rate("distserve_worker_sequences_total", OF_WORKER, "role", "outcome"), "{{role}} {{outcome}}"
                    ),
                    text="By how they left.",
                    unit="ops",
                ),
            ),
        ),
        Row(
            "Decode",
            (
                curves(
                    "Time of a step",
                    *quantiles("distserve_worker_pass_seconds", OF_WORKER + ', phase="decode"', 0.5, 0.9, 0.99),
                    text="Passes that do nothing else than step: one token for each sequence in them.",
                    unit="s",
                    width=6,
                ),
                curves(
                    "Sequences in a step",
                    Query(
                        mean("distserve_worker_batch_sequences", OF_WORKER + ', phase="decode"', "instance"),
                        "{{instance}}",
                    ),
                    text="Mean.",
                    width=6,
                ),
                curves(
                    "Free blocks",
                    Query(
                        f"distserve_worker_free_blocks{{{_DECODE}}} / distserve_worker_total_blocks{{{_DECODE}}}",
                        "{{instance}}",
                    ),
                    text="Share of the pool that nobody holds. Near 0 sequences wait, or are preempted.",
                    unit="percentunit",
                    most=1,
                    width=6,
                ),
                curves(
                    "Preemptions",
                    Query(
                        rate("distserve_worker_preemptions_total", OF_WORKER, "instance", "how"), "{{instance}} {{how}}"
                    ),
                    text="Sequences a second that lost their blocks to others, by how they come back.",
                    unit="ops",
                    width=6,
                ),
                heatmap(
                    "Steps by their time",
                    "distserve_worker_pass_seconds",
                    OF_WORKER + ', phase="decode"',
                    text="Two bands are two kinds of steps, such as few sequences and many.",
                ),
                curves(
                    "Decoding a sequence",
                    *quantiles("distserve_worker_decode_seconds", _DECODE, 0.5, 0.99),
                    text="Adoption, or first token, to the end.",
                    unit="s",
                    width=6,
                ),
                curves(
                    "Steps passed over",
                    Query(rate("distserve_passed_over_steps_total", _ANY, "instance"), "{{instance}}"),
                    text="Steps a second that sequences did not take, for the sake of others' promised pace.",
                    unit="ops",
                    width=6,
                ),
            ),
        ),
        Row(
            "Machines and bus",
            (
                curves(
                    "GPU",
                    Query(f"distserve_worker_gpu_utilization_ratio{{{OF_WORKER}}}", "{{instance}} {{device}}"),
                    text="Share of the time in which the GPU computed, for anybody. Nothing on CPUs.",
                    unit="percentunit",
                    most=1,
                    width=6,
                ),
                curves(
                    "GPU memory",
                    Query(f"distserve_worker_gpu_memory_used_bytes{{{OF_WORKER}}}", "{{instance}} {{device}}"),
                    text="Taken, by anybody.",
                    unit="bytes",
                    width=6,
                ),
                curves(
                    "Waiting on the bus",
                    Query("sum by (job, instance) (distserve_bus_pending_messages)", "{{job}} {{instance}}"),
                    text="Messages that have come and wait for their turn, or wait to be sent. A service that does not "
                    "keep up drops them in the end.",
                    width=6,
                ),
                curves(
                    "Trouble on the bus",
                    Query(
                        "sum by (job, instance) (increase(distserve_bus_reconnects_total[5m]))",
                        "{{job}} {{instance}} reconnects",
                    ),
                    Query(
                        "sum by (job, instance) (increase(distserve_bus_dropped_messages_total[5m]))",
                        "{{job}} {{instance}} drops",
                    ),
                    Query(
                        "sum by (job, instance) (increase(distserve_bus_callback_errors_total[5m]))",
                        "{{job}} {{instance}} errors",
                    ),
                    Query(
                        "sum by (job, instance) (increase(distserve_bus_permission_denials_total[5m]))",
                        "{{job}} {{instance}} denials",
                    ),
                    text="In 5 minutes. All of it should be 0.",
                    width=6,
                ),
            ),
        ),
    ),
)
