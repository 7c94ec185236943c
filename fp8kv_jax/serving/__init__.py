"""Continuous batching: an engine that takes requests and gives tokens, step by step."""

from fp8kv_jax.serving.engine import Engine as Engine
from fp8kv_jax.serving.engine_config import EngineConfig as EngineConfig
from fp8kv_jax.serving.request import FinishReason as FinishReason
from fp8kv_jax.serving.request import Output as Output
from fp8kv_jax.serving.request import Request as Request
from fp8kv_jax.serving.request import SamplingParams as SamplingParams
from fp8kv_jax.serving.request import Stats as Stats
from fp8kv_jax.serving.request import TokenLogprobs as TokenLogprobs
from fp8kv_jax.serving.text import Detokenizer as Detokenizer
