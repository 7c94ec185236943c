"""`fp8kv serve`: an OpenAI-compatible server over an FP8 KV cache."""

import contextlib
import functools
import importlib.util
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from fp8kv_jax.cache import CacheConfig
from fp8kv_jax.calibration import CalibrationConfig
from fp8kv_jax.cli import options
from fp8kv_jax.cli import serve_options as flags
from fp8kv_jax.cli.devices import load_on
from fp8kv_jax.cli.errors import UserError, checking_input, print_warning
from fp8kv_jax.cli.identity import identify
from fp8kv_jax.cli.model import choose_dtype
from fp8kv_jax.cli.screen import Screen
from fp8kv_jax.cli.serve_state import Snapshots, read_calibration_prompts, read_key
from fp8kv_jax.cli.static_scales import (
    StaticScales,
    check_flags,
    follow_scales,
    load_scales,
)
from fp8kv_jax.parallel import Placement

if TYPE_CHECKING:
    from fp8kv_jax.serving import Engine, EngineConfig
    from fp8kv_jax.serving.http.config import ServedModel, ServerConfig
    from models.loading import LoadedModel

_LONGEST_BY_DEFAULT = 4096
_NUM_SEQS, _CHUNK, _MAX_TOKENS_PER_STEP = 32, 128, 512
# A CPU takes longer to compile a step than to answer a question, and padding costs it
# as much as tokens do: two steps, small ones, and the first is enough to begin.
_NUM_SEQS_ON_CPU, _CHUNK_ON_CPU = 4, 32
# Of the memory left; the rest is for the steps and the window.
_POOL_SHARE = 0.7
_FULL_SEQUENCES_ON_CPU = 8


def serve(
    model: options.Model = None,
    host: flags.Host = "127.0.0.1",
    port: flags.Port = 8000,
    api_key_file: flags.ApiKeyFile = None,
    served_model_name: flags.ServedName = None,
    dtype: options.Dtype = None,
    tensor_parallel_size: options.TensorParallelSize = 1,
    max_num_seqs: flags.MaxNumSeqs = None,
    max_model_len: flags.MaxModelLen = None,
    max_num_batched_tokens: flags.MaxNumBatchedTokens = None,
    num_pages: flags.NumPages = None,
    page_size: options.PageSize = 128,
    kv_cache_dtype: options.CacheDtype = options.KvCacheDtype.FP8,
    fp8_kv_calibration_tokens: options.CalibrationTokens = 256,
    calibration_prompts: flags.CalibrationPrompts = None,
    ready_when: flags.Ready = flags.ReadyWhen.ACCEPTING,
    fp8_kv_headroom: options.Headroom = 2.0,
    fp8_kv_granularity: options.Granularity = options.ScaleGranularity.TENSOR,
    fp8_kv_scales: options.Scales = None,
    fp8_kv_uncovered_layers: options.Uncovered = options.UncoveredLayers.BF16,
    allow_mismatch: options.AllowMismatch = None,
    kv_high_precision_layers: options.HighPrecisionLayers = "none",
    snapshot: flags.Snapshot = None,
    snapshot_pages: flags.SnapshotPages = 256,
    compilation_cache: flags.CompilationCache = None,
    max_open_requests: flags.MaxOpen = 256,
    max_body_bytes: flags.MaxBodyBytes = 2**20,
    body_timeout: flags.BodyTimeout = 10.0,
    request_timeout: flags.RequestTimeout = 600.0,
    shutdown_timeout: flags.ShutdownTimeout = 30.0,
) -> None:
    """Serves a model over HTTP, with the interface of OpenAI.

    /v1/completions, /v1/chat/completions and /v1/models; /health, /ready and /metrics.
    SIGTERM and Ctrl-C let requests under way end, then stop.
    """
    request = _Request(**locals())
    _check_installed()
    check_flags(
        fp8_kv_scales, fp8_kv_uncovered_layers, allow_mismatch, kv_cache_dtype, None
    )
    request.check()
    with _bind(host, port) as bound:
        if request.server.api_key is None and not _is_loopback(bound):
            print_warning(f"{host} may be reached by others, and there is no API key.")
        _run(request, bound)


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What the command line says, under the names of `serve`'s parameters."""

    model: Path | None
    host: str
    port: int
    api_key_file: Path | None
    served_model_name: str | None
    dtype: options.ComputeDtype | None
    tensor_parallel_size: int
    max_num_seqs: int | None
    max_model_len: int | None
    max_num_batched_tokens: int | None
    num_pages: int | None
    page_size: int
    kv_cache_dtype: options.KvCacheDtype
    fp8_kv_calibration_tokens: int
    calibration_prompts: Path | None
    ready_when: flags.ReadyWhen
    fp8_kv_headroom: float
    fp8_kv_granularity: options.ScaleGranularity
    fp8_kv_scales: Path | None
    fp8_kv_uncovered_layers: options.UncoveredLayers
    allow_mismatch: str | None
    kv_high_precision_layers: str
    snapshot: Path | None
    snapshot_pages: int
    compilation_cache: Path | None
    max_open_requests: int
    max_body_bytes: int
    body_timeout: float
    request_timeout: float
    shutdown_timeout: float

    @functools.cached_property
    def server(self) -> "ServerConfig":
        from fp8kv_jax.serving.http.config import ServerConfig

        return ServerConfig(
            max_open=self.max_open_requests,
            max_body_bytes=self.max_body_bytes,
            header_timeout=self.body_timeout,
            body_timeout=self.body_timeout,
            request_timeout=self.request_timeout,
            ready_when=self.ready_when.value,
            api_key=read_key(self.api_key_file),
        )

    @functools.cached_property
    def calibration(self) -> CalibrationConfig:
        return CalibrationConfig(
            window_tokens=self.fp8_kv_calibration_tokens,
            headroom=self.fp8_kv_headroom,
            granularity=self.fp8_kv_granularity.value,
        )

    @functools.cached_property
    def high_precision_layers(self) -> tuple[int, ...]:
        return options.parse_layers(self.kv_high_precision_layers)

    def check(self) -> None:
        """Refuses what is wrong with any model, before one is loaded.

        Raises:
          UserError: if anything is.
        """
        with checking_input():
            _ = self.server, self.calibration, self.high_precision_layers
        online = self.fp8_kv_scales is None and self.kv_cache_dtype == "fp8"
        if online and not self.calibration.window_tokens:
            raise UserError(
                "Expected --fp8-kv-calibration-tokens of at least 1 without "
                "--fp8-kv-scales, got 0."
            )


def _check_installed() -> None:
    missing = [
        name
        for name in ("starlette", "uvicorn", "prometheus_client")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise UserError(
            f"Expected the extra `serve` to be installed, but there is no "
            f"{' and no '.join(missing)}: pip install 'fp8kv-jax[serve]', or "
            "`uv run --extra serve fp8kv serve ...`."
        )


def _bind(host: str, port: int) -> socket.socket:
    from fp8kv_jax.serving.http.server import bind

    try:
        return bind(host, port)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"Expected --host and --port to be free to listen on, got {host} and "
            f"{port}: {reason}."
        ) from None


def _is_loopback(bound: socket.socket) -> bool:
    address = bound.getsockname()[0]
    return address.startswith("127.") or address == "::1"


def _run(request: _Request, bound: socket.socket) -> None:
    phase = "loading the model"
    with Screen(lambda: phase):
        dtype = choose_dtype(request.dtype)
        model, placement = load_on(request.tensor_parallel_size, request.model, dtype)
        prompts: list[list[int]] = []
        if request.calibration_prompts is not None:
            prompts = read_calibration_prompts(request.calibration_prompts, model)
        scales = None
        if request.fp8_kv_scales is not None:
            scales = load_scales(
                request.fp8_kv_scales, model, allow_mismatch=request.allow_mismatch
            )
        snapshots = None
        if request.snapshot is not None:
            phase = "hashing the model"
            snapshots = Snapshots(
                request.snapshot,
                model=_identity(request, model, scales),
                max_pages=request.snapshot_pages,
            )
        with checking_input():
            engine = _make_engine(request, model, dtype, scales, placement)
    if snapshots is not None:
        _restore(snapshots, engine)
    _serve(request, bound, engine, _served(request, model), prompts, snapshots)


def _restore(snapshots: Snapshots, engine: "Engine") -> None:
    restored = snapshots.load(engine)
    if restored is not None:
        what = "frozen scales" if restored.frozen else "a window under way"
        _note(
            f"restored {what} ({restored.tokens_seen} tokens) and "
            f"{restored.num_pages} pages from {restored.folder}"
        )


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _serve(
    request: _Request,
    bound: socket.socket,
    engine: "Engine",
    model: "ServedModel",
    prompts: Sequence[Sequence[int]],
    snapshots: Snapshots | None,
) -> None:
    """Serves until told to stop."""
    from fp8kv_jax.serving.http.app import make_app
    from fp8kv_jax.serving.http.metrics import Metrics
    from fp8kv_jax.serving.http.preparing import preparation
    from fp8kv_jax.serving.http.server import make_server
    from fp8kv_jax.serving.http.worker import Worker

    prepare = preparation(prompts)
    status_line = contextlib.ExitStack()

    def prepare_and_say(engine: "Engine") -> None:
        prepare(engine)
        status_line.close()
        stats = engine.stats()
        progress = f"{stats.tokens_seen} of {stats.window_tokens} tokens"
        frozen = "scales are frozen" if stats.frozen else f"calibrating: {progress}"
        _note(f"accepting requests for {model.name} | {frozen}")

    def say_frozen(engine: "Engine") -> None:
        _note(f"scales frozen at {engine.stats().tokens_seen} tokens")
        if snapshots is not None:
            snapshots.save_at_freeze(engine)

    worker = Worker(
        engine,
        Metrics(),
        prepare=prepare_and_say,
        on_frozen=say_frozen,
        on_stop=snapshots.save_at_end if snapshots is not None else None,
    )
    server = make_server(
        make_app(worker, model, request.server),
        worker,
        request.server,
        shutdown_timeout=request.shutdown_timeout,
    )
    host, port = bound.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    _note(f"listening on http://{host}:{port} | compiling")
    with status_line:
        status_line.enter_context(_show_progress(engine))
        server.run(sockets=[bound])
    if worker.error is not None:
        raise worker.error
    if not worker.has_ended:  # it compiles, which nothing can stop but an exit
        raise KeyboardInterrupt
    _note("stopped")
    if snapshots is not None:
        snapshots.check_saved()


def _show_progress(engine: "Engine") -> Screen:
    """A status line about a start, from now on."""
    started = time.monotonic()

    def progress() -> str:
        num_compiled, num_steps = engine.compiled
        doing = f"compiling: {num_compiled} of {num_steps} steps"
        stats = engine.stats()
        if stats.num_steps:
            doing = f"calibrating: {stats.tokens_seen} of {stats.window_tokens} tokens"
        return f"{doing} | {time.monotonic() - started:.0f} s"

    return Screen(progress)


def _served(request: _Request, model: "LoadedModel") -> "ServedModel":
    from fp8kv_jax.serving.http.config import ServedModel
    from models.loading import default_model_path

    path = request.model or default_model_path()
    assert path is not None
    tokenizer = model.tokenizer
    has_template = tokenizer.chat_template is not None
    return ServedModel(
        name=request.served_model_name or path.resolve().name.removesuffix(".gguf"),
        vocab_size=model.config.vocab_size,
        encode=tokenizer.encode,
        token_bytes=tokenizer.token_bytes,
        render_chat=tokenizer.apply_chat_template if has_template else None,
    )


def _make_engine(
    request: _Request,
    model: "LoadedModel",
    dtype: options.ComputeDtype,
    scales: StaticScales | None,
    placement: Placement | None,
) -> "Engine":
    from fp8kv_jax.serving import Engine

    config = model.config
    calibration, wide_layers = request.calibration, request.high_precision_layers
    if scales is not None:
        changes = follow_scales(
            scales, calibration, wide_layers, request.fp8_kv_uncovered_layers
        )
        calibration = changes["calibration"]
        wide_layers = changes["high_precision_layers"]
    max_seq_len = request.max_model_len or min(config.max_context, _LONGEST_BY_DEFAULT)
    if max_seq_len > config.max_context:
        raise UserError(
            f"Expected --max-model-len of at most {config.max_context}, the model's "
            f"context, got {max_seq_len}."
        )
    wide = "float32" if dtype == "float32" else "bf16"
    asked = request.kv_cache_dtype
    cache = CacheConfig(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_pages=request.num_pages or 1,
        page_size=request.page_size,
        dtype=wide if asked == "auto" else asked.value,
        high_precision_layers=wide_layers,
        high_precision_dtype=wide,
    )
    if request.num_pages is None:
        cache = replace(
            cache, num_pages=_num_pages_that_fit(cache, max_seq_len, placement)
        )
    return Engine(
        model.forward,
        model.params,
        cache,
        calibration,
        _engine_config(request, max_seq_len),
        scales=scales.scale_set if scales else None,
        eos_ids=model.tokenizer.eos_ids,
        detokenizer=model.tokenizer.stream_decoder,
        placement=placement,
    )


def _engine_config(request: _Request, max_seq_len: int) -> "EngineConfig":
    from fp8kv_jax.serving import EngineConfig

    num_seqs, chunk, budget = _NUM_SEQS, _CHUNK, _MAX_TOKENS_PER_STEP
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu:
        num_seqs, chunk, budget = _NUM_SEQS_ON_CPU, _CHUNK_ON_CPU, 0
    if request.max_num_seqs is not None:
        num_seqs = request.max_num_seqs
    chunk = min(chunk, max_seq_len)
    return EngineConfig(
        max_num_seqs=num_seqs,
        max_seq_len=max_seq_len,
        max_tokens_per_step=request.max_num_batched_tokens
        or max(budget, num_seqs + chunk),
        chunk=chunk,
        quick_start=on_cpu,
        compilation_cache=request.compilation_cache,
    )


def _num_pages_that_fit(
    cache: CacheConfig, max_seq_len: int, placement: Placement | None
) -> int:
    """Pages for what a device has left; on a CPU, for a few full sequences."""
    per_sequence = -(-max_seq_len // cache.page_size)
    memory = jax.devices()[0].memory_stats()
    if not memory or "bytes_limit" not in memory:
        return _FULL_SEQUENCES_ON_CPU * per_sequence
    room = _POOL_SHARE * (memory["bytes_limit"] - memory["bytes_in_use"])
    sharers = 1 if placement is None else placement.num_kv_splits
    return max(1, int(sharers * room // (cache.bytes_per_token * cache.page_size)))


def _identity(
    request: _Request, model: "LoadedModel", scales: StaticScales | None
) -> Mapping[str, Any]:
    """What a snapshot must agree with: model, scales, and how scales are found."""
    named: dict[str, Any] = asdict(identify(model))
    named["scales"] = scales.artifact_id if scales else None
    named["headroom"] = request.fp8_kv_headroom
    return named
