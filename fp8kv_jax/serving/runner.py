"""The device's side of an engine: pools, scales, and the compiled steps over them."""

import functools
import hashlib
import os
import secrets
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from fp8kv_jax.attention import apply_page_copies
from fp8kv_jax.cache import PagedKVCache
from fp8kv_jax.calibration import CalibrationState, release_window, reset
from fp8kv_jax.decode import Forward, make_steps
from fp8kv_jax.serving.choosing import Choice, Chosen, Rows, choose
from fp8kv_jax.serving.layout import Layout, Shape
from fp8kv_jax.serving.scheduler import Plan
from pallas_kernels.dispatch import Implementation

# Pages that one call copies; a plan with more takes several calls.
_COPIES_PER_CALL = 8

_GREEDY = Choice()
_OTHER_CHOICES = (
    Choice(draws=True),
    Choice(draws=True, nucleus=True),
    Choice(logprobs=True),
    Choice(draws=True, logprobs=True),
    Choice(draws=True, nucleus=True, logprobs=True),
)


class SavedPage(NamedTuple):
    """A page outside the pool: its bytes, by layer, and who owned its slots."""

    k: tuple[Array | np.ndarray, ...]
    v: tuple[Array | np.ndarray, ...]
    slot_owner: Array | np.ndarray | None


class Runner:
    """Holds what the steps donate, and runs them.

    Args:
      forward: the model; see `fp8kv_jax.decode.Forward`.
      params: its parameters.
      cache: the pools, given up.
      calibration: scales and window, given up.
      layout: the shapes of steps.
      implementation: which kernels to use; None for the best that works.

    Attributes:
      cache, calibration: as of the newest step.
      tokens_seen, frozen, epoch: the calibration's, as the host knows them.
      basis: names the scales that the pool's pages are at. Inside the window a name
        of its own, since what leaves then is at a provisional scale.
    """

    def __init__(
        self,
        forward: Forward,
        params: Any,
        cache: PagedKVCache,
        calibration: CalibrationState,
        layout: Layout,
        *,
        implementation: Implementation | None = None,
    ) -> None:
        self.params = params
        self.cache = cache
        self.calibration = calibration
        self.layout = layout
        self._note_calibration()
        step = make_steps(forward, implementation=implementation).prefill_step
        self._step = jax.jit(step, donate_argnums=(1, 2))
        copy = functools.partial(apply_page_copies, implementation=implementation)
        self._copy = jax.jit(copy, donate_argnums=(0, 1))
        self._steps: dict[tuple[Shape, bool], Future] = {}
        self._choices: dict[tuple[int, Choice], Future] = {}
        self._threads = ThreadPoolExecutor(max_workers=os.cpu_count())

    @property
    def has_window(self) -> bool:
        return self.calibration.staged is not None

    def warm_up(self, *, greedy_only: bool = False) -> None:
        """Compiles what is needed now, starts on what will be, runs all on nothing."""
        shapes = self.layout.shapes
        with_window = [self._lower(shape) for shape in shapes]
        self._submit(with_window)
        without = []
        if self.has_window:
            without = [self._lower(shape, window=False) for shape in shapes]
        logits = [self.run(Plan(), shape) for shape in shapes]
        by_size = {x.shape[0]: x for x in logits}
        greedy = [self._chooser(x, _GREEDY) for x in by_size.values()]
        for future in greedy:
            future.result()
        nothing = jnp.full((_COPIES_PER_CALL, 2), -1, jnp.int32)
        self.cache, self.calibration = self._copy(self.cache, self.calibration, nothing)
        self._submit(without)
        for choice in () if greedy_only else _OTHER_CHOICES:
            for x in by_size.values():
                self._chooser(x, choice)
        jax.block_until_ready(self.cache)

    def close(self) -> None:
        """Stops compiling what has not been needed yet."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def run(self, plan: Plan, shape: Shape) -> jax.Array:
        """Runs a step; returns its logits, decoding rows first, without waiting."""
        batch = self.layout.batch(plan, shape)
        key = shape, self.has_window
        if key not in self._steps:
            self._submit([self._lower(shape)])
        logits, self.cache, self.calibration = self._steps[key].result()(
            self.params, self.cache, self.calibration, batch
        )
        return logits

    def copy_pages(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copies (source, destination) pages, before the step that writes there."""
        copies = np.asarray(list(copies), np.int32).reshape(-1, 2)
        for start in range(0, len(copies), _COPIES_PER_CALL):
            some = np.full((_COPIES_PER_CALL, 2), -1, np.int32)
            part = copies[start : start + _COPIES_PER_CALL]
            some[: len(part)] = part
            self.cache, self.calibration = self._copy(
                self.cache, self.calibration, some
            )

    def choose(self, logits: jax.Array, rows: Rows, choice: Choice) -> Chosen:
        """Chooses tokens and waits for them, and for the progress of the window."""
        chosen = self._chooser(logits, choice).result()(logits, rows)
        if self.frozen:
            return jax.device_get(chosen)
        progress = self.calibration.tokens_seen, self.calibration.frozen
        chosen, (tokens_seen, frozen) = jax.device_get((chosen, progress))
        self.tokens_seen = int(tokens_seen)
        if frozen:
            self._note_calibration()
        return chosen

    def release_if_ready(self) -> None:
        """Frees the window once it is done with and the steps without it are there."""
        if not (self.frozen and self.has_window):
            return
        without = [step for (_, window), step in self._steps.items() if not window]
        if all(step.done() for step in without):
            self.calibration = release_window(self.calibration)

    def reset(self, params: Any | None) -> None:
        """Takes new weights, empties the pools and calibrates anew."""
        self.params = self.params if params is None else params
        self.cache, self.calibration = _reset(self.cache, self.calibration)
        self._note_calibration()

    def replace_state(self, cache: PagedKVCache, calibration: CalibrationState) -> None:
        """Goes on with pools and scales from elsewhere."""
        self.cache, self.calibration = cache, calibration
        self._note_calibration()

    def save_page(self, page: int) -> SavedPage:
        """Reads a page to the host."""
        return jax.device_get(_read_page(self.cache, self.calibration, np.int32(page)))

    def load_page(self, page: int, saved: SavedPage) -> None:
        """Writes a page that was saved at the basis of now."""
        self.cache, self.calibration = _write_page(
            self.cache, self.calibration, np.int32(page), saved
        )

    def _note_calibration(self) -> None:
        """Reads phase and scales from the device."""
        state = self.calibration
        scales = state.k_scale, state.v_scale, state.k_inv_scale, state.v_inv_scale
        progress = state.tokens_seen, state.frozen, state.epoch
        scales, (tokens_seen, frozen, epoch) = jax.device_get((scales, progress))
        self.tokens_seen, self.frozen = int(tokens_seen), bool(frozen)
        self.epoch = int(epoch)
        digest = hashlib.sha256(str(self.epoch).encode())
        for array in scales if self.frozen else ():
            digest.update(np.ascontiguousarray(array).tobytes())
        self.basis = digest.digest() if self.frozen else secrets.token_bytes(32)

    def _lower(
        self, shape: Shape, *, window: bool = True
    ) -> tuple[tuple[Shape, bool], jax.stages.Lowered]:
        state = self.calibration if window else replace(self.calibration, staged=None)
        batch = self.layout.batch(Plan(), shape)
        key = shape, state.staged is not None
        return key, self._step.lower(self.params, self.cache, state, batch)

    def _submit(
        self, lowered: Iterable[tuple[tuple[Shape, bool], jax.stages.Lowered]]
    ) -> None:
        """Compiles in threads: much of a compilation runs on one core."""
        for key, step in lowered:
            if key not in self._steps:
                self._steps[key] = self._threads.submit(step.compile)

    def _chooser(self, logits: jax.Array, choice: Choice) -> Future:
        num_rows = logits.shape[0]
        key = num_rows, choice
        if key not in self._choices:
            lowered = choose.lower(logits, blank_rows(num_rows), choice=choice)
            self._choices[key] = self._threads.submit(lowered.compile)
        return self._choices[key]


def blank_rows(num_rows: int) -> Rows:
    """Settings of rows that choose nothing."""
    return Rows(
        seeds=np.zeros(num_rows, np.uint32),
        indices=np.zeros(num_rows, np.int32),
        positions=np.zeros(num_rows, np.int32),
        temperatures=np.zeros(num_rows, np.float32),
        top_ps=np.ones(num_rows, np.float32),
    )


_reset = jax.jit(reset, donate_argnums=(0, 1))


@jax.jit
def _read_page(
    cache: PagedKVCache, calibration: CalibrationState, page: Int32[Array, ""]
) -> SavedPage:
    def read(pages: Array) -> Array:
        return jax.lax.dynamic_index_in_dim(pages, page, keepdims=False)

    owner = None
    if calibration.staged is not None:
        owner = read(calibration.staged.slot_owner.reshape(-1, cache.page_size))
    return SavedPage(
        k=tuple(map(read, cache.k_pages)),
        v=tuple(map(read, cache.v_pages)),
        slot_owner=owner,
    )


@functools.partial(jax.jit, donate_argnums=(0, 1))
def _write_page(
    cache: PagedKVCache,
    calibration: CalibrationState,
    page: Int32[Array, ""],
    saved: SavedPage,
) -> tuple[PagedKVCache, CalibrationState]:
    def write(pages: Array, new: Array | np.ndarray) -> Array:
        return jax.lax.dynamic_update_index_in_dim(pages, new, page, axis=0)

    # Rows of the window are never recycled: an owner still means what it meant, and
    # the freeze finds the page again.
    staged = calibration.staged
    if staged is not None:
        owners = staged.slot_owner.reshape(-1, cache.page_size)
        owner = saved.slot_owner
        if owner is None:
            owner = jnp.full((cache.page_size,), -1, jnp.int32)
        owners = write(owners, owner).reshape(-1)
        staged = replace(staged, slot_owner=owners)
    cache = PagedKVCache(
        k_pages=tuple(map(write, cache.k_pages, saved.k)),
        v_pages=tuple(map(write, cache.v_pages, saved.v)),
    )
    return cache, replace(calibration, staged=staged)
