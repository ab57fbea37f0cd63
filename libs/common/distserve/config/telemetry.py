"""What services tell of themselves: logs, metrics, traces."""

from typing import Annotated, Literal

from msgspec import Meta

from distserve.config.fields import Section


class TelemetryConfig(Section, frozen=True):
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe message that is logged.")
    ] = "info"
    metrics_host: Annotated[
        str, Meta(min_length=1, description="Address on which workers serve `/metrics` and `/health`.")
    ] = "127.0.0.1"
    log_format: Annotated[Literal["text", "json"], Meta(description="Lines for people or for machines.")] = "text"
    otlp_endpoint: Annotated[
        str,
        Meta(description="Where traces go by OTLP/HTTP, e.g. `http://localhost:4318`; empty: nothing is traced."),
    ] = ""
    trace_ratio: Annotated[
        float,
        Meta(ge=0, le=1, description="Share of requests whose trace is kept whatever becomes of them."),
    ] = 1.0
    trace_failures: Annotated[
        bool,
        Meta(description="Keep those of requests that failed or missed a promise too, whatever the ratio is."),
    ] = True
    trace_hold_s: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="How long the spans of a request that is not in the ratio are held until its gateway has said "
            "whether they are kept.",
        ),
    ] = 60.0
    vllm_metric_names: Annotated[
        bool, Meta(description="The gateway's figures under vLLM's names too, e.g. `vllm:time_to_first_token_seconds`.")
    ] = False
    audit_file: Annotated[
        str,
        Meta(description="A gateway adds a line of JSON each second: its TTFT quantiles, requests and tokens."),
    ] = ""
