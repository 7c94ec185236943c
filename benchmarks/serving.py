"""Serving a Llama-3.1-8B-shaped model with random weights: throughput and latency.

    python -m benchmarks.serving             # on a GPU
    python -m benchmarks.serving --small     # a tiny model, anywhere
    python -m benchmarks.serving --pattern 256 64,320 64 --pool-gib 5 --given-scales

A pattern is a number of requests at a time, lengths of prompts, new tokens, and how many
requests. Prompts and arrivals come from a seed, so that each cache serves the same ones:
gaps are exponential (Poisson arrivals at twice the concurrency a second), and a request
waits outside while as many as the concurrency are in the engine. TTFT runs from the
entry into the engine to the first token, TPOT is the mean time of the tokens after it.
Times are wall time of the process.

Both caches are there at the same time, with half of the memory left for each. A pattern
with a `limit` sees a smaller pool of so many bytes: the other pages are taken.
"""

import argparse
import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp8kv_jax.cache import CacheConfig
from fp8kv_jax.calibration import CalibrationConfig
from fp8kv_jax.scales.scale_set import ScaleSet
from fp8kv_jax.scales.tensors import scale_set_from_dict
from fp8kv_jax.serving import Engine, EngineConfig, Request, SamplingParams
from models.config import ModelConfig
from models.rope import Llama3Scaling, Rope
from models.transformer import bind_forward, random_model


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """Requests that arrive, and how much of the pool they may use."""

    concurrency: int
    prompt_lens: tuple[int, int]
    num_new: int
    num_requests: int
    # Bytes; None for the whole pool.
    limit: int | None = None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is served, and to whom."""

    model: ModelConfig
    engine: EngineConfig
    dtype: Any
    page_size: int
    patterns: tuple[Pattern, ...]
    window: int
    # Bytes of the pool; None for the memory that is left.
    pool_bytes: int | None = None


def _llama(
    num_layers: int, hidden: int, heads: tuple[int, int], **sizes
) -> ModelConfig:
    scaling = Llama3Scaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_context=8192,
    )
    rope = Rope(base=5e5, scaling=scaling)
    head_dim = sizes.pop("head_dim", 128)
    return ModelConfig(
        architecture="llama",
        num_layers=num_layers,
        hidden_size=hidden,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        ropes=(rope,) * num_layers,
        sliding_windows=(None,) * num_layers,
        softmax_scale=head_dim**-0.5,
        rms_norm_eps=1e-5,
        max_context=131072,
        **sizes,
    )


def full_setting(num_layers: int = 32) -> Setting:
    return Setting(
        model=_llama(
            num_layers, 4096, (32, 8), intermediate_size=14336, vocab_size=128256
        ),
        engine=EngineConfig(
            max_num_seqs=256,
            max_seq_len=4096,
            max_tokens_per_step=768,
            chunk=128,
            decode_buckets=(32, 256),
            prefill_buckets=(1, 4),
        ),
        dtype=jnp.bfloat16,
        page_size=128,
        patterns=full_patterns(),
        window=2048,
    )


def full_patterns() -> tuple[Pattern, ...]:
    """Chats for 1 to 256 users, and long prompts; what tells most comes first."""
    chats: dict[str, Any] = {"prompt_lens": (128, 1024), "num_new": 128}
    requests = {256: 256, 64: 64, 16: 32, 4: 8, 1: 2}
    many, *few = (
        Pattern(concurrency=concurrency, num_requests=num, **chats)
        for concurrency, num in requests.items()
    )
    # What an 8B model leaves of a card of 24 GB.
    small_card = replace(many, limit=5 << 30)
    long = Pattern(
        concurrency=64, prompt_lens=(2048, 3840), num_new=128, num_requests=64
    )
    return many, small_card, long, *few


def small_setting() -> Setting:
    sizes = {"intermediate_size": 64, "vocab_size": 128, "head_dim": 16}
    return Setting(
        model=_llama(2, 32, (4, 2), **sizes),
        engine=EngineConfig(
            max_num_seqs=4,
            max_seq_len=64,
            max_tokens_per_step=24,
            chunk=8,
            decode_buckets=(4,),
            prefill_buckets=(2,),
        ),
        dtype=jnp.float32,
        page_size=8,
        patterns=(
            Pattern(concurrency=1, prompt_lens=(4, 40), num_new=8, num_requests=2),
            Pattern(concurrency=4, prompt_lens=(4, 40), num_new=8, num_requests=8),
        ),
        window=40,
        pool_bytes=24 << 10,
    )


def run(setting: Setting, dtypes: Sequence[str], *, calibrates: bool) -> list[dict]:
    """Serves the same arrivals with each cache; prints and returns rows of results."""
    graphdef, params = random_model(setting.model, seed=0, dtype=setting.dtype)
    jax.block_until_ready(params)
    forward = bind_forward(graphdef)
    left = memory_left()
    pool_bytes = setting.pool_bytes
    if pool_bytes is None:
        if left is None:
            raise ValueError("Expected --pool-gib: this device has no memory limit.")
        pool_bytes = int(left / len(dtypes))
    scales = None if calibrates else given_scales(setting.model)
    engines = {
        dtype: make_engine(
            setting, forward, params, dtype, pool_bytes=pool_bytes, scales=scales
        )
        for dtype in dtypes
    }
    started = time.perf_counter()
    # Together: lowering runs in Python, compiling beside it.
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda e: e.warm_up(greedy_only=True), engines.values()))
    warm_up_s = time.perf_counter() - started
    rows = []
    for dtype, engine in engines.items():
        page_bytes = engine.cache_config.bytes_per_token * setting.page_size
        row: dict[str, Any] = {"what": "pool", "cache": dtype}
        row["tokens"] = engine.pool.num_pages * setting.page_size
        row["warm_up_s"] = round(warm_up_s, 1)
        if left is not None:
            row["tokens_in_memory_left"] = int(left // page_bytes) * setting.page_size
        show(rows, row)
    if calibrates and "fp8" in engines:
        for row in calibration_cost(setting, engines["fp8"], 500):
            show(rows, row)
    for pattern in setting.patterns:
        for dtype, engine in engines.items():
            row = {"what": "serve", "cache": dtype}
            with limited(engine, pattern.limit):
                show(rows, row | serve(setting, engine, pattern))
    for engine in engines.values():
        engine.close()
    return rows


def show(rows: list[dict], row: dict) -> None:
    rows.append(row)
    print(json.dumps(row), flush=True)


def memory_left() -> float | None:
    """Bytes that pools may take, a tenth of the memory left to the steps."""
    stats = jax.devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return 0.9 * stats["bytes_limit"] - stats["bytes_in_use"]


def given_scales(model: ModelConfig) -> ScaleSet:
    """Any scales: how fast a step is does not depend on their values."""
    ones = {
        f"layers.{layer}.{which}_scale": 0.05
        for layer in range(model.num_layers)
        for which in "kv"
    }
    return scale_set_from_dict(ones, granularity="tensor")


def make_engine(
    setting: Setting,
    forward: Any,
    params: Any,
    dtype: str,
    *,
    pool_bytes: int,
    scales: ScaleSet | None,
) -> Engine:
    model = setting.model
    sizes = {
        "num_layers": model.num_layers,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "page_size": setting.page_size,
        "dtype": dtype,
    }
    page_bytes = CacheConfig(num_pages=1, **sizes).bytes_per_token * setting.page_size
    return Engine(
        forward,
        params,
        CacheConfig(num_pages=pool_bytes // page_bytes, **sizes),
        CalibrationConfig(window_tokens=setting.window),
        setting.engine,
        scales=scales if dtype == "fp8" else None,
    )


@dataclass(kw_only=True, slots=True)
class Times:
    """When a request entered, and when its tokens came."""

    entered: float
    tokens: list[float] = field(default_factory=list)

    @property
    def to_first(self) -> float:
        return self.tokens[0] - self.entered

    @property
    def per_later(self) -> float:
        return (self.tokens[-1] - self.tokens[0]) / (len(self.tokens) - 1)


@contextlib.contextmanager
def limited(engine: Engine, limit: int | None) -> Generator[None]:
    """Holds pages, so that no more bytes of the pool than `limit` are of use."""
    held = []
    if limit is not None:
        page_bytes = engine.cache_config.bytes_per_token * engine.cache_config.page_size
        while engine.pool.num_available > limit // page_bytes:
            held.append(engine.pool.take())
    yield
    for page in held:
        engine.pool.release(page)


def serve(setting: Setting, engine: Engine, pattern: Pattern) -> dict:
    """Serves one arrival pattern to its end."""
    arrivals = make_arrivals(setting, pattern)
    times: dict[int, Times] = {}
    num_inside = most_running = 0
    before = engine.stats()
    started = time.perf_counter()
    while arrivals or engine.has_work:
        now = time.perf_counter() - started
        while arrivals and arrivals[0][0] <= now and num_inside < pattern.concurrency:
            _, request = arrivals.popleft()
            times[engine.add(request)] = Times(entered=time.perf_counter())
            num_inside += 1
        if not engine.has_work:
            time.sleep(max(0.0, arrivals[0][0] - now))
        for output in engine.step():
            times[output.request_id].tokens.append(time.perf_counter())
            num_inside -= output.finish_reason is not None
        most_running = max(most_running, engine.stats().num_running)
    seconds = time.perf_counter() - started
    after = engine.stats()
    num_output = after.num_output_tokens - before.num_output_tokens
    num_prompt = after.num_prompt_tokens - before.num_prompt_tokens
    return {
        "concurrency": pattern.concurrency,
        "prompts": pattern.prompt_lens,
        "limit_gib": pattern.limit and pattern.limit / 2**30,
        "requests": len(times),
        "most_running": most_running,
        "seconds": round(seconds, 2),
        "output_tokens_per_s": round(num_output / seconds, 1),
        "all_tokens_per_s": round((num_output + num_prompt) / seconds, 1),
        "ttft_ms": percentiles_ms([t.to_first for t in times.values()]),
        "tpot_ms": percentiles_ms([t.per_later for t in times.values()]),
        "steps": after.num_steps - before.num_steps,
        "preemptions": after.num_preemptions - before.num_preemptions,
    }


def make_arrivals(setting: Setting, pattern: Pattern) -> deque[tuple[float, Request]]:
    """(second, request) in order, from a seed."""
    rng = np.random.default_rng(pattern.concurrency)
    gaps = rng.exponential(1 / (2 * pattern.concurrency), pattern.num_requests)
    params = SamplingParams(max_tokens=pattern.num_new, ignore_eos=True)
    arrivals = deque()
    for second in np.cumsum(gaps):
        length = rng.integers(*pattern.prompt_lens)
        prompt = rng.integers(0, setting.model.vocab_size, length)
        request = Request(prompt=prompt.tolist(), params=params)
        arrivals.append((float(second), request))
    return arrivals


def calibration_cost(setting: Setting, engine: Engine, num_after: int) -> list[dict]:
    """Time between two tokens of 16 users: in the window, at the freeze, after it."""
    rng = np.random.default_rng(7)
    num_seqs = min(16, setting.engine.max_num_seqs)
    longest = setting.engine.max_seq_len - 16
    params = SamplingParams(max_tokens=longest, ignore_eos=True)
    for _ in range(num_seqs):
        prompt = rng.integers(0, setting.model.vocab_size, 8)
        engine.add(Request(prompt=prompt.tolist(), params=params))
    by_phase: dict[str, list[float]] = {}
    phase, last = "window", None
    while engine.has_work and len(by_phase.get("after", ())) < num_after:
        before = engine.stats()
        outputs = engine.step()
        after = engine.stats()
        if phase == "freeze" and outputs:
            phase = "first after"
        elif phase == "first after" and outputs:
            phase = "after"
        elif after.frozen and not before.frozen:
            phase = "freeze"
        now = time.perf_counter()
        # A step that everybody got a token from, and so did the one before.
        if len(outputs) == num_seqs and last is not None:
            by_phase.setdefault(phase, []).append(now - last)
        if outputs:
            last = now if len(outputs) == num_seqs else None
    for request_id in range(num_seqs):
        engine.abort(request_id)
    engine.step()
    rows = []
    for phase, seconds in by_phase.items():
        row = {"what": "step", "phase": phase, "steps": len(seconds)}
        rows.append(row | {"ms": percentiles_ms(seconds)})
    return rows


def percentiles_ms(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    p50, p99 = np.percentile(seconds, [50, 99])
    return {
        "p50": round(1e3 * float(p50), 2),
        "p99": round(1e3 * float(p99), 2),
        "max": round(1e3 * max(seconds), 2),
    }


def parse_pattern(words: Sequence[str]) -> Pattern:
    concurrency, num_new = int(words[0]), int(words[2])
    shortest, longest = map(int, words[1].split(","))
    return Pattern(
        concurrency=concurrency,
        prompt_lens=(shortest, longest),
        num_new=num_new,
        num_requests=2 * concurrency,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny model")
    parser.add_argument("--layers", type=int, default=32, help="fewer for a trial")
    parser.add_argument("--cache", nargs="+", default=["fp8", "bf16"])
    parser.add_argument(
        "--pattern",
        nargs=3,
        action="append",
        metavar=("CONCURRENCY", "SHORTEST,LONGEST", "NEW"),
        help="instead of the built-in ones; two requests for each at a time",
    )
    parser.add_argument("--pool-gib", type=float, help="instead of the memory left")
    parser.add_argument("--given-scales", action="store_true", help="no calibration")
    parser.add_argument("--out", help="file for the rows, as JSON")
    options = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}", flush=True)
    setting = small_setting() if options.small else full_setting(options.layers)
    changes: dict[str, Any] = {}
    if options.pattern:
        changes["patterns"] = tuple(map(parse_pattern, options.pattern))
    if options.pool_gib:
        changes["pool_bytes"] = int(options.pool_gib * 2**30)
    setting = replace(setting, **changes)
    rows = run(setting, options.cache, calibrates=not options.given_scales)
    if options.out:
        with open(options.out, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    # The pool is sized to what JAX may take: nearly all.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    main()
