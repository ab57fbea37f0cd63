"""Prefixes: how much is found, where, and what the store's tiers do."""

from common import MODEL, NODE, OF_MODEL, OF_NODE, WORKER, quantile, rate
from dashboard import Dashboard, Row
from panels import GREEN, RED, YELLOW, Query, curves, gauges, steps, table, words

_TEXT = """
**Found:** of all prompt tokens those that nobody had to compute. Where prompts share beginnings it should be high; if
it falls while *Evicted* rises, pools or tiers are too small. **By tier:** blocks found, by the fastest tier that had
them; much on disk or in objects means that memory is too small for what is asked for often. **Fetches** pay when they
take less time than computing: compare *Time of a fetch* with *Computing a prompt* on the dashboard **Disaggregation**.
A tier in *Trouble* is gone on without: what only it has is computed again.
"""
_WORKERS = 'instance=~"$worker"'

DASHBOARD = Dashboard(
    uid="distserve-kv-store",
    title="DistServe KV store",
    text="Prefix hits, the store's tiers, and what moves between them and the workers.",
    variables=(MODEL, WORKER, NODE),
    first=(words(_TEXT),),
    rows=(
        Row(
            "Hits",
            (
                curves(
                    "Found",
                    Query(
                        f"{rate('distserve_gateway_cached_tokens_total', OF_MODEL)}"
                        f" / {rate('distserve_gateway_looked_up_tokens_total', OF_MODEL)}",
                        "of all prompt tokens",
                    ),
                    Query(
                        f"{rate('distserve_cached_prompt_tokens_total', _WORKERS, 'role')}"
                        f" / {rate('distserve_prompt_tokens_total', _WORKERS, 'role')}",
                        "{{role}}, in its own pool",
                    ),
                    text="Share of prompt tokens that were not computed; and of those whose turn came at a worker, "
                    "what its pool held, with what it had fetched.",
                    unit="percentunit",
                    most=1,
                ),
                curves(
                    "Found by tier",
                    Query(rate("distserve_store_hit_blocks_total", _WORKERS, "tier"), "{{tier}}"),
                    text="Blocks a second that workers looked up and somebody had, by the tier they were in.",
                    unit="suffix: blocks/s",
                    stacked=True,
                ),
                curves(
                    "Looked up",
                    Query(rate("distserve_store_sought_blocks_total", _WORKERS), "looked up"),
                    Query(rate("distserve_store_hit_blocks_total", _WORKERS), "found"),
                    Query(rate("distserve_store_fetched_blocks_total", _WORKERS), "fetched"),
                    text="Blocks a second.",
                    unit="suffix: blocks/s",
                ),
                curves(
                    "Time of a fetch",
                    Query(
                        f"{rate('distserve_store_fetch_seconds_total', _WORKERS, 'role')}"
                        f" / {rate('distserve_store_fetches_total', _WORKERS, 'role')}",
                        "{{role}}",
                    ),
                    text="Mean, as workers see it; a fetch is from one source.",
                    unit="s",
                ),
                curves(
                    "Fetched and given",
                    Query(rate("distserve_store_fetched_bytes_total", _WORKERS, "role"), "{{role}} fetched"),
                    Query(rate("distserve_store_offered_bytes_total", _WORKERS, "role"), "{{role}} gave to the store"),
                    Query(rate("distserve_store_served_bytes_total", _WORKERS, "role"), "{{role}} served to others"),
                    text="KV bytes a second.",
                    unit="Bps",
                ),
                curves(
                    "In vain",
                    Query(rate("distserve_store_silent_total", _WORKERS), "not answered in time"),
                    Query(rate("distserve_store_failed_fetches_total", _WORKERS, "reason"), "fetch failed: {{reason}}"),
                    Query(
                        rate("distserve_store_dropped_blocks_total", _WORKERS, "reason"), "blocks not given: {{reason}}"
                    ),
                    Query(
                        rate("distserve_kvstore_failed_fetches_total", OF_NODE, "code"), "node's fetch failed: {{code}}"
                    ),
                    text="A second. All of it costs time, never an answer.",
                    unit="ops",
                ),
            ),
        ),
        Row(
            "Tiers",
            (
                gauges(
                    "Full",
                    Query(
                        f"sum by (tier) (distserve_kvstore_bytes{{{OF_NODE}}})"
                        f" / (sum by (tier) (distserve_kvstore_capacity_bytes{{{OF_NODE}}}) > 0)",
                        "{{tier}}",
                    ),
                    text="Of what a tier may hold; tiers without a limit are left out.",
                    unit="percentunit",
                    most=1,
                    thresholds=steps((None, GREEN), (0.9, YELLOW), (0.98, RED)),
                    width=6,
                ),
                curves(
                    "Bytes",
                    Query(f"sum by (tier) (distserve_kvstore_bytes{{{OF_NODE}}})", "{{tier}}"),
                    text="A block may be in several tiers.",
                    unit="bytes",
                    width=6,
                ),
                curves(
                    "Written",
                    Query(rate("distserve_kvstore_written_blocks_total", OF_NODE, "tier"), "to {{tier}}"),
                    text="Blocks a second.",
                    unit="suffix: blocks/s",
                    width=6,
                ),
                curves(
                    "Read",
                    Query(rate("distserve_kvstore_read_blocks_total", OF_NODE, "tier"), "from {{tier}}"),
                    text="Blocks a second, into memory.",
                    unit="suffix: blocks/s",
                    width=6,
                ),
                curves(
                    "Evicted",
                    Query(
                        rate("distserve_kvstore_evicted_blocks_total", OF_NODE, "tier", "reason"),
                        "{{tier}}: {{reason}}",
                    ),
                    text="Blocks a second that left a tier, by reason.",
                    unit="suffix: blocks/s",
                    width=6,
                ),
                curves(
                    "Time of an operation, p99",
                    Query(
                        quantile(0.99, "distserve_kvstore_operation_seconds", OF_NODE, "tier", "operation"),
                        "{{tier}} {{operation}}",
                    ),
                    text="Reads and writes of a tier; lookups and fetches of the node.",
                    unit="s",
                    width=6,
                    logarithmic=True,
                ),
                curves(
                    "Errors",
                    Query(rate("distserve_kvstore_errors_total", OF_NODE, "tier"), "{{tier}}"),
                    Query(
                        f"sum by (tier) (distserve_kvstore_tier_trouble{{{OF_NODE}}})", "{{tier}} in trouble (nodes)"
                    ),
                    text="Operations and blocks a second that failed.",
                    width=6,
                ),
                curves(
                    "Nowhere else",
                    Query(f"sum(distserve_kvstore_unwritten_blocks{{{OF_NODE}}})", "in memory only"),
                    Query(f"sum(distserve_kvstore_pins{{{OF_NODE}}})", "pins of askers"),
                    Query(f"sum(distserve_kvstore_leases{{{OF_NODE}}})", "offers under way"),
                    Query(f"sum(distserve_kvstore_fetches{{{OF_NODE}}})", "fetches under way"),
                    text="What a node that dies takes with it, and what keeps blocks from being evicted.",
                    width=6,
                ),
            ),
        ),
        Row(
            "Nodes",
            (
                table(
                    "What nodes have",
                    Query(f"sum by (instance) (distserve_kvstore_index_blocks{{{OF_NODE}}})"),
                    Query(f"sum by (instance) (distserve_kvstore_index_bytes{{{OF_NODE}}})"),
                    Query(f"sum by (instance) (distserve_kvstore_conversations{{{OF_NODE}}})"),
                    Query(f"sum by (instance) (distserve_kvstore_vip_blocks{{{OF_NODE}}})"),
                    Query(f"sum by (instance) (distserve_kvstore_degraded{{{OF_NODE}}})"),
                    text="What each has.",
                    rename={
                        "instance": "node",
                        "Value #A": "blocks",
                        "Value #B": "index, bytes",
                        "Value #C": "conversations",
                        "Value #D": "pinned blocks",
                        "Value #E": "degraded",
                    },
                ),
                curves(
                    "Lookups",
                    Query(rate("distserve_kvstore_lookups_total", OF_NODE, "instance"), "{{instance}}"),
                    text="Answered, a second. One node with many more than others: see kvstore.replicas.",
                    unit="ops",
                    width=6,
                ),
                curves(
                    "Copied to other nodes",
                    Query(rate("distserve_kvstore_replicated_blocks_total", OF_NODE, "instance"), "{{instance}}"),
                    text="Blocks a second of segments that many ask for.",
                    unit="suffix: blocks/s",
                    width=6,
                ),
            ),
        ),
    ),
)
