"""The device's side of an engine: pools, scales, and the compiled steps over them."""

import contextlib
import functools
import hashlib
import itertools
import os
import secrets
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from fp8kv_jax.attention import apply_page_copies
from fp8kv_jax.batch import MixedBatch
from fp8kv_jax.cache import PagedKVCache
from fp8kv_jax.calibration import CalibrationState, reset
from fp8kv_jax.decode import Forward, StepFunction, make_steps
from fp8kv_jax.parallel import Placement
from fp8kv_jax.serving.choosing import Choice, Chosen, Rows, choose
from fp8kv_jax.serving.layout import Layout, Shape
from fp8kv_jax.serving.scheduler import Plan
from pallas_kernels.dispatch import Implementation

# Pages that one call copies; a plan with more takes several calls.
_COPIES_PER_CALL = 8

# In percent of the memory. XLA counts a pool that is written in place once for each
# write, and would look long, and in vain, for what to recompute to make that fit.
_GPU_OPTIONS = {"xla_gpu_memory_limit_slop_factor": 10_000}

# A step's second and third call take up to 10 ms longer than those that follow, it
# seems while XLA builds a CUDA graph (H200, jax 0.11.2, 32 layers).
_WARM_UP_RUNS_ON_GPU = 3

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
      quick_start: pads to the largest shape while another compiles, and goes on with
        the window's steps after the freeze.
      implementation: which kernels to use; None for the best that works.
      placement: how heads lie on a mesh; None for one device. Parameters are there.

    Attributes:
      cache, calibration: as of the newest step.
      window_tokens: how many tokens freeze the scales.
      tokens_seen, frozen, epoch: the calibration's after the newest step. The host
        counts along, since it knows how many tokens are real: so it need not wait.
    """

    def __init__(
        self,
        forward: Forward,
        params: Any,
        cache: PagedKVCache,
        calibration: CalibrationState,
        layout: Layout,
        *,
        quick_start: bool = False,
        implementation: Implementation | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.params = params
        self._quick_start = quick_start
        self.placement = placement
        self.layout = layout
        self.replace_state(cache, calibration)
        options: Any = {"implementation": implementation, "placement": placement}
        step = make_steps(forward, **options).prefill_step
        self._step = jax.jit(_after_chosen(step), donate_argnums=(1, 2))
        # Tokens that the newest step chose, by row: the next one may begin with them.
        self._chosen = jnp.zeros((layout.max_rows,), jnp.int32)
        if placement is not None:
            self._chosen = placement.put_replicated(self._chosen)
        copy = functools.partial(_copy_pages, **options)
        self._copy = jax.jit(copy, donate_argnums=(0, 1))
        self._steps: dict[tuple[Shape, bool], Future] = {}
        self._choices: dict[tuple[int, int, Choice, jax.sharding.Sharding], Future] = {}
        self._waited_for: list[tuple[Shape, bool]] = []
        self._threads = ThreadPoolExecutor(max_workers=os.cpu_count())

    @property
    def has_window(self) -> bool:
        return self.calibration.staged is not None

    @property
    def compiled(self) -> tuple[int, int]:
        """How many of the steps that `warm_up` waits for are there, and of how many."""
        steps = [self._steps.get(key) for key in self._waited_for]
        return sum(step is not None and step.done() for step in steps), len(steps)

    def warm_up(
        self,
        *,
        greedy_only: bool = False,
        offloads: bool = False,
        background: bool = False,
    ) -> None:
        """Compiles everything in threads, and runs it on nothing.

        Args:
          greedy_only: leaves draws and log-probabilities to whoever asks first.
          offloads: compiles what moves a page out of the pool and back, too.
          background: waits for what the first greedy step needs, and for no more.
        """
        releases = self.has_window and not self._quick_start
        windows = (self.has_window,)
        if releases and not background:
            windows = (True, False)
        shapes = self.layout.shapes
        if self._quick_start and background:
            shapes = shapes[-1:]
        self._waited_for = [(s, w) for w in windows for s in shapes]
        for shape, window in self._waited_for:
            self._compiled(shape, window=window)
        logits = self._run_on_nothing(shapes, offloads=offloads)
        if releases and not background:
            with self._without_window():
                self._run_on_nothing(shapes, offloads=offloads)
        choices = (_GREEDY,) if greedy_only else (_GREEDY, *_OTHER_CHOICES)
        waited_for = choices[:1] if background else choices
        self._compile_choices(logits.values(), waited_for)
        for choice in waited_for:
            for num_rows, x in logits.items():
                self.choose(x, blank_rows(num_rows), choice)
        jax.block_until_ready((self._chosen, self.cache))
        # A request may draw at once; the window's end is some requests away.
        self._compile_choices(logits.values(), choices)
        for shape in self.layout.shapes:
            self._compiled(shape, window=self.has_window and not releases)

    def _run_on_nothing(
        self, shapes: Iterable[Shape], *, offloads: bool
    ) -> dict[int, jax.Array]:
        """Runs what changes pools and window; returns logits by their number."""
        logits = {}
        on_gpu = jax.default_backend() == "gpu"
        for _ in range(_WARM_UP_RUNS_ON_GPU if on_gpu else 1):
            logits = {sum(s): self.run(Plan(), s) for s in shapes}
        self._copy_some(np.full((_COPIES_PER_CALL, 2), -1, np.int32))
        if offloads:
            self.load_page(0, self.save_page(0))
        return logits

    @contextlib.contextmanager
    def _without_window(self) -> Generator[None]:
        """Sets the window aside, for what runs once it is released."""
        staged = self.calibration.staged
        self.calibration = replace(self.calibration, staged=None)
        yield
        self.calibration = replace(self.calibration, staged=staged)

    def close(self) -> None:
        """Stops compiling what has not been needed yet."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def shape_of(self, plan: Plan) -> Shape:
        """The shape to run a plan in; the largest while a better one compiles."""
        shape = self.layout.shape_of(plan)
        step = self._steps.get((shape, self.has_window))
        compiles = step is not None and not step.done()
        return self.layout.shapes[-1] if self._quick_start and compiles else shape

    def run(self, plan: Plan, shape: Shape) -> jax.Array:
        """Runs a step; returns its logits, decoding rows first, without waiting."""
        batch = self.layout.batch(plan, shape)
        step = self._compiled(shape, window=self.has_window).result()
        logits, self.cache, self.calibration = step(
            self.params, self.cache, self.calibration, batch, self._chosen
        )
        if not self.frozen:
            self.tokens_seen += plan.num_tokens
            if self.tokens_seen >= self.window_tokens:
                self.frozen, self._basis = True, None
                self.epoch += 1
        return logits

    def copy_pages(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copies (source, destination) pages, before the step that writes there."""
        copies = np.asarray(list(copies), np.int32).reshape(-1, 2)
        for start in range(0, len(copies), _COPIES_PER_CALL):
            some = np.full((_COPIES_PER_CALL, 2), -1, np.int32)
            part = copies[start : start + _COPIES_PER_CALL]
            some[: len(part)] = part
            self._copy_some(some)

    def _copy_some(self, copies: np.ndarray) -> None:
        self.cache, self.calibration = self._copy(self.cache, self.calibration, copies)

    def choose(self, logits: jax.Array, rows: Rows, choice: Choice) -> Chosen:
        """Chooses tokens, without waiting; the next step finds them on the device."""
        chosen = self._chooser(logits, choice).result()(logits, rows)
        # Where the steps were compiled to find it.
        self._chosen = jax.device_put(chosen.token_ids, self._chosen.sharding)
        for array in jax.tree.leaves(chosen):
            array.copy_to_host_async()
        return chosen

    def release_if_ready(self) -> None:
        """Frees the window once it is done with and the steps without it are there."""
        if not (self.frozen and self.has_window) or self._quick_start:
            return
        without = [step for (_, window), step in self._steps.items() if not window]
        if all(step.done() for step in without):
            # `release_window` would wait for the step that freezes.
            self.calibration = replace(self.calibration, staged=None)

    def reset(self, params: Any | None) -> None:
        """Takes new weights, empties the pools and calibrates anew."""
        self.params = self.params if params is None else params
        self.cache, self.calibration = _reset(
            self.cache, self.calibration, placement=self.placement
        )
        self._note_calibration()

    def replace_state(self, cache: PagedKVCache, calibration: CalibrationState) -> None:
        """Goes on with pools and scales from elsewhere, and puts them in place."""
        if self.placement is not None:
            cache, calibration = self.placement.put((cache, calibration))
        self.cache, self.calibration = cache, calibration
        self._note_calibration()

    def save_page(self, page: int) -> SavedPage:
        """Reads a page to the host."""
        return jax.device_get(_read_page(self.cache, self.calibration, np.int32(page)))

    def load_page(self, page: int, saved: SavedPage) -> None:
        """Writes a page that was saved at the basis of now."""
        self.cache, self.calibration = _write_page(
            self.cache,
            self.calibration,
            np.int32(page),
            saved,
            placement=self.placement,
        )

    @property
    def basis(self) -> bytes:
        """Names the scales that the pool's pages are at.

        Inside the window a name of its own, since what leaves then is at a provisional
        scale. Waits for the device the first time after the freeze.
        """
        if self._basis is None:
            state = self.calibration
            scales = state.k_scale, state.v_scale, state.k_inv_scale, state.v_inv_scale
            digest = hashlib.sha256(str(self.epoch).encode())
            for array in jax.device_get(scales):
                digest.update(np.ascontiguousarray(array).tobytes())
            self._basis = digest.digest()
        return self._basis

    def _note_calibration(self) -> None:
        """Reads the phase from the device."""
        state = self.calibration
        progress = state.tokens_seen, state.window, state.frozen, state.epoch
        tokens_seen, window, frozen, epoch = jax.device_get(progress)
        self.tokens_seen, self.window_tokens = int(tokens_seen), int(window)
        self.frozen, self.epoch = bool(frozen), int(epoch)
        self._basis = None if self.frozen else secrets.token_bytes(32)

    def _lower(self, shape: Shape, *, window: bool) -> jax.stages.Lowered:
        state = self.calibration if window else replace(self.calibration, staged=None)
        batch = self.layout.batch(Plan(), shape)
        return self._step.lower(self.params, self.cache, state, batch, self._chosen)

    def _compiled(self, shape: Shape, *, window: bool) -> Future:
        """A step, compiled in a thread: much of a compilation runs on one core."""
        key = shape, window
        if key not in self._steps:
            options = _GPU_OPTIONS if jax.default_backend() == "gpu" else None
            lowered = self._lower(shape, window=window)
            self._steps[key] = self._threads.submit(lowered.compile, options)
        return self._steps[key]

    def _chooser(self, logits: jax.Array, choice: Choice) -> Future:
        num_rows, width = logits.shape[0], self.layout.max_rows
        # On a mesh the words of a row may lie on several devices.
        key = num_rows, width, choice, logits.sharding
        if key not in self._choices:
            rows = blank_rows(num_rows)
            lowered = choose.lower(logits, rows, choice=choice, width=width)
            self._choices[key] = self._threads.submit(lowered.compile)
        return self._choices[key]

    def _compile_choices(
        self, logits: Iterable[jax.Array], choices: Iterable[Choice]
    ) -> None:
        for x, choice in itertools.product(logits, choices):
            self._chooser(x, choice)


def blank_rows(num_rows: int) -> Rows:
    """Settings of rows that choose nothing."""
    return Rows(
        seeds=np.zeros(num_rows, np.uint32),
        indices=np.zeros(num_rows, np.int32),
        positions=np.zeros(num_rows, np.int32),
        temperatures=np.zeros(num_rows, np.float32),
        top_ps=np.ones(num_rows, np.float32),
    )


def _after_chosen(step: StepFunction) -> Callable[..., Any]:
    """A step whose rows of one token may begin with a token chosen just before.

    Such a token is `~row` of what was chosen; see `Sequence.tokens`.
    """

    def prefill_step(params, cache, calibration, batch: MixedBatch, chosen):
        decode, *prefill = batch.parts
        ids = decode.token_ids
        ids = jnp.where(ids < 0, chosen[jnp.maximum(~ids, 0)], ids)
        parts = replace(decode, token_ids=ids), *prefill
        return step(params, cache, calibration, replace(batch, parts=parts))

    return prefill_step


type _State = tuple[PagedKVCache, CalibrationState]


def _in_place(placement: Placement | None, state: _State) -> _State:
    """Keeps what a step takes where it was compiled to take it."""
    return state if placement is None else placement.constrain(state)


@functools.partial(jax.jit, donate_argnums=(0, 1), static_argnames="placement")
def _reset(
    cache: PagedKVCache, calibration: CalibrationState, *, placement: Placement | None
) -> _State:
    return _in_place(placement, reset(cache, calibration))


def _copy_pages(
    cache: PagedKVCache,
    calibration: CalibrationState,
    copies: Int32[Array, "num_copies 2"],
    *,
    implementation: Implementation | None,
    placement: Placement | None,
) -> _State:
    state = apply_page_copies(
        cache,
        calibration,
        copies,
        implementation=implementation,
        placement=placement,
    )
    return _in_place(placement, state)


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


@functools.partial(jax.jit, donate_argnums=(0, 1), static_argnames="placement")
def _write_page(
    cache: PagedKVCache,
    calibration: CalibrationState,
    page: Int32[Array, ""],
    saved: SavedPage,
    *,
    placement: Placement | None,
) -> _State:
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
    return _in_place(placement, (cache, replace(calibration, staged=staged)))
