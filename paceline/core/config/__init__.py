"""Options of all services: one class for each service. Each field is a flag and a key of the TOML file."""

from paceline.core.config.gateway import GatewayConfig
from paceline.core.config.kvtransfer import KVTransferConfig
from paceline.core.config.models import model_configs, own_options
from paceline.core.config.planner import PlannerConfig, PlatformName
from paceline.core.config.serve import CACHE_OPTIONS, PREPARE_OPTIONS, ServeConfig
from paceline.core.config.service import (
    GIB,
    KV_TOKENS,
    ChosenQuantization,
    DType,
    GenerationConfig,
    KVCacheDType,
    KVPool,
    LogLevel,
    ModelImpl,
    Quantization,
    RouterMode,
    ServiceConfig,
    TransportChoice,
    WeightForm,
    check_http,
    check_model_code,
    check_step_size,
    has_pools,
    quantization_of,
)
from paceline.core.config.worker import PoolConfig, WorkerConfig

__all__ = [
    "CACHE_OPTIONS",
    "GIB",
    "KV_TOKENS",
    "PREPARE_OPTIONS",
    "ChosenQuantization",
    "DType",
    "GatewayConfig",
    "GenerationConfig",
    "KVCacheDType",
    "KVPool",
    "KVTransferConfig",
    "LogLevel",
    "ModelImpl",
    "PlannerConfig",
    "PlatformName",
    "PoolConfig",
    "Quantization",
    "RouterMode",
    "ServeConfig",
    "ServiceConfig",
    "TransportChoice",
    "WeightForm",
    "WorkerConfig",
    "check_http",
    "check_model_code",
    "check_step_size",
    "has_pools",
    "model_configs",
    "own_options",
    "quantization_of",
]
