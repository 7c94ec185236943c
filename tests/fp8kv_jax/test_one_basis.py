"""P1, one basis: after any schedule the pools equal one-shot quantization, bit for bit."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_model
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from oracle import SlotOracle

import fp8kv_jax as fp8kv

NUM_SEQS, CHUNK, NUM_COPIES = 4, 16, 2
PAGE_SIZE, NUM_PAGES, SEQ_PAGES = 8, 16, 4
NUM_SLOTS = PAGE_SIZE * NUM_PAGES
MAX_WINDOW = 300
KINDS = (
    "prefill",
    "prefill",
    "decode",
    "decode",
    "finish",
    "fork",
    "scramble",
    "warm_up",
    "release",
)


class Schedule:
    """A host loop over the real jitted steps, with an oracle beside it."""

    def __init__(self, *, seed: int, window: int, granularity: str, headroom: float):
        self.rng = np.random.default_rng(seed)
        self.params = tiny_model.init_params(planted=True)
        config = tiny_model.cache_config(num_pages=NUM_PAGES, page_size=PAGE_SIZE)
        self.cache = fp8kv.init_cache(config)
        self.calibration = fp8kv.init_calibration(
            fp8kv.CalibrationConfig(
                window_tokens=window, granularity=granularity, headroom=headroom
            ),
            config,
            max_tokens_per_step=CHUNK,
            num_window_rows=MAX_WINDOW + CHUNK,
        )
        self.window, self.headroom = window, headroom
        self.oracle = SlotOracle(
            tiny_model.NUM_LAYERS,
            NUM_SLOTS,
            tiny_model.NUM_KV_HEADS,
            tiny_model.HEAD_DIM,
        )
        self.free = list(range(NUM_PAGES))
        self.pages: list[list[int]] = [[] for _ in range(NUM_SEQS)]
        self.lens = [0] * NUM_SEQS
        self.frozen = False

    def run(self, kind: str) -> None:
        getattr(self, kind)()

    def prefill(self) -> None:
        """A chunk of one sequence, with padding after it and sometimes inside it."""
        seq = int(self.rng.integers(NUM_SEQS))
        num = int(self.rng.integers(1, CHUNK + 1))
        start = self.lens[seq]
        slots = np.full((1, CHUNK), -1, np.int32)
        grown = self.grow(seq, num)
        slots[0, : grown.size] = grown
        if self.rng.random() < 0.3:
            slots[0, self.rng.random(CHUNK) < 0.3] = -1
        self.step("prefill_step", slots, [seq], [start])

    def decode(self) -> None:
        """One token of each living sequence, the others padding."""
        slots = np.full((NUM_SEQS, 1), -1, np.int32)
        starts = list(self.lens)
        for seq in range(NUM_SEQS):
            if self.lens[seq]:
                grown = self.grow(seq, 1)
                slots[seq, : grown.size] = grown
        self.step("decode_step", slots, list(range(NUM_SEQS)), starts)

    def finish(self) -> None:
        """Frees a sequence: its pages are reused by whoever grows next."""
        seq = int(self.rng.integers(NUM_SEQS))
        self.free = self.pages[seq] + self.free
        self.pages[seq], self.lens[seq] = [], 0

    def fork(self) -> None:
        """Copies up to two pages over others, then decodes."""
        copies = np.full((NUM_COPIES, 2), -1, np.int32)
        pages = self.rng.permutation(NUM_PAGES)[: 2 * NUM_COPIES].reshape(-1, 2)
        keep = self.rng.random(NUM_COPIES) < 0.8
        copies[keep] = pages[keep]
        slots = np.full((NUM_SEQS, 1), -1, np.int32)
        used = [seq for seq in range(NUM_SEQS) if self.lens[seq]]
        if used and self.rng.random() < 0.5:
            # Overwrites a token in place, perhaps in a page copied this very step.
            slots[used[0], 0] = self.pages[used[0]][0] * PAGE_SIZE
        self.step("decode_step", slots, list(range(NUM_SEQS)), self.lens, copies)

    def scramble(self) -> None:
        """Any slots in any order: duplicates, padding, and slots past the pool."""
        slots = self.rng.integers(-2, NUM_SLOTS + 3, (1, CHUNK)).astype(np.int32)
        slots[0, 5] = slots[0, 3] = slots[0, 2]
        self.step("prefill_step", slots, [0], [0])

    def warm_up(self) -> None:
        slots = np.full((1, CHUNK), -1, np.int32)
        self.step("prefill_step", slots, [0], [0])

    def release(self) -> None:
        """Goes on with the staging-free step, once frozen."""
        if self.frozen and self.calibration.staged is not None:
            self.calibration = fp8kv.release_window(self.calibration)

    def grow(self, seq: int, num: int) -> np.ndarray:
        """Slots of the next tokens, as many as pages and table allow."""
        num = min(num, SEQ_PAGES * PAGE_SIZE - self.lens[seq])
        while len(self.pages[seq]) * PAGE_SIZE < self.lens[seq] + num and self.free:
            self.pages[seq].append(self.free.pop(0))
        num = min(num, len(self.pages[seq]) * PAGE_SIZE - self.lens[seq])
        positions = np.arange(self.lens[seq], self.lens[seq] + num)
        self.lens[seq] += num
        pages = np.array(self.pages[seq] + [0], np.int32)
        return pages[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def step(self, name, slots, seqs, starts, copies=None) -> None:
        copies = np.full((NUM_COPIES, 2), -1) if copies is None else copies
        table = np.zeros((len(seqs), SEQ_PAGES), np.int32)
        for i, seq in enumerate(seqs):
            table[i, : len(self.pages[seq])] = self.pages[seq]
        token_ids = self.rng.integers(0, tiny_model.VOCAB, slots.shape)
        batch = fp8kv.Batch(
            token_ids=jnp.asarray(token_ids, jnp.int32),
            slot_mapping=jnp.asarray(slots, jnp.int32),
            query_starts=jnp.asarray(starts, jnp.int32),
            seq_lens=jnp.asarray([self.lens[seq] for seq in seqs], jnp.int32),
            block_table=jnp.asarray(table),
            page_copies=jnp.asarray(copies, jnp.int32),
        )
        step = getattr(tiny_model.jitted_steps(), name)
        (_, rows), self.cache, self.calibration = step(
            self.params, self.cache, self.calibration, batch
        )
        rows = np.asarray(jax.tree.map(jnp.asarray, rows)).reshape(
            tiny_model.NUM_LAYERS, 2, slots.size, tiny_model.NUM_KV_HEADS, -1
        )
        self.oracle.copy_pages(copies, PAGE_SIZE)
        self.oracle.append(slots.reshape(-1), rows, observe=not self.frozen)
        self.check()

    def check(self) -> None:
        state, oracle = self.calibration, self.oracle
        assert oracle.differing_bytes(self.cache, state) == 0
        self.frozen = oracle.tokens_seen >= self.window
        assert bool(state.frozen) == self.frozen
        assert int(state.tokens_seen) == oracle.tokens_seen
        amax = np.stack([state.k_amax, state.v_amax], axis=1)
        groups = amax.shape[-1]
        want = oracle.amax.reshape(*amax.shape, -1).max(axis=-1)
        np.testing.assert_array_equal(amax, want)
        if not self.frozen:
            return
        scales = np.stack([state.k_scale, state.v_scale], axis=1)
        factor = np.float32(max(self.headroom, 1.0) / 448)
        expected = np.where(want > 0, want * factor, np.float32(2.0))
        np.testing.assert_array_equal(scales, expected)
        assert groups in (1, tiny_model.NUM_KV_HEADS)


schedules = {
    "kinds": st.lists(st.sampled_from(KINDS), min_size=1, max_size=30),
    "seed": st.integers(0, 2**32 - 1),
    "window": st.one_of(st.integers(1, 60), st.integers(1, MAX_WINDOW)),
    "granularity": st.sampled_from(["tensor", "head"]),
    "headroom": st.sampled_from([1.0, 2.0, 1.5]),
}


@settings(
    max_examples=int(os.environ.get("FP8KV_SCHEDULES", "120")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(**schedules)
@example(
    kinds=["prefill"] * 2 + ["fork"] * 2 + ["decode"] * 3 + ["release", "scramble"],
    seed=3,
    window=20,
    granularity="head",
    headroom=1.0,
)
def test_pools_equal_one_shot_quantization_after_any_schedule(
    kinds, seed, window, granularity, headroom
):
    schedule = Schedule(
        seed=seed, window=window, granularity=granularity, headroom=headroom
    )
    for kind in kinds:
        schedule.run(kind)


@pytest.mark.parametrize("mistake", ["scale off by two", "swapped K and V", "zeros"])
def test_the_oracle_rejects(mistake):
    schedule = Schedule(seed=0, window=8, granularity="tensor", headroom=2.0)
    schedule.run("prefill")
    schedule.run("prefill")
    cache, state = schedule.cache, schedule.calibration
    if mistake == "scale off by two":
        state = jax.tree.map(lambda x: x, state)
        object.__setattr__(state, "k_inv_scale", 2 * state.k_inv_scale)
    elif mistake == "swapped K and V":
        swap = lambda pages: tuple(x.transpose(0, 1, 3, 2) for x in pages)  # noqa: E731
        cache = fp8kv.PagedKVCache(
            k_pages=swap(cache.v_pages), v_pages=swap(cache.k_pages)
        )
    else:
        cache = jax.tree.map(jnp.zeros_like, cache)
    assert schedule.oracle.differing_bytes(cache, state) > 0


def test_windows_and_kinds_of_batches_share_two_compilations():
    steps = tiny_model.jitted_steps()
    before = steps.prefill_step._cache_size(), steps.decode_step._cache_size()
    for granularity in ("tensor", "head"):
        for window in (3, 40):
            schedule = Schedule(
                seed=1, window=window, granularity=granularity, headroom=2.0
            )
            for kind in ("prefill", "decode", "fork", "scramble", "warm_up"):
                schedule.run(kind)
    # One for each granularity, whose states have other shapes; none if another test
    # has compiled them already.
    assert steps.prefill_step._cache_size() - before[0] <= 2
    assert steps.decode_step._cache_size() - before[1] <= 2
