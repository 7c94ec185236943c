"""P1 in the engine: pools equal one-shot quantization, whatever happens to requests."""

import gc
import os
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving_loop import WatchedEngine, ask, prompt_of

from fp8kv_jax.serving.page_pool import next_key, root_key

SIZES = {"num_pages": 20, "window": 60, "host_pages": 6}


class Traffic:
    """Random requests: shared prefixes, forks, aborts, pages short, new weights."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.watched = WatchedEngine(**SIZES)
        self.engine = self.watched.engine
        self.asked = []
        self.num_freezes = 0
        self.num_stopped = 0

    def add(self):
        length = int(self.rng.integers(1, 45))
        own = int(self.rng.integers(0, length + 1))
        shared = np.random.default_rng(self.rng.integers(3)).integers(0, 64, 64)
        prompt = [*shared[: length - own], *self.rng.integers(0, 64, own)]
        self.asked.append(
            ask(
                self.engine,
                [int(token) for token in prompt],
                max_tokens=int(self.rng.integers(1, 64 - length + 1)),
                n=int(self.rng.choice([1, 1, 1, 2, 3])),
                temperature=float(self.rng.choice([0, 20])),
                seed=int(self.rng.integers(100)),
                # Found a step late, when the pages have a row under way.
                stop_ids=frozenset({7, 23, 42} if self.rng.random() < 0.3 else ()),
            )
        )

    def abort(self):
        if self.asked:
            self.engine.abort(self.asked[int(self.rng.integers(len(self.asked)))])

    def reset(self):
        """New weights: the calibration starts over while requests go on."""
        seed = int(self.rng.integers(100))
        self.engine.reset(tiny_model.init_params(seed, planted=True))

    def step(self):
        was_frozen = self.engine.stats().frozen
        for output in self.engine.step():
            if output.finish_reason is not None and output.request_id in self.asked:
                self.asked.remove(output.request_id)
            self.num_stopped += output.finish_reason == "stop"
        self.num_freezes += self.engine.stats().frozen and not was_frozen

    def check(self):
        assert self.watched.differing_bytes == 0
        state = self.watched.runner.calibration
        assert int(state.tokens_seen) == self.watched.oracle.tokens_seen
        # The host counts along.
        runner = self.watched.runner
        counted = runner.tokens_seen, runner.frozen, runner.epoch
        assert counted == (int(state.tokens_seen), bool(state.frozen), int(state.epoch))
        amax = np.stack([state.k_amax, state.v_amax], axis=1)[..., 0]
        np.testing.assert_array_equal(amax, self.watched.oracle.amax.max(axis=-1))

    def finish(self):
        while self.engine.has_work:
            self.step()
        stats = self.engine.stats()
        assert (stats.num_used_pages, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert stats.num_free_pages == stats.num_pages


@settings(
    max_examples=int(os.environ.get("FP8KV_SCHEDULES", "8")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.lists(
        st.sampled_from(["add", "add", "step", "step", "step", "abort", "reset"]),
        min_size=5,
        max_size=40,
    ),
)
def test_pools_equal_one_shot_quantization_after_any_traffic(seed, kinds):
    traffic = Traffic(seed)
    for kind in kinds:
        getattr(traffic, kind)()
        traffic.check()
    traffic.finish()
    traffic.check()


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_soak():
    """Set FP8KV_SOAK=2000 for the long one; it prints what it did."""
    num_requests = int(os.environ.get("FP8KV_SOAK", "50"))
    seed = int(os.environ.get("FP8KV_SOAK_SEED", "1"))
    traffic = Traffic(seed)
    rng = np.random.default_rng(seed)
    started = time.perf_counter()
    sizes = []
    for index in range(num_requests):
        traffic.add()
        for _ in range(int(rng.integers(0, 9))):
            traffic.step()
        if rng.random() < 0.1:
            traffic.abort()
        if rng.random() < 0.02:
            traffic.reset()
        traffic.check()
        if index % (num_requests // 4) == num_requests // 4 - 1:
            gc.collect()
            sizes.append(resident_bytes())
    traffic.finish()
    traffic.check()
    stats = traffic.engine.stats()
    seconds = time.perf_counter() - started
    growth = (sizes[-1] - sizes[0]) / 2**20
    host = traffic.engine.host_pages
    print(
        f"\nseed {seed}, {num_requests} requests, {seconds:.0f} s, growth "
        f"{growth:.1f} MiB, {traffic.num_freezes} freezes, {host.num_loaded} pages "
        f"brought back, {host.num_refused} refused\n{stats}"
    )
    assert stats.num_preemptions > 0
    assert stats.num_page_copies > 0
    assert stats.num_cached_tokens > 0
    assert host.num_loaded > 0
    assert traffic.num_freezes > 0
    assert traffic.num_stopped > 0
    if num_requests >= 1000:
        # From the first quarter on, when all that is compiled is compiled.
        assert growth < 16


@pytest.fixture
def watched():
    return WatchedEngine(**SIZES)


def finish(watched, *, until_frozen=False):
    engine = watched.engine
    while engine.has_work and not (until_frozen and engine.stats().frozen):
        engine.step()
    assert watched.differing_bytes == 0


def freeze(watched):
    """Fills the window with a prompt of its own."""
    for seed in range(200, 210):
        if not watched.engine.stats().frozen:
            ask(watched.engine, prompt_of(30, seed), max_tokens=1)
            finish(watched)
    assert watched.engine.stats().frozen


def test_row_9_a_page_copied_inside_the_window_is_requantized_too(watched):
    ask(watched.engine, prompt_of(12), n=3, max_tokens=20, temperature=20)
    while watched.engine.stats().num_page_copies < 2:
        watched.engine.step()
    assert not watched.engine.stats().frozen
    assert watched.differing_bytes == 0
    finish(watched, until_frozen=True)
    assert watched.engine.stats().num_running == 3
    finish(watched)


def test_row_10_two_requests_share_pages_across_the_freeze(watched):
    prompt = prompt_of(30)
    ask(watched.engine, prompt, max_tokens=30)
    while watched.engine.stats().num_output_tokens == 0:
        watched.engine.step()
    ask(watched.engine, prompt, max_tokens=30)
    watched.engine.step()
    assert watched.engine.stats().num_cached_tokens == 24
    assert not watched.engine.stats().frozen
    finish(watched)
    assert watched.engine.stats().frozen


def test_a_prefix_hit_observes_nothing(watched):
    for _ in range(2):
        ask(watched.engine, prompt_of(25), max_tokens=1)
        finish(watched)
    assert watched.engine.stats().tokens_seen == 25 + 1


def test_a_prefix_of_the_window_is_found_after_the_freeze(watched):
    ask(watched.engine, prompt_of(25), max_tokens=1)
    finish(watched)
    freeze(watched)
    ask(watched.engine, prompt_of(25), max_tokens=4)
    finish(watched)
    assert watched.engine.stats().num_cached_tokens == 24


def test_row_13_new_weights_make_every_page_stale(watched):
    freeze(watched)
    ask(watched.engine, prompt_of(25), max_tokens=20)
    for _ in range(4):
        watched.engine.step()
    epoch = watched.engine.stats().epoch
    watched.engine.reset(tiny_model.init_params(5, planted=True))
    stats = watched.engine.stats()
    assert (stats.frozen, stats.tokens_seen, stats.has_window) == (False, 0, True)
    assert stats.epoch == epoch + 1
    assert (stats.num_used_pages, stats.num_cached_pages) == (0, 0)
    finish(watched)
    assert watched.engine.stats().num_cached_tokens == 0


def test_the_same_weights_can_calibrate_anew(watched):
    freeze(watched)
    ask(watched.engine, prompt_of(25), max_tokens=20)
    for _ in range(4):
        watched.engine.step()
    watched.engine.reset()
    assert not watched.engine.stats().frozen
    freeze(watched)
    assert watched.engine.stats().epoch == 3


def test_cold_pages_come_back_from_the_host(watched):
    freeze(watched)
    ask(watched.engine, prompt_of(25), max_tokens=1)
    finish(watched)
    for seed in range(300, 310):
        if watched.engine.pool.find(page_key(25)) is not None:
            ask(watched.engine, prompt_of(30, seed), max_tokens=1)
            finish(watched)
    assert page_key(25) in watched.engine.host_pages
    ask(watched.engine, prompt_of(25), max_tokens=4)
    finish(watched)
    assert watched.engine.host_pages.num_loaded >= 1
    assert watched.engine.stats().num_cached_tokens >= 8


def page_key(length):
    """Names the first page of `prompt_of(length)`."""
    return next_key(root_key(""), prompt_of(length)[:8])


def save_first_page(watched):
    """Puts a prompt's first page into host memory, and takes it out of the pool."""
    ask(watched.engine, prompt_of(25), max_tokens=1)
    finish(watched)
    key = page_key(25)
    page = watched.engine.pool.find(key)
    watched.engine.host_pages.save(page, key)
    watched.engine.pool.forget_all()
    # Kept, so that it comes back into another page, which owns nothing yet.
    assert watched.engine.pool.take() == page
    return key


def test_a_page_that_left_inside_the_window_comes_back_inside_it(watched):
    save_first_page(watched)
    ask(watched.engine, prompt_of(25), max_tokens=1)
    finish(watched)
    assert watched.engine.host_pages.num_loaded == 1
    assert watched.engine.stats().num_cached_tokens == 8
    assert not watched.engine.stats().frozen
    # The freeze rewrites it from the rows that its slots own.
    freeze(watched)


def test_row_31_a_page_that_left_inside_the_window_is_refused_after_the_freeze(watched):
    key = save_first_page(watched)
    freeze(watched)
    assert key not in watched.engine.host_pages
    ask(watched.engine, prompt_of(25), max_tokens=1)
    finish(watched)
    assert watched.engine.host_pages.num_loaded == 0
    assert watched.engine.host_pages.num_refused == 1
    assert watched.engine.stats().num_cached_tokens == 0


def test_the_oracle_sees_a_page_loaded_at_another_scale(watched):
    key = save_first_page(watched)
    freeze(watched)
    _, saved = watched.engine.host_pages._pages[key]
    watched.runner.load_page(watched.engine.pool.take(), saved)
    assert watched.differing_bytes > 0
