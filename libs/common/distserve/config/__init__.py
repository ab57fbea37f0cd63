"""Configuration: YAML file < environment < command line, into one small frozen tree, loudly."""

from distserve.config.checks import parse_cpus
from distserve.config.load import RESERVED_VARIABLES, as_environment, as_yaml, get, load_config
from distserve.config.sections import (
    BusConfig,
    ClassesConfig,
    Config,
    DecodeConfig,
    GatewayConfig,
    KVConfig,
    ModelConfig,
    PrefillConfig,
    RdmaConfig,
    SchedulerConfig,
    TrafficClassConfig,
    TransportConfig,
)
from distserve.config.serving import BreakerConfig, SloConfig
from distserve.config.settings import Setting, settings
from distserve.config.store import KVStoreConfig
from distserve.config.telemetry import TelemetryConfig

__all__ = [
    "RESERVED_VARIABLES",
    "BreakerConfig",
    "BusConfig",
    "ClassesConfig",
    "Config",
    "DecodeConfig",
    "GatewayConfig",
    "KVConfig",
    "KVStoreConfig",
    "ModelConfig",
    "PrefillConfig",
    "RdmaConfig",
    "SchedulerConfig",
    "Setting",
    "SloConfig",
    "TelemetryConfig",
    "TrafficClassConfig",
    "TransportConfig",
    "as_environment",
    "as_yaml",
    "get",
    "load_config",
    "parse_cpus",
    "settings",
]
