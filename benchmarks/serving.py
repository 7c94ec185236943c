"""Serving a Llama-3.1-8B-shaped model with random weights: throughput and latency.

    python -m benchmarks.serving --out rows.json   # on a GPU: some 200 s
    python -m benchmarks.serving --small           # a tiny model, anywhere
    python -m benchmarks.serving --pattern 256 64,320 64 --pool-gib 5

A pattern is a number of requests at a time, lengths of prompts, new tokens, and how many
requests. Prompts and arrivals come from a seed, so that each cache serves the same ones:
gaps are exponential (Poisson arrivals at twice the concurrency a second), and a request
waits outside while as many as the concurrency are in the engine. TTFT runs from the
entry into the engine to the first token, TPOT is the mean time of the tokens after it.
Times are wall time of the process.

Both caches are there at the same time, with half of the memory left for each. A pattern
with a `limit` sees a smaller pool of so many bytes: the other pages are taken. What
calibration costs is measured in an engine of its own; the others have scales.
"""

import argparse
import contextlib
import datetime
import functools
import json
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.llama_step import llama_config, random_params
from fp8kv_jax.cache import CacheConfig
from fp8kv_jax.calibration import CalibrationConfig
from fp8kv_jax.scales.scale_set import ScaleSet
from fp8kv_jax.scales.tensors import scale_set_from_dict
from fp8kv_jax.serving import Engine, EngineConfig, Request, SamplingParams
from fp8kv_jax.serving.page_pool import PrefixKey, next_key, root_key
from models.config import ModelConfig

# Of the users who meet the calibration, far more than their steps need.
_TOKENS_EACH = 1024
# After the freeze: by then the engine goes on without a window.
_STEPS_TO_SETTLE = 4


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
    page_size: int
    patterns: tuple[Pattern, ...]
    window: int
    num_calibrating: int
    # Tokens of each request that decodes over a full pool, whole pages; new ones.
    full: tuple[int, int]
    # Bytes of each pool; None for half of the memory that is left.
    pool_bytes: int | None = None


def full_setting() -> Setting:
    return Setting(
        model=llama_config(),
        engine=EngineConfig(
            max_num_seqs=256,
            max_seq_len=4096,
            max_tokens_per_step=768,
            chunk=128,
            decode_buckets=(32, 128, 256),
            prefill_buckets=(1, 4),
        ),
        page_size=128,
        patterns=full_patterns(),
        window=2048,
        num_calibrating=16,
        full=(3072, 128),
    )


def full_patterns() -> tuple[Pattern, ...]:
    """Chats for 1 to 256 users, and long prompts; what tells most comes first."""
    chats: dict[str, Any] = {"prompt_lens": (128, 1024), "num_new": 128}
    requests = {256: 256, 64: 64, 16: 32, 1: 2, 4: 8}
    many, *few = (
        Pattern(concurrency=concurrency, num_requests=num, **chats)
        for concurrency, num in requests.items()
    )
    # What an 8B model leaves of a card of 24 GB.
    small_card = replace(many, limit=5 << 30)
    long = Pattern(
        concurrency=64, prompt_lens=(2048, 3840), num_new=128, num_requests=64
    )
    return many, small_card, *few, long


def small_setting() -> Setting:
    sizes = {"num_q_heads": 4, "num_kv_heads": 2, "vocab_size": 128}
    return Setting(
        model=llama_config(num_layers=2, hidden_size=32, intermediate_size=64, **sizes),
        engine=EngineConfig(
            max_num_seqs=4,
            max_seq_len=64,
            max_tokens_per_step=24,
            chunk=8,
            decode_buckets=(4,),
            prefill_buckets=(2,),
        ),
        page_size=8,
        patterns=(
            Pattern(concurrency=4, prompt_lens=(4, 40), num_new=8, num_requests=8),
            Pattern(concurrency=1, prompt_lens=(4, 40), num_new=8, num_requests=2),
        ),
        window=40,
        num_calibrating=4,
        full=(40, 8),
        # 24 pages in FP8, 12 in BF16.
        pool_bytes=24 * 8 * 1024,
    )


class Rows:
    """Results: printed and written to a file as they come."""

    def __init__(self, out: Path | None) -> None:
        self._out = out
        self._rows: list[dict[str, Any]] = []
        self._started = time.perf_counter()
        self._head = {
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        self.say(json.dumps(self._head))

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.perf_counter() - self._started

    def say(self, text: str) -> None:
        print(f"{self.seconds:5.1f} s  {text}", flush=True)

    def add(self, row: dict[str, Any]) -> None:
        self.say(json.dumps(row))
        self._rows.append(row)
        if self._out is not None:
            text = json.dumps(self._head | {"rows": self._rows}, indent=1)
            self._out.write_text(text + "\n")


def run(setting: Setting, dtypes: Sequence[str], rows: Rows, seconds: float) -> None:
    """Measures everything with each cache; begins nothing after some seconds."""
    forward, params = random_params(setting.model)
    jax.block_until_ready(params)
    rows.say("the weights are there")
    whole = memory_left()
    calibrating = make_calibrating_engine(setting, forward, params)
    pool_bytes = setting.pool_bytes
    if pool_bytes is None:
        left = memory_left()
        if left is None:
            raise SystemExit("Expected --pool-gib: this device has no memory limit.")
        pool_bytes = int(left / len(dtypes))
    engines = {
        dtype: make_engine(setting, forward, params, dtype, pool_bytes)
        for dtype in dtypes
    }
    compile_steps([calibrating, *engines.values()], rows)
    for dtype, engine in engines.items():
        row: dict[str, Any] = {"what": "pool", "cache": dtype}
        row["tokens"] = engine.cache_config.num_slots
        if whole is not None:
            row["in_all_memory"] = int(whole / engine.cache_config.bytes_per_token)
        rows.add(row)
    for row in calibration_cost(setting, calibrating, 500):
        rows.add(row)
    calibrating.close()
    measurements: list[Callable[[Engine], dict[str, Any]]] = [
        functools.partial(full_pool, setting),
        *(functools.partial(serve, setting, pattern) for pattern in setting.patterns),
    ]
    for measure in measurements:
        for dtype, engine in engines.items():
            if rows.seconds > seconds:
                rows.say("out of time: the rest is left out")
                return
            rows.add({"cache": dtype} | measure(engine))


def compile_steps(engines: Sequence[Engine], rows: Rows) -> None:
    """Warms engines up together: lowering runs in Python, compiling beside it."""
    with ThreadPoolExecutor(len(engines)) as threads:
        warm = [threads.submit(e.warm_up, greedy_only=True) for e in engines]
        while wait(warm, timeout=10).not_done:
            counts = [engine.compiled for engine in engines]
            rows.say(f"compiling: {counts}")
        for future in warm:
            future.result()


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
    setting: Setting, forward: Any, params: Any, dtype: str, pool_bytes: int
) -> Engine:
    """Makes an engine that has its scales."""
    page = cache_config(setting, dtype, num_pages=1)
    num_pages = pool_bytes // (page.bytes_per_token * page.page_size)
    return Engine(
        forward,
        params,
        replace(page, num_pages=num_pages),
        CalibrationConfig(),
        setting.engine,
        scales=given_scales(setting.model) if dtype == "fp8" else None,
    )


def make_calibrating_engine(setting: Setting, forward: Any, params: Any) -> Engine:
    """Makes an engine for a few users, with steps for as many and no more."""
    num_seqs, config = setting.num_calibrating, setting.engine
    tokens = num_seqs * min(_TOKENS_EACH, config.max_seq_len)
    return Engine(
        forward,
        params,
        cache_config(setting, "fp8", num_pages=tokens // setting.page_size),
        CalibrationConfig(window_tokens=setting.window),
        replace(config, max_num_seqs=num_seqs, decode_buckets=(num_seqs,)),
    )


def cache_config(setting: Setting, dtype: str, num_pages: int) -> CacheConfig:
    model = setting.model
    return CacheConfig(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        num_pages=num_pages,
        page_size=setting.page_size,
        dtype=dtype,
    )


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


def serve(setting: Setting, pattern: Pattern, engine: Engine) -> dict[str, Any]:
    """Serves one arrival pattern to its end, to users nothing is cached of."""
    engine.pool.forget_all()
    with limited(engine, pattern.limit):
        return _serve(make_arrivals(setting, pattern), pattern, engine)


def _serve(
    arrivals: deque[tuple[float, Request]], pattern: Pattern, engine: Engine
) -> dict[str, Any]:
    # Of each request: when it entered, and when its tokens came.
    times: dict[int, list[float]] = {}
    num_inside = most_running = 0
    before = engine.stats()
    started = time.perf_counter()
    while arrivals or engine.has_work:
        now = time.perf_counter() - started
        while arrivals and arrivals[0][0] <= now and num_inside < pattern.concurrency:
            _, request = arrivals.popleft()
            times[engine.add(request)] = [time.perf_counter()]
            num_inside += 1
        if not engine.has_work:
            time.sleep(max(0.0, arrivals[0][0] - now))
        for output in engine.step():
            times[output.request_id].append(time.perf_counter())
            num_inside -= output.finish_reason is not None
        most_running = max(most_running, engine.stats().num_running)
    seconds = time.perf_counter() - started
    after = engine.stats()
    num_output = after.num_output_tokens - before.num_output_tokens
    num_prompt = after.num_prompt_tokens - before.num_prompt_tokens
    return {
        "what": "serve",
        "concurrency": pattern.concurrency,
        "prompts": pattern.prompt_lens,
        "limit_gib": pattern.limit and pattern.limit / 2**30,
        "requests": len(times),
        "most_running": most_running,
        "seconds": round(seconds, 2),
        "output_tokens_per_s": round(num_output / seconds, 1),
        "all_tokens_per_s": round((num_output + num_prompt) / seconds, 1),
        "ttft_ms": percentiles_ms([x[1] - x[0] for x in times.values()]),
        "tpot_ms": percentiles_ms(
            [(x[-1] - x[1]) / (len(x) - 2) for x in times.values()]
        ),
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
        prompt = random_prompt(setting, rng, int(rng.integers(*pattern.prompt_lens)))
        request = Request(prompt=prompt, params=params)
        arrivals.append((float(second), request))
    return arrivals


def random_prompt(setting: Setting, rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(0, setting.model.vocab_size, length).tolist()


def full_pool(setting: Setting, engine: Engine) -> dict[str, Any]:
    """Decodes with a full pool: as many requests as fit, and none shares a page."""
    num_prompt, num_new = setting.full
    num_pages = -(-(num_prompt + num_new) // setting.page_size)
    num_seqs = min(
        setting.engine.max_num_seqs, engine.cache_config.num_pages // num_pages
    )
    # One token more than whole pages: it is left to run, for its logits.
    prompt = random_prompt(setting, np.random.default_rng(3), num_prompt + 1)
    salts = ["", *map(str, range(1, num_seqs))]
    cache_copies(engine, prompt, salts)
    params = SamplingParams(max_tokens=num_new, ignore_eos=True)
    for salt in salts:
        engine.add(Request(prompt=prompt, params=params, salt=salt))
    num_prefilled = engine.stats().num_computed_tokens
    seconds = list(times_of_steps(engine, num_seqs))
    assert engine.stats().num_computed_tokens - num_prefilled == num_seqs * num_new
    num_bytes = num_seqs * num_prompt * engine.cache_config.bytes_per_token
    return {
        "what": "full pool",
        "prompt": num_prompt,
        "new": num_new,
        "requests": num_seqs,
        "kv_gib": round(num_bytes / 2**30, 1),
        "output_tokens_per_s": round(num_seqs * len(seconds) / sum(seconds), 1),
        "tpot_ms": percentiles_ms(seconds),
    }


def cache_copies(engine: Engine, prompt: list[int], salts: Sequence[str]) -> None:
    """Computes a prompt for the first salt; the pages of the others are copies."""
    pool, page_size = engine.pool, engine.cache_config.page_size
    pool.forget_all()
    params = SamplingParams(max_tokens=1)
    engine.add(Request(prompt=prompt, params=params, salt=salts[0]))
    while engine.has_work:
        engine.step()
    index = pool.published()
    computed = [index[key] for key in page_keys(prompt, page_size, salts[0])]
    for salt in salts[1:]:
        pages = [pool.take() for _ in computed]
        engine.runner.copy_pages(zip(computed, pages, strict=True))
        for page, key in zip(pages, page_keys(prompt, page_size, salt), strict=True):
            pool.publish(page, key)
            pool.release(page)


def page_keys(prompt: list[int], page_size: int, salt: str) -> Iterator[PrefixKey]:
    key = root_key(salt)
    for end in range(page_size, len(prompt), page_size):
        key = next_key(key, prompt[end - page_size : end])
        yield key


def times_of_steps(engine: Engine, num_seqs: int) -> Iterator[float]:
    """Runs an engine; yields seconds between two tokens that everybody got."""
    last = None
    while engine.has_work:
        num_outputs = len(engine.step())
        now = time.perf_counter()
        if num_outputs == num_seqs and last is not None:
            yield now - last
        if num_outputs:
            last = now if num_outputs == num_seqs else None


def calibration_cost(
    setting: Setting, engine: Engine, num_after: int
) -> Iterator[dict[str, Any]]:
    """Time between two tokens of some users: in the window, at the freeze, after it."""
    rng = np.random.default_rng(7)
    longest = setting.engine.max_seq_len - 16
    params = SamplingParams(max_tokens=longest, ignore_eos=True)
    for _ in range(setting.num_calibrating):
        engine.add(Request(prompt=random_prompt(setting, rng, 8), params=params))
    window: list[float] = []
    since: list[float] = []
    for seconds in times_of_steps(engine, setting.num_calibrating):
        (since if engine.stats().frozen else window).append(seconds)
        if len(since) > _STEPS_TO_SETTLE + num_after:
            break
    freeze, settling, after = np.split(since, [1, 1 + _STEPS_TO_SETTLE])
    phases = {"window": window, "freeze": freeze, "settling": settling, "after": after}
    for phase, times in phases.items():
        row = {"what": "calibration", "phase": phase, "steps": len(times)}
        yield row | {"ms": percentiles_ms(times)}


def percentiles_ms(seconds: Sequence[float] | np.ndarray) -> dict[str, float]:
    if not len(seconds):
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
    parser.add_argument("--cache", nargs="+", default=["fp8", "bf16"])
    parser.add_argument(
        "--pattern",
        nargs=3,
        action="append",
        metavar=("CONCURRENCY", "SHORTEST,LONGEST", "NEW"),
        help="instead of the built-in ones; two requests for each at a time",
    )
    parser.add_argument("--pool-gib", type=float, help="instead of the memory left")
    parser.add_argument("--out", type=Path, help="file for the rows, as JSON")
    parser.add_argument(
        "--seconds", type=float, default=195, help="begin nothing after these"
    )
    options = parser.parse_args()
    setting = small_setting() if options.small else full_setting()
    changes: dict[str, Any] = {}
    if options.pattern:
        changes["patterns"] = tuple(map(parse_pattern, options.pattern))
    if options.pool_gib:
        changes["pool_bytes"] = int(options.pool_gib * 2**30)
    rows = Rows(options.out)
    run(replace(setting, **changes), options.cache, rows, options.seconds)
    rows.say("done")


if __name__ == "__main__":
    # The pool is sized to what JAX may take: nearly all.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    main()
