"""The scheduler against a pool of plain lists: whose tokens stand where."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8kv_jax.serving import SamplingParams
from fp8kv_jax.serving.page_pool import PagePool, root_key
from fp8kv_jax.serving.scheduler import Scheduler
from fp8kv_jax.serving.sequence import Sequence
from pallas_kernels.pages import check_page_copies

PAGE, CHUNK, BUDGET, MAX_SEQS, MAX_ROWS = 4, 4, 14, 6, 3


class Shelf:
    """Pages outside the pool, as lists of tokens."""

    def __init__(self, memory):
        self.memory = memory
        self.pages = {}

    def __contains__(self, key):
        return key in self.pages

    def save(self, page, key):
        if len(self.pages) == 3:
            self.pages.pop(next(iter(self.pages)))
        self.pages[key] = list(self.memory[page])

    def load(self, key, page):
        self.memory[page] = list(self.pages[key])


class Simulation:
    """Runs plans on lists of tokens, and checks them."""

    def __init__(self, *, num_pages, seed, outside=False, end_rate=0.05):
        self.end_rate = end_rate
        self.rng = np.random.default_rng(seed)
        self.memory = [[None] * PAGE for _ in range(num_pages)]
        self.shelf = Shelf(self.memory)
        self.pool = PagePool(num_pages, on_evict=self.shelf.save if outside else None)
        self.scheduler = Scheduler(
            self.pool,
            page_size=PAGE,
            max_num_seqs=MAX_SEQS,
            max_tokens_per_step=BUDGET,
            chunk=CHUNK,
            max_prefill_rows=MAX_ROWS,
            outside=self.shelf if outside else None,
        )
        self.longest = num_pages * PAGE
        self.alive = []
        self.next_id = 0

    def add(self):
        """A prompt of few distinct beginnings, with up to 3 continuations."""
        length = int(self.rng.integers(1, self.longest))
        beginning = np.random.default_rng(self.rng.integers(2)).integers(0, 9, 99)
        own = int(self.rng.integers(0, length + 1))
        tokens = [*beginning[: length - own], *self.rng.integers(0, 9, own)]
        max_len = int(self.rng.integers(length + 1, self.longest + 2))
        group = []
        for index in range(int(self.rng.integers(1, 4))):
            sequence = Sequence(
                request_id=self.next_id,
                index=index,
                params=SamplingParams(),
                seed=0,
                tokens=[int(token) for token in tokens],
                num_prompt=length,
                max_len=max_len,
                keys=[root_key("")],
                parent=group[0] if group else None,
            )
            group.append(sequence)
            self.scheduler.add(sequence)
        self.next_id += 1
        self.alive += group

    def abort(self):
        if self.alive:
            self.end(self.alive[int(self.rng.integers(len(self.alive)))])

    def forget(self):
        """What new weights bring: nothing in the pool is of use."""
        for sequence in reversed(list(self.scheduler.running)):
            self.scheduler.preempt(sequence)
        self.pool.forget_all()
        self.shelf.pages.clear()
        for page in self.memory:
            page[:] = [None] * PAGE

    def end(self, sequence):
        self.scheduler.remove(sequence)
        self.alive.remove(sequence)

    def step(self):
        plan = self.scheduler.plan()
        assert bool(self.alive) == (plan.num_tokens > 0), "nobody runs"
        self.check_plan(plan)
        for source, destination in plan.page_copies:
            self.memory[destination] = list(self.memory[source])
        sources = [source for source, _ in plan.page_copies]
        for chunk in plan.chunks():
            self.write(chunk, sources)
        ready = [chunk.sequence for chunk in plan.chunks() if chunk.is_last]
        self.scheduler.advance(plan)
        self.check_memory()
        for sequence in ready:
            sequence.tokens.append(int(self.rng.integers(0, 9)))
            if (
                len(sequence.tokens) == sequence.max_len
                or self.rng.random() < self.end_rate
            ):
                self.end(sequence)

    def check_plan(self, plan):
        lengths = [chunk.stop - chunk.start for chunk in plan.chunks()]
        assert sum(lengths) == plan.num_tokens <= BUDGET
        assert all(1 <= n <= CHUNK for n in lengths)
        assert all(chunk.stop - chunk.start == 1 for chunk in plan.decode)
        assert len(plan.prefill) <= MAX_ROWS
        assert len(self.scheduler.running) <= MAX_SEQS
        if plan.page_copies:
            copies = np.array(plan.page_copies)
            check_page_copies(copies[:, 0], copies[:, 1], self.pool.num_pages)

    def write(self, chunk, sources):
        """Writes a row's tokens into pages that are its sequence's alone.

        A page copied before this step stays held for its copy until the step is over.
        """
        sequence = chunk.sequence
        for position in range(chunk.start, chunk.stop):
            page = sequence.pages[position // PAGE]
            assert self.pool.num_holders(page) - sources.count(page) == 1
            assert page not in self.pool.published().values()
            self.memory[page][position % PAGE] = sequence.tokens[position]

    def check_memory(self):
        holders = [0] * self.pool.num_pages
        for sequence in self.scheduler.running:
            stored = [token for page in sequence.pages for token in self.memory[page]]
            num = sequence.num_computed
            assert stored[:num] == sequence.tokens[:num]
            for page in sequence.pages:
                holders[page] += 1
        pages = range(self.pool.num_pages)
        assert [self.pool.num_holders(page) for page in pages] == holders
        assert self.pool.num_used == sum(n > 0 for n in holders)
        for sequence in self.scheduler.waiting:
            assert not sequence.pages


schedules = {
    "kinds": st.lists(
        st.sampled_from(["add", "add", "step", "step", "step", "abort", "forget"]),
        max_size=60,
    ),
    "seed": st.integers(0, 2**32 - 1),
    "num_pages": st.integers(1, 12),
    "outside": st.booleans(),
}


@settings(max_examples=int(os.environ.get("FP8KV_SCHEDULES", "300")), deadline=None)
@given(**schedules)
def test_every_token_stands_where_its_sequence_reads_and_no_page_leaks(
    kinds, seed, num_pages, outside
):
    simulation = Simulation(num_pages=num_pages, seed=seed, outside=outside)
    for kind in kinds:
        getattr(simulation, kind)()
    for _ in range(10_000):
        if not simulation.alive:
            break
        simulation.step()
    assert not simulation.alive
    assert not simulation.scheduler.waiting
    assert simulation.pool.num_used == 0
    assert simulation.pool.num_available == num_pages


@pytest.fixture
def simulation():
    return Simulation(num_pages=6, seed=0, end_rate=0)


def queue(simulation, tokens, *, max_len=99, parent=None):
    sequence = Sequence(
        request_id=simulation.next_id,
        index=0,
        params=SamplingParams(),
        seed=0,
        tokens=list(tokens),
        num_prompt=len(tokens),
        max_len=max_len,
        keys=[root_key("")],
        parent=parent,
    )
    simulation.next_id += 1
    simulation.alive.append(sequence)
    simulation.scheduler.add(sequence)
    return sequence


def test_a_decoding_step_carries_chunks_of_a_prompt(simulation):
    queue(simulation, range(3))
    simulation.step()
    queue(simulation, range(10, 20))
    plan = simulation.scheduler.plan()
    assert len(plan.decode) == 1
    assert [(chunk.start, chunk.stop) for chunk in plan.prefill] == [
        (0, 4),
        (4, 8),
        (8, 10),
    ]


def test_a_prefix_of_full_pages_is_computed_once(simulation):
    queue(simulation, range(9))
    simulation.step()
    second = queue(simulation, [*range(8), 3])
    plan = simulation.scheduler.plan()
    assert second.num_cached == 8
    assert second.pages[:2] == next(iter(simulation.scheduler.running)).pages[:2]
    assert plan.num_tokens == 2


def test_a_whole_prompt_that_is_cached_still_runs_for_its_logits(simulation):
    queue(simulation, range(8))
    simulation.step()
    second = queue(simulation, range(8))
    simulation.scheduler.plan()
    assert second.num_cached == 4


def test_a_fork_copies_the_page_that_both_write_to(simulation):
    first = queue(simulation, range(6))
    second = queue(simulation, range(6), parent=first)
    simulation.step()
    assert not second.pages
    plan = simulation.scheduler.plan()
    assert plan.page_copies == [(first.pages[1], second.pages[1])]
    assert first.pages[0] == second.pages[0]
    assert second.num_cached == 5


def test_the_newest_gives_its_pages_to_the_oldest_and_comes_back(simulation):
    first = queue(simulation, range(12), max_len=21)
    simulation.step()
    second = queue(simulation, range(20, 28), max_len=12)
    while simulation.scheduler.num_preemptions == 0:
        assert len(second.tokens) < 12
        simulation.step()
    assert list(simulation.scheduler.running) == [first]
    assert list(simulation.scheduler.waiting) == [second]
    while simulation.alive:
        simulation.step()
    assert len(second.tokens) == 12


def test_the_newest_sits_out_while_there_is_nobody_to_take_from(simulation):
    first = queue(simulation, range(12))
    simulation.step()
    second = queue(simulation, range(20, 28))
    simulation.step()
    assert simulation.pool.num_available == 0
    plan = simulation.scheduler.plan()
    assert [chunk.sequence for chunk in plan.decode] == [first]
    assert second in simulation.scheduler.running
