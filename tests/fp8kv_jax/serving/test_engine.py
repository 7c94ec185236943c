"""The engine over the tiny model: what requests get, alone and together."""

import itertools
from concurrent.futures import Future

import jax
import numpy as np
import pytest
import tiny_model
from serving_loop import ask, forward, make_engine, prompt_of, run_all

import fp8kv_jax as fp8kv
from fp8kv_jax.block_table import BlockTable, make_batch
from fp8kv_jax.sampling import sample
from fp8kv_jax.serving import EngineConfig, Request, SamplingParams


class Letters:
    """A detokenizer: token 3 is "a", 4 is "b" and so on, the rest "."."""

    def push(self, index):
        return chr(94 + index) if 3 <= index < 29 else "."

    def flush(self):
        return ""


def plain_greedy(prompt, num_new, *, choose=None):
    """Greedy tokens by the plain steps, one token at a time, in float32 pools."""
    config = tiny_model.cache_config(dtype="float32")
    cache = fp8kv.init_cache(config)
    state = fp8kv.init_calibration(
        fp8kv.CalibrationConfig(), config, max_tokens_per_step=64
    )
    table = BlockTable(num_pages=16, page_size=8, num_seqs=1, max_seq_len=64)
    tokens, computed, logits = list(prompt), 0, None
    for _ in range(num_new):
        new = tokens[computed:]
        batch = make_batch(table, {0: new}, {0: computed}, num_queries=len(new))
        step = tiny_model.jitted_steps().prefill_step
        (logits, _), cache, state = step(tiny_model.init_params(), cache, state, batch)
        computed = len(tokens)
        tokens.append(int(choose(logits, computed) if choose else logits.argmax()))
    return tokens[len(prompt) :]


def test_a_request_gets_what_the_plain_steps_give():
    engine = make_engine(dtype="float32")
    prompt = prompt_of(19)
    ask(engine, prompt, max_tokens=12)
    ids, _ = run_all(engine)
    assert ids[0, 0] == plain_greedy(prompt, 12)


def test_draws_are_those_of_the_seed_whatever_the_batch():
    prompt = prompt_of(5)
    key = jax.random.key(7)
    # Hot, since the tiny model is sure of itself.
    settings = {"temperature": np.float32(20), "top_p": np.float32(0.9)}

    def choose(logits, position):
        at = np.array([1], np.int32), np.array([position], np.int32)
        return sample(logits, *at, key=key, **settings)[0]

    engine = make_engine(dtype="float32")
    for seed in range(3):
        ask(engine, prompt_of(9, seed), temperature=1.0)
    asked = ask(engine, prompt, n=2, seed=7, temperature=20, top_p=0.9, max_tokens=10)
    ids, _ = run_all(engine)
    assert ids[asked, 1] == plain_greedy(prompt, 10, choose=choose)
    assert ids[asked, 0] != ids[asked, 1]


def frozen_engine(**options):
    """An FP8 engine whose scales come from one and the same prompt."""
    engine = make_engine(num_pages=160, **options)
    ask(engine, prompt_of(56, seed=99))
    run_all(engine)
    assert engine.stats().frozen
    return engine


WIDE = {
    "max_num_seqs": 32,
    "max_tokens_per_step": 64,
    "decode_buckets": (32,),
    "prefill_buckets": (4,),
}


def test_32_requests_at_once_get_what_each_gets_alone():
    prompts = [prompt_of(3 + 5 * i % 40, seed=i % 20) for i in range(32)]
    together, alone = frozen_engine(**WIDE), frozen_engine(**WIDE)
    asked = [ask(together, prompt, max_tokens=16) for prompt in prompts]
    ids, _ = run_all(together)
    for request_id, prompt in zip(asked, prompts, strict=True):
        again = ask(alone, prompt, max_tokens=16)
        assert run_all(alone)[0][again, 0] == ids[request_id, 0]


def test_preempted_requests_get_what_they_would_have_got():
    prompts = [prompt_of(12, seed=i) for i in range(4)]
    roomy, tight = (make_engine(num_pages=n, dtype="float32") for n in (24, 7))
    for engine in (roomy, tight):
        for prompt in prompts:
            ask(engine, prompt, max_tokens=30, temperature=20, seed=1)
    assert run_all(roomy)[0] == run_all(tight)[0]
    assert tight.stats().num_preemptions > 0
    assert roomy.stats().num_preemptions == 0


def test_forks_share_the_pages_of_the_prompt():
    engine = make_engine(dtype="float32")
    asked = ask(engine, prompt_of(20), n=3, temperature=1.0, seed=5)
    while engine.stats().num_running < 3:
        engine.step()
    # Two full pages are shared, the third is everybody's own.
    assert engine.stats().num_used_pages == 2 + 3
    ids, outputs = run_all(engine)
    assert {key[1] for key in ids} <= {0, 1, 2}
    assert engine.stats().num_page_copies == 2
    assert outputs[asked, 2][-1].num_cached_tokens == 19


def test_a_shared_prefix_is_computed_once():
    engine = make_engine(dtype="float32")
    prompt = prompt_of(30)
    first, again = ask(engine, prompt), None
    ids, _ = run_all(engine)
    before = engine.stats()
    again = ask(engine, prompt)
    same, outputs = run_all(engine)
    assert same[again, 0] == ids[first, 0]
    assert outputs[again, 0][0].num_cached_tokens == 24
    assert engine.stats().num_cached_tokens == 24
    computed = engine.stats().num_computed_tokens - before.num_computed_tokens
    assert computed == 30 - 24 + 7


def test_what_was_said_is_found_as_a_prefix():
    engine = make_engine(dtype="float32")
    prompt = prompt_of(30)
    asked = ask(engine, prompt, max_tokens=11)
    said = run_all(engine)[0][asked, 0]
    # 40 tokens stand in five pages: the last of them was computed by the last step.
    again = ask(engine, [*prompt, *said], max_tokens=1)
    assert run_all(engine)[1][again, 0][0].num_cached_tokens == 40


def test_another_salt_shares_nothing():
    engine = make_engine(dtype="float32")
    for salt in ("", "mine"):
        params = SamplingParams(max_tokens=1)
        engine.add(Request(prompt=prompt_of(30), params=params, salt=salt))
        run_all(engine)
    assert engine.stats().num_cached_tokens == 0


def test_an_aborted_request_ends_at_once_and_frees_its_pages():
    engine = make_engine(dtype="float32")
    kept, gone = ask(engine, prompt_of(9)), ask(engine, prompt_of(40), n=2)
    engine.step()
    assert engine.abort(gone)
    assert not engine.abort(gone)
    ends = [o for o in engine.step() if o.finish_reason == "abort"]
    assert [(o.request_id, o.index) for o in ends] == [(gone, 0), (gone, 1)]
    ids, _ = run_all(engine)
    assert len(ids[kept, 0]) >= 6
    assert engine.stats().num_used_pages == 0
    assert engine.stats().num_aborted == 2
    assert not engine.abort(kept)


def test_an_aborted_request_alone_is_still_reported():
    engine = make_engine(dtype="float32")
    engine.abort(ask(engine, [5]))
    assert engine.has_work
    assert [o.finish_reason for o in engine.step()] == ["abort"]
    assert not engine.has_work


def greedy_text(num_new=12):
    return plain_greedy(prompt_of(9), num_new)


def test_end_and_stop_tokens_end_a_continuation():
    tokens = greedy_text()
    end, stop = tokens[4], tokens[2]
    cut = tokens[: tokens.index(end) + 1]
    engine = make_engine(dtype="float32", eos_ids={end}, detokenizer=Letters)
    asked = [
        ask(engine, prompt_of(9), max_tokens=12, ignore_eos=False),
        ask(engine, prompt_of(9), max_tokens=12),
        ask(engine, prompt_of(9), max_tokens=12, stop_ids=frozenset({stop})),
    ]
    ids, outputs = run_all(engine)
    last = [outputs[i, 0][-1] for i in asked]
    assert ids[asked[0], 0] == cut
    assert (last[0].finish_reason, last[0].stop_reason) == ("stop", None)
    # The text of the token that ends it is not part of the text.
    text = "".join(o.text for o in outputs[asked[0], 0])
    assert text == "".join(map(Letters().push, cut[:-1]))
    assert ids[asked[1], 0] == tokens
    assert last[1].finish_reason == "length"
    assert ids[asked[2], 0] == tokens[: tokens.index(stop) + 1]
    assert (last[2].finish_reason, last[2].stop_reason) == ("stop", stop)


@pytest.mark.parametrize("window", [12, 60])
def test_a_step_is_read_while_the_next_one_runs(window):
    engine = make_engine(window=window)
    ask(engine, prompt_of(9), max_tokens=5)
    read = []
    while engine.has_work:
        tokens = [token for output in engine.step() for token in output.token_ids]
        stats = engine.stats()
        read.append((stats.num_steps, len(tokens), stats.tokens_seen))
    # As many steps begun as tokens read, one call apart; the freeze changes nothing.
    seen = [min(n, window) for n in (9, 10, 11, 12, 13, 13)]
    assert read == [*zip((1, 2, 3, 4, 5, 5), (0, 1, 1, 1, 1, 1), seen, strict=True)]
    assert engine.stats().frozen == (window == 12)


def test_what_has_ended_gets_nothing_from_the_step_under_way():
    tokens = greedy_text()
    cut = tokens[: tokens.index(tokens[4]) + 1]
    engine = make_engine(dtype="float32", eos_ids={tokens[4]})
    asked = ask(engine, prompt_of(9), max_tokens=12, ignore_eos=False)
    other = ask(engine, prompt_of(9), max_tokens=12)
    ids, outputs = run_all(engine)
    assert ids[asked, 0] == cut
    assert ids[other, 0] == tokens
    assert outputs[asked, 0][-1].num_output_tokens == len(cut)
    # The token that ends it went through the model: the host did not know yet.
    assert engine.stats().num_computed_tokens == (9 + len(cut)) + (9 + 11)


def test_new_weights_lose_no_token_of_the_step_under_way():
    engine = make_engine(window=60)
    ask(engine, prompt_of(56))
    run_all(engine)
    asked = ask(engine, prompt_of(9), max_tokens=6)
    outputs = [*engine.step(), *engine.step()]
    engine.reset()
    _, rest = run_all(engine)
    assert len(outputs) + len(rest[asked, 0]) == 6
    assert rest[asked, 0][-1].num_output_tokens == 6


def test_a_stop_string_ends_a_continuation_and_is_not_shown():
    tokens = greedy_text()
    text = "".join(map(Letters().push, tokens))
    stop = text[5:8]
    engine = make_engine(dtype="float32", detokenizer=Letters)
    asked = ask(engine, prompt_of(9), max_tokens=12, stop=(stop,))
    _, outputs = run_all(engine)
    last = outputs[asked, 0][-1]
    assert "".join(o.text for o in outputs[asked, 0]) == text[: text.index(stop)]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    assert engine.stats().num_used_pages == 0


def test_logprobs_are_the_models_own():
    engine = make_engine(dtype="float32")
    prompt = prompt_of(9)
    hot = ask(engine, prompt, logprobs=3, temperature=2.0, seed=3, max_tokens=1)
    greedy = ask(engine, prompt, logprobs=0, max_tokens=2)
    none = ask(engine, prompt, max_tokens=2)
    _, outputs = run_all(engine)
    params = tiny_model.init_params()
    config = tiny_model.cache_config(dtype="float32")
    state = fp8kv.init_calibration(
        fp8kv.CalibrationConfig(), config, max_tokens_per_step=16
    )
    table = BlockTable(num_pages=16, page_size=8, num_seqs=1, max_seq_len=64)
    batch = make_batch(table, {0: prompt}, {0: 0}, num_queries=9)
    step = tiny_model.jitted_steps().prefill_step
    (logits, _), *_ = step(params, fp8kv.init_cache(config), state, batch)
    want = np.asarray(jax.nn.log_softmax(logits[0]))
    (entry,) = outputs[hot, 0][0].logprobs
    ids = [token_id for token_id, _ in entry.top]
    np.testing.assert_array_equal(ids, np.argsort(-want)[:3])
    # Two programs of one float32 model differ in how they round sums.
    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose([p for _, p in entry.top], want[ids], **close)
    np.testing.assert_allclose(entry.logprob, want[entry.token_id], **close)
    (entry,) = outputs[greedy, 0][0].logprobs
    assert entry.top == ()
    np.testing.assert_allclose(entry.logprob, want.max(), **close)
    assert outputs[none, 0][0].logprobs is None


def test_the_budget_and_the_window_are_kept_and_the_window_is_given_back():
    engine = make_engine(window=60)
    assert engine.stats().has_window
    for seed in range(6):
        ask(engine, prompt_of(30, seed))
    seen = [engine.stats()]
    while engine.has_work:
        engine.step()
        seen.append(engine.stats())
    totals = [stats.num_computed_tokens for stats in seen]
    computed = [b - a for a, b in itertools.pairwise(totals)]
    assert max(computed) == 24
    first_frozen = next(s for s in seen if s.frozen)
    assert 60 <= first_frozen.tokens_seen < 60 + 24
    assert (first_frozen.epoch, seen[0].epoch) == (1, 0)
    assert not seen[-1].has_window


def test_a_quick_start_pads_to_the_largest_step_while_another_compiles():
    said = []
    for quick_start in (False, True):
        engine = make_engine(quick_start=quick_start)
        small, large = engine.runner.layout.shapes
        if quick_start:
            steps = {(large, True): engine.runner._compiled(large, window=True)}
            engine.runner._steps = steps | {(small, True): Future()}
        for seed in range(3):
            ask(engine, prompt_of(30, seed))
        said.append(run_all(engine)[0])
        assert engine.stats().frozen
        assert engine.stats().has_window == quick_start
    assert said[0] == said[1]
    engine.warm_up(greedy_only=True, background=True)
    assert engine.compiled == (1, 1)
    assert set(engine.runner._steps) == {(small, True), (large, True)}


def test_a_quick_start_has_no_row_for_less_than_a_chunk():
    config = EngineConfig(
        max_num_seqs=16, max_tokens_per_step=48, chunk=32, quick_start=True
    )
    assert config.layout(page_size=8).shapes == [(16, 0), (16, 1)]


@pytest.mark.parametrize("background", [False, True])
def test_warm_up_is_not_observed_and_later_steps_compile_nothing(background):
    with make_engine(window=60) as engine:
        assert engine.compiled == (0, 0)
        engine.warm_up(greedy_only=background, background=background)
        num_awaited = 2 if background else 4
        assert engine.compiled == (num_awaited, num_awaited)
        assert engine.stats().tokens_seen == 0
        assert int(engine.calibration.batches_seen) == 0
        compiled = set(engine.runner._steps), set(engine.runner._choices)
        futures = [*engine.runner._steps.values(), *engine.runner._choices.values()]
        assert background or all(future.done() for future in futures)
        options = {} if background else {"temperature": 1.0, "logprobs": 2}
        for seed in range(8):
            ask(engine, prompt_of(25, seed), **options)
        assert engine.stats().has_window
        for future in futures:
            future.result()
        run_all(engine)
        assert not engine.stats().has_window
        assert (set(engine.runner._steps), set(engine.runner._choices)) == compiled


def test_the_window_stays_until_the_steps_without_it_are_there():
    engine = make_engine()
    shape = engine.runner.layout.shapes[0]
    pending = Future()
    engine.runner._steps = dict(engine.runner._steps) | {(shape, False): pending}
    for seed in range(3):
        ask(engine, prompt_of(30, seed), max_tokens=8)
    for _ in range(4):
        engine.step()
    assert engine.stats().frozen
    assert engine.stats().has_window
    pending.set_result(engine.runner._lower(shape, window=False).compile())
    engine.step()
    assert not engine.stats().has_window


def test_the_compiled_steps_are_kept_on_disk(tmp_path):
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_compilation_cache_dir
    try:
        engine = make_engine(dtype="float32", compilation_cache=tmp_path)
        engine.runner._steps = {}
        ask(engine, [5], max_tokens=1)
        run_all(engine)
        assert any("prefill_step" in path.name for path in tmp_path.iterdir())
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens to be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature to be a finite number"),
        ({"top_p": 0.0}, r"top_p to be within \(0, 1\], got 0.0"),
        ({"seed": -1}, "seed to be within 0..4294967295, got -1"),
        ({"n": 0}, "n to be at least 1, got 0"),
        ({"stop": "text"}, "stop to be strings, none of them empty, got 'text'"),
        ({"stop": ("a", "")}, "stop to be strings, none of them empty"),
        ({"logprobs": 21}, "logprobs to be within 0..20, got 21"),
    ],
)
def test_params_out_of_range_are_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs to be at least 1, got 0"),
        ({"max_tokens_per_step": 100}, "at least 192 .* got 100: prompts would wait"),
        ({"host_pages": -1}, "host_pages to be at least 0, got -1"),
        ({"decode_buckets": (8, 32)}, r"decode_buckets .* up to 64 or more"),
        ({"decode_buckets": (64, 64)}, r"decode_buckets to be ascending"),
        ({"prefill_buckets": ()}, r"prefill_buckets to be ascending"),
    ],
)
def test_a_config_out_of_range_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("length", "params", "message"),
    [
        (60, {"max_tokens": 5}, "at most 64 tokens .* prompt of 60 and max_tokens 5"),
        (64, {"max_tokens": None}, "at most 64 tokens .* prompt of 64"),
        (4, {"stop": ("x",)}, "no stop strings: this engine has no detokenizer"),
    ],
)
def test_a_request_that_can_never_run_is_refused(length, params, message):
    engine = make_engine(dtype="float32")
    with pytest.raises(ValueError, match=message):
        ask(engine, prompt_of(length), **params)
    assert not engine.has_work


def test_a_request_larger_than_the_pool_is_refused_and_one_as_large_runs():
    engine = make_engine(dtype="float32", num_pages=7)
    with pytest.raises(ValueError, match=r"at most 57 tokens .*pool of 56 slots"):
        ask(engine, prompt_of(52), max_tokens=6)
    asked = ask(engine, prompt_of(52), max_tokens=5)
    ids, _ = run_all(engine)
    assert len(ids[asked, 0]) == 5
    assert engine.stats().num_used_pages == 0


def test_a_prompt_needs_tokens():
    with pytest.raises(ValueError, match="a prompt of at least 1 token, got none"):
        Request(prompt=[])
    engine = make_engine(dtype="float32")
    with pytest.raises(ValueError, match="token ids from 0 on in the prompt, got -3"):
        ask(engine, [5, -3])


def test_a_mixed_step_gives_the_logits_of_its_parts():
    """One row of tokens through the model, attention part by part."""
    config = tiny_model.cache_config(dtype="float32")
    state = fp8kv.init_calibration(
        fp8kv.CalibrationConfig(), config, max_tokens_per_step=64
    )
    table = BlockTable(num_pages=16, page_size=8, num_seqs=3, max_seq_len=64)
    decode = make_batch(table, {0: [5], 1: [6]}, {0: 0, 1: 0}, num_queries=1)
    prefill = make_batch(table, {2: prompt_of(7)}, {2: 0}, num_queries=8)
    params = tiny_model.init_params()
    step = jax.jit(fp8kv.make_steps(forward).prefill_step)
    mixed = fp8kv.MixedBatch(parts=(decode, prefill))
    assert mixed.num_tokens == 10
    got, _, _ = step(params, fp8kv.init_cache(config), state, mixed)
    for part, rows in ((decode, slice(0, 2)), (prefill, slice(2, 3))):
        want, _, _ = step(params, fp8kv.init_cache(config), state, part)
        np.testing.assert_allclose(got[rows], want, rtol=1e-5, atol=1e-5)
