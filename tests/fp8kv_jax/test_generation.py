"""The generation loop over a toy model: shapes, ends, the freeze, batch composition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8kv_jax import CacheConfig, CalibrationConfig
from fp8kv_jax.generation import (
    Compiling,
    Frozen,
    GenerationConfig,
    Generator,
    Prefilled,
    Token,
    plan_chunks,
)

HEADS, HEAD_DIM, VOCAB = 2, 32, 50
NO_END = frozenset()


class Toy:
    """One attention layer between an embedding and a head; counts its traces."""

    def __init__(self, seed=0):
        keys = jax.random.split(jax.random.key(seed), 6)
        size = HEADS * HEAD_DIM
        shape = (size, HEADS, HEAD_DIM)
        self.params = {
            "embedding": jax.random.normal(keys[0], (VOCAB, size)),
            "positions": jax.random.normal(keys[1], (256, size)),
            "head": jax.random.normal(keys[2], (size, VOCAB)),
            "q": jax.random.normal(keys[3], shape) * 0.2,
            "k": jax.random.normal(keys[4], shape) * 0.2,
            "v": jax.random.normal(keys[5], shape) * 0.2,
        }
        self.num_traces = 0

    def forward(self, params, token_ids, positions, attend, carry, *, logits_at=None):
        self.num_traces += 1
        x = params["embedding"][token_ids] + params["positions"][positions]
        q, k, v = (jnp.einsum("sqd,dhk->sqhk", x, params[name]) for name in "qkv")
        out, carry = attend(carry, 0, q, k, v)
        x = x + 3 * out.reshape(x.shape)
        if logits_at is not None:
            x = x[jnp.arange(x.shape[0]), logits_at]
        return x @ params["head"], carry

    def generator(self, *, num_seqs=1, dtype="float32", window=40, **options):
        options = {"max_seq_len": 96, "prefill_chunks": (4, 16)} | options
        config = CacheConfig(
            num_layers=1,
            num_kv_heads=HEADS,
            head_dim=HEAD_DIM,
            num_pages=6 * num_seqs,
            page_size=16,
            dtype=dtype,
        )
        calibration = CalibrationConfig(window_tokens=window)
        return Generator(
            self.forward,
            self.params,
            config,
            calibration,
            num_seqs=num_seqs,
            **options,
        )


def prompt(length, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB, length).tolist()


def ids_of(events, num_seqs=1):
    ids = [[] for _ in range(num_seqs)]
    for event in events:
        if isinstance(event, Token):
            ids[event.sequence].append(event.token_id)
    return ids


def run(generator, prompts, *, eos_ids=NO_END, **options):
    config = GenerationConfig(**{"max_new_tokens": 12, **options})
    return list(generator.generate(prompts, config, eos_ids=eos_ids))


@pytest.fixture(scope="module")
def toy():
    return Toy()


@pytest.fixture(scope="module")
def plain(toy):
    """Without FP8 a generator carries nothing over from one call to the next."""
    return toy.generator()


@pytest.fixture(scope="module")
def three(toy):
    return toy.generator(num_seqs=3)


@pytest.mark.parametrize(
    ("num_tokens", "chunks"),
    [
        (1, [(1, 16)]),
        (16, [(16, 16)]),
        (17, [(17, 128)]),
        (128, [(128, 128)]),
        (270, [(128, 128), (128, 128), (14, 16)]),
    ],
)
def test_chunks_are_full_but_the_last_and_have_few_widths(num_tokens, chunks):
    assert plan_chunks(num_tokens, (16, 128)) == chunks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens to be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature to be a finite number"),
        ({"temperature": float("nan")}, "temperature to be a finite number"),
        ({"top_p": 0.0}, r"top_p to be within \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p to be within \(0, 1\], got 1.5"),
        ({"seed": -1}, "seed to be within 0..4294967295, got -1"),
    ],
)
def test_a_config_out_of_range_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        GenerationConfig(**options)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "from 1 to 1 prompts"),
        ([[1], [2]], r"from 1 to 1 prompts \(num_seqs\), got 2"),
        ([[]], "prompt 0 to have from 1 to 95 tokens .* got 0"),
        ([[1] * 96], "prompt 0 to have from 1 to 95 tokens .* got 96"),
    ],
)
def test_prompts_that_do_not_fit_are_an_error(plain, prompts, message):
    with pytest.raises(ValueError, match=message):
        plain.generate(prompts, GenerationConfig())


def test_a_sequence_ends_with_its_end_token_or_at_the_limit(plain):
    free = run(plain, [prompt(5)])
    last = [e for e in free if isinstance(e, Token)][-1]
    assert (len(ids_of(free)[0]), last.finish_reason) == (12, "length")

    ids = ids_of(free)[0]
    end = ids[6]
    stopped = run(plain, [prompt(5)], eos_ids={end})
    assert ids_of(stopped)[0] == ids[: ids.index(end) + 1]
    assert stopped[-1].finish_reason == "stop"


def test_a_sequence_ends_where_the_context_does(plain):
    events = run(plain, [prompt(90)], max_new_tokens=50)
    assert len(ids_of(events)[0]) == 6
    assert events[-1].finish_reason == "length"


def test_prompts_of_new_lengths_compile_nothing():
    toy = Toy()
    generator = toy.generator()
    events = run(generator, [prompt(21)])
    compiled = [(e.num_seqs, e.num_queries) for e in events if type(e) is Compiling]
    assert compiled == [(1, 16), (1, 1)]  # 21 = 16 + 5, and 5 takes 16 again
    traces = toy.num_traces
    for length in (5, 16, 30, 37, 64):
        assert Compiling not in {type(e) for e in run(generator, [prompt(length)])}
    assert toy.num_traces == traces


def test_the_batch_that_completes_the_window_freezes():
    # Batches of 16, 16, 5, then one token each: 40 is reached by the third of those.
    generator = Toy().generator(dtype="fp8", window=40, prefill_chunks=(16,))
    events = run(generator, [prompt(37)])
    frozen = [i for i, event in enumerate(events) if isinstance(event, Frozen)]
    assert [events[i] for i in frozen] == [
        Frozen(window_tokens=40, tokens_seen=40, num_requantized=40, num_batches=6)
    ]
    assert len(ids_of(events[: frozen[0]])[0]) == 3  # of the prefill and two decodes
    assert generator.frozen_at == 40
    assert bool(generator.calibration.frozen)


def test_a_chunk_past_the_window_is_observed_as_a_whole():
    generator = Toy().generator(dtype="fp8", window=20, prefill_chunks=(16,))
    run(generator, [prompt(37)])
    assert generator.frozen_at == 32


def test_the_window_goes_on_over_calls():
    generator = Toy().generator(dtype="fp8", window=40, prefill_chunks=(16,))
    run(generator, [prompt(16)], max_new_tokens=5)
    assert (generator.tokens_seen, generator.frozen_at) == (20, None)
    run(generator, [prompt(16, seed=1)], max_new_tokens=5)
    assert (generator.tokens_seen, generator.frozen_at) == (40, 40)


def test_a_cache_without_fp8_never_freezes(plain):
    events = run(plain, [prompt(5)])
    assert not plain.calibrates
    assert Frozen not in {type(event) for event in events}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_ragged_batch_gives_the_ids_of_one_by_one(plain, three, temperature):
    prompts = [prompt(n, seed=n) for n in (3, 18, 7)]
    options = {"temperature": temperature, "top_p": 0.9, "seed": 5}
    ids = ids_of(run(three, prompts, **options), 3)
    if temperature == 0:
        assert ids == [ids_of(run(plain, [p]))[0] for p in prompts]
    else:
        # Another batch: the third prompt's place is kept, its neighbours are not.
        others = [prompts[0], prompt(30), prompts[2]]
        again = ids_of(run(three, others, **options), 3)
        assert (again[0], again[2]) == (ids[0], ids[2])
        assert again[1] != ids[1]


def test_a_finished_sequence_leaves_the_others_as_they_were(three):
    prompts = [prompt(5), prompt(9, seed=3)]
    first, second = ids_of(run(three, prompts), 2)
    end = next(i for i in first if i not in second)
    stopped = ids_of(run(three, prompts, eos_ids={end}), 2)
    assert stopped == [first[: first.index(end) + 1], second]


def test_chunk_boundaries_do_not_change_greedy_ids(toy, plain):
    ids = ids_of(run(plain, [prompt(37)]))  # 16 + 16 + 5
    for widths in ((64,), (1, 3)):
        other = toy.generator(prefill_chunks=widths)
        assert ids_of(run(other, [prompt(37)])) == ids


def test_an_abandoned_call_gives_its_pages_back(plain):
    events = plain.generate([prompt(80)], GenerationConfig())
    while not isinstance(next(events), Prefilled):
        pass
    events.close()
    assert len(ids_of(run(plain, [prompt(80)]))[0]) == 12


def test_times_and_tokens_add_up(toy):
    generator = toy.generator(num_seqs=2)
    run(generator, [prompt(5), prompt(20)], max_new_tokens=8)
    timing = generator.timing
    assert (timing.prefill_tokens, timing.decode_tokens) == (25, 14)
    assert min(timing.compile_s, timing.prefill_s, timing.decode_s) > 0
    assert timing.decode_tokens_per_s == 14 / timing.decode_s
