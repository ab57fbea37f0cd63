"""What requests are promised, and what is done when the promise can't be kept."""

from typing import Annotated, Literal

from msgspec import Meta

from distserve.config.fields import Section

Weight = Annotated[int, Meta(ge=1, le=1000, description="Its part of a prefill worker that can't serve all in time.")]
Milliseconds = Annotated[int, Meta(ge=0, le=86_400_000)]


class SloConfig(Section, frozen=True):
    """Of requests that say nothing themselves and whose API key says nothing."""

    ttft_ms: Annotated[
        Milliseconds, Meta(description="First token within this, or refused at once (429); 0: it is promised nothing.")
    ] = 0
    tpot_ms: Annotated[Milliseconds, Meta(description="Mean time of a token after the first; 0: nothing.")] = 0
    deadline_ms: Annotated[
        Milliseconds, Meta(description="The whole answer within this, or ended; 0: gateway.request_timeout_s.")
    ] = 0
    vip_weight: Weight = 8
    normal_weight: Weight = 4
    batch_weight: Weight = 1


class BreakerConfig(Section, frozen=True):
    mode: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="When the first tokens are late, send new requests to `fallback_url`, or refuse them by class "
            "where there is none. `auto`: only where there is one."
        ),
    ] = "auto"
    ttft_p99_ms: Annotated[
        int, Meta(ge=1, le=3_600_000, description="Late: the P99 of a second's times to first token is over this.")
    ] = 300
    for_s: Annotated[int, Meta(ge=1, le=3600, description="Opens after so many late seconds in a row.")] = 5
    open_s: Annotated[float, Meta(gt=0, le=3600, description="Then nothing is tried for this long.")] = 10.0
    num_probes: Annotated[
        int, Meta(ge=1, le=1000, description="Then so many requests are let through; all in time close it.")
    ] = 5
    fallback_url: Annotated[
        str, Meta(description="An OpenAI-compatible server, e.g. `http://10.0.0.9:8000`; empty: none.")
    ] = ""
    fallback_model: Annotated[str, Meta(max_length=200, description="Its name for the model; empty: ours.")] = ""
    fallback_key: Annotated[str, Meta(max_length=4096, description="Its API key; a secret: better by environment.")] = (
        ""
    )
    connect_timeout_s: Annotated[float, Meta(gt=0, le=60, description="To reach the fallback server.")] = 2.0
