"""An FP8 KV cache for JAX that calibrates its scales online and stays exact."""

from fp8kv_jax.attention import Step as Step
from fp8kv_jax.attention import attend as attend
from fp8kv_jax.attention import begin_step as begin_step
from fp8kv_jax.attention import end_step as end_step
from fp8kv_jax.batch import Batch as Batch
from fp8kv_jax.batch import MixedBatch as MixedBatch
from fp8kv_jax.block_table import BlockTable as BlockTable
from fp8kv_jax.block_table import OutOfPagesError as OutOfPagesError
from fp8kv_jax.block_table import make_batch as make_batch
from fp8kv_jax.cache import CacheConfig as CacheConfig
from fp8kv_jax.cache import PagedKVCache as PagedKVCache
from fp8kv_jax.cache import init_cache as init_cache
from fp8kv_jax.calibration import CalibrationConfig as CalibrationConfig
from fp8kv_jax.calibration import CalibrationState as CalibrationState
from fp8kv_jax.calibration import graphs_ready as graphs_ready
from fp8kv_jax.calibration import init_calibration as init_calibration
from fp8kv_jax.calibration import release_window as release_window
from fp8kv_jax.calibration import reset as reset
from fp8kv_jax.decode import Steps as Steps
from fp8kv_jax.decode import make_steps as make_steps
from fp8kv_jax.dense import dense_batch as dense_batch
from fp8kv_jax.drift.telemetry import Telemetry as Telemetry
from fp8kv_jax.drift.telemetry import init_telemetry as init_telemetry
from fp8kv_jax.parallel import Placement as Placement
from fp8kv_jax.parallel import place as place
