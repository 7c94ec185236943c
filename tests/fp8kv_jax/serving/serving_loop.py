"""Engines over the tiny model; one of them with the oracle of its pools beside it."""

import jax
import numpy as np
import tiny_model
from oracle import SlotOracle

import fp8kv_jax as fp8kv
from fp8kv_jax.scales.tensors import scale_set_from_dict
from fp8kv_jax.serving import Engine, EngineConfig, Request, SamplingParams

PAGE_SIZE = 8
SIZES = {
    "max_num_seqs": 8,
    "max_seq_len": 64,
    "max_tokens_per_step": 24,
    "chunk": 8,
    "decode_buckets": (8,),
    "prefill_buckets": (3,),
}
# Compiled steps by what they depend on: engines of one kind share them.
_compiled: dict = {}


def forward(*args, **options):
    """The tiny model without its rows."""
    (logits, _), carry = tiny_model.forward(*args, **options)
    return logits, carry


def make_engine(
    *,
    num_pages=24,
    dtype="fp8",
    window=60,
    granularity="tensor",
    forward=forward,
    params=None,
    scales=None,
    eos_ids=(),
    detokenizer=None,
    placement=None,
    **sizes,
) -> Engine:
    config = EngineConfig(**(SIZES | sizes))
    params = tiny_model.init_params() if params is None else params
    if placement is not None:
        params = placement.put_replicated(params)
    engine = Engine(
        forward,
        params,
        tiny_model.cache_config(num_pages=num_pages, page_size=PAGE_SIZE, dtype=dtype),
        fp8kv.CalibrationConfig(window_tokens=window, granularity=granularity),
        config,
        scales=scales,
        eos_ids=eos_ids,
        detokenizer=detokenizer,
        placement=placement,
    )
    layout = engine.runner.layout
    kind = forward, num_pages, dtype, window, granularity, scales, tuple(layout.shapes)
    kind = *kind, layout.chunk, layout.pages_per_seq, placement
    steps = _compiled.setdefault(kind, {})
    engine.runner._steps = steps
    engine.runner._choices = _compiled.setdefault(("choices", placement), {})
    return engine


def run_all(engine, limit=10_000):
    """Steps until nothing is left; returns token ids and outputs by continuation."""
    ids, outputs = {}, {}
    for _ in range(limit):
        if not engine.has_work:
            return ids, outputs
        for output in engine.step():
            key = output.request_id, output.index
            ids.setdefault(key, []).extend(output.token_ids)
            outputs.setdefault(key, []).append(output)
    raise AssertionError(f"not done after {limit} steps: {engine.stats()}")


def ask(engine, prompt, **params):
    params = SamplingParams(**({"max_tokens": 8, "ignore_eos": True} | params))
    return engine.add(Request(prompt=prompt, params=params))


def prompt_of(length, seed=0):
    """Tokens without the planted ones."""
    rng = np.random.default_rng(seed)
    return rng.integers(3, tiny_model.VOCAB, length).tolist()


def engine_with_scales(num_cached=0):
    """An engine that was given its scales, with some pages in its index: runs nothing."""
    scales = {
        f"layers.{layer}.{which}_scale": 0.5
        for layer in range(tiny_model.NUM_LAYERS)
        for which in "kv"
    }
    scales = scale_set_from_dict(scales, granularity="tensor")
    engine = make_engine(scales=scales)
    pages = [engine.pool.take() for _ in range(num_cached)]
    for page in pages:
        engine.pool.publish(page, bytes([page]) * 32)
        engine.pool.release(page)
    return engine


class WatchedEngine:
    """An engine whose every write goes to an oracle as well.

    Attributes:
      engine: the engine; step it through `step`.
      oracle: the BF16 row that each slot was last given.
    """

    def __init__(self, **options):
        self.engine = make_engine(
            forward=tiny_model.forward,
            params=tiny_model.init_params(planted=True),
            **options,
        )
        runner = self.runner = self.engine.runner
        self.oracle = self._empty_oracle()
        self._saved = []
        self._run, self._copy = runner.run, runner.copy_pages
        self._save, self._load = runner.save_page, runner.load_page
        self._reset = runner.reset
        for name in ("run", "copy_pages", "save_page", "load_page", "reset"):
            setattr(runner, name, getattr(self, name))

    def _empty_oracle(self):
        config = self.engine.cache_config
        return SlotOracle(
            config.num_layers, config.num_slots, config.num_kv_heads, config.head_dim
        )

    def run(self, plan, shape):
        was_frozen = self.runner.frozen
        batch = self.runner.layout.batch(plan, shape)
        logits, rows = self._run(plan, shape)
        slots = [part.slot_mapping.reshape(-1) for part in batch.parts]
        rows = np.asarray(jax.device_get(rows))[:, :, 0]
        self.oracle.append(np.concatenate(slots), rows, observe=not was_frozen)
        return logits

    def copy_pages(self, copies):
        self._copy(copies)
        self.oracle.copy_pages(np.array(copies).reshape(-1, 2), PAGE_SIZE)

    def save_page(self, page):
        saved = self._save(page)
        rows = self.oracle.rows[:, :, self._slots(page)].copy()
        kept = [id(page) for _, page in self.engine.host_pages._pages.values()]
        self._saved = [pair for pair in self._saved if id(pair[0]) in kept]
        self._saved.append((saved, rows))
        return saved

    def load_page(self, page, saved):
        self._load(page, saved)
        rows = next(rows for known, rows in self._saved if known is saved)
        self.oracle.rows[:, :, self._slots(page)] = rows
        self.oracle.written[self._slots(page)] = True

    def reset(self, params):
        self._reset(params)
        self.oracle = self._empty_oracle()

    def _slots(self, page):
        return slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)

    @property
    def differing_bytes(self):
        return self.oracle.differing_bytes(self.runner.cache, self.runner.calibration)
