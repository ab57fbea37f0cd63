"""`distserve gateway`: everything the gateway is made of, composed in one place."""

import logging
from contextlib import AsyncExitStack
from pathlib import Path

from distserve.api_keys import load_keys
from distserve.bus.nats import NatsBus
from distserve.config import Config
from distserve.lifecycle import Shutdown, new_id, run_service, settle_garbage
from distserve.models import resolve, tokenizer_folder
from distserve.transport.options import DSCP
from distserve.worker.traces import traced
from distserve_gateway.app import build_app
from distserve_gateway.chat_template import ChatTemplate
from distserve_gateway.gateway import Gateway, GatewayOptions
from distserve_gateway.server import bind, serving
from distserve_gateway.tokenizing import ModelTokenizer, model_context_length

log = logging.getLogger(__name__)


def main(config: Config) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    folder = tokenizer_folder(resolve(config.model.path, report=log.info))
    tokenizer = ModelTokenizer.from_folder(folder)
    template = ChatTemplate.from_folder(folder)
    options = options_of(config, folder)
    with traced("gateway", options.gateway_id, config.telemetry):
        grace_s = config.gateway.drain_s
        run_service(lambda shutdown: serve(config, options, tokenizer, template, shutdown), grace_s=grace_s)


def options_of(config: Config, folder: Path) -> GatewayOptions:
    """The gateway's own view of the configuration."""
    return GatewayOptions(
        gateway_id=config.gateway.id or new_id("gateway"),
        model=config.model.served_name,
        context_length=config.model.max_model_len or model_context_length(folder) or 2048,
        max_body_bytes=config.gateway.max_body_bytes,
        silence_s=config.gateway.silence_s,
        request_timeout_s=config.gateway.request_timeout_s,
        submit_timeout_s=config.gateway.submit_timeout_s,
        reply_timeout_s=config.bus.request_timeout_s,
        max_concurrent=config.gateway.max_concurrent,
        max_local_prefill_tokens=config.decode.max_local_prefill_tokens,
        beat_s=config.bus.beat_s,
        ttl_s=config.bus.ttl_s,
        slo=config.slo,
        breaker=config.breaker,
        keys=load_keys(Path(config.gateway.keys_file)) if config.gateway.keys_file else (),
        dscp={name: getattr(config.transport.classes, name).dscp for name in DSCP},
        vllm_metric_names=config.telemetry.vllm_metric_names,
        audit_file=config.telemetry.audit_file,
    )


async def serve(
    config: Config,
    options: GatewayOptions,
    tokenizer: ModelTokenizer,
    template: ChatTemplate | None,
    shutdown: Shutdown,
) -> None:
    """Bus, gateway, HTTP server, in this order; on shutdown the server goes first, after the streams have ended."""
    listener = bind(config.gateway.host, config.gateway.port)
    async with AsyncExitStack() as stack:
        stack.callback(listener.close)
        stack.callback(tokenizer.close)
        bus = await stack.enter_async_context(
            await NatsBus.connect(
                config.bus.url,
                name=options.gateway_id,
                registry_ttl_s=config.bus.ttl_s,
                connect_timeout_s=config.bus.connect_timeout_s,
            )
        )
        settle_garbage()
        gateway = await stack.enter_async_context(Gateway(bus, tokenizer, template, options))
        await stack.enter_async_context(serving(build_app(gateway), listener))
        host, port = listener.getsockname()[:2]
        if options.keys:
            log.info("API keys: %d, of %s", len(options.keys), config.gateway.keys_file)
        else:
            log.info("no API keys: open to everybody who reaches this address")
        log.info("serving %s on http://%s:%d", options.model, f"[{host}]" if ":" in host else host, port)
        await shutdown.wait()
        log.info("draining: %d sequences live", len(gateway.streams))
        await gateway.drain(shutdown.remaining_s())
        log.info("drained")
