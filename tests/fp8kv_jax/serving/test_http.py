"""The real `openai` client against a running server."""

import dataclasses
import math
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import tiny_model
from http_server import MODEL, RunningServer, encode, render_chat, wait_for
from serving_loop import make_engine, prompt_of, run_all

from fp8kv_jax.serving import Request, SamplingParams
from fp8kv_jax.serving.http.preparing import calibrate_on

GREEDY = {"model": "tiny", "temperature": 0}


@pytest.fixture(scope="module")
def server():
    with RunningServer() as running:
        yield running
        running.wait_until_idle()


@pytest.fixture
def client(server):
    return server.openai()


@pytest.fixture
def slow_server():
    with RunningServer(step_seconds=0.02) as running:
        yield running


def complete(client, prompt, **options):
    return client.completions.create(prompt=prompt, **(GREEDY | options))


def chat(client, text, **options):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(messages=messages, **(GREEDY | options))


def test_a_completion_is_what_the_engine_says(client):
    answer = complete(client, "hello", max_tokens=6)
    engine = make_engine()
    params = SamplingParams(max_tokens=6)
    engine.add(Request(prompt=encode("hello"), params=params))
    ids, _ = run_all(engine)
    assert encode(answer.choices[0].text) == ids[0, 0]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == 5
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == 11


def test_a_chat_is_the_completion_of_its_template(client):
    answer = chat(client, "hello", max_tokens=6)
    plain = complete(client, "user:hello\n", max_tokens=6)
    assert answer.choices[0].message.content == plain.choices[0].text
    assert answer.choices[0].message.role == "assistant"


def test_a_chat_without_max_tokens_goes_on_to_the_longest_sequence(client):
    answer = chat(client, "hi")
    assert answer.usage.total_tokens == 64
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert chat(client, parts).choices[0].message == answer.choices[0].message


def test_chunks_joined_are_the_whole_completion(client):
    whole = complete(client, "hello", max_tokens=9, n=2, temperature=1, seed=5)
    stream = complete(
        client,
        "hello",
        max_tokens=9,
        n=2,
        temperature=1,
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, reasons, usage = ["", ""], {}, None
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        usage = chunk.usage or usage
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0] != texts[1]
    assert reasons == {0: "length", 1: "length"}
    assert usage.completion_tokens == whole.usage.completion_tokens == 18


def test_chunks_of_a_chat_begin_with_the_role(client):
    whole = chat(client, "hello", max_tokens=5)
    chunks = list(chat(client, "hello", max_tokens=5, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    text = "".join(delta.content or "" for delta in deltas)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1


def test_logprobs_name_each_token_and_the_likeliest_ones(client):
    answer = complete(client, "hello", max_tokens=4, logprobs=3)
    got = answer.choices[0].logprobs
    assert "".join(got.tokens) == answer.choices[0].text
    assert got.text_offset == [0, 1, 2, 3]
    for token, logprob, top in zip(
        got.tokens, got.token_logprobs, got.top_logprobs, strict=True
    ):
        assert len(top) == 3
        # Greedy: the token is the likeliest one.
        assert top[token] == logprob == max(top.values()) <= 0
        assert sum(map(math.exp, top.values())) < 1


def test_logprobs_of_a_chat_come_in_chunks_too(client):
    whole = chat(client, "hello", max_tokens=4, logprobs=True, top_logprobs=2)
    content = whole.choices[0].logprobs.content
    assert [bytes(x.bytes).decode() for x in content] == [x.token for x in content]
    assert "".join(x.token for x in content) == whole.choices[0].message.content
    assert all(x.top_logprobs[0].logprob == x.logprob for x in content)
    chunks = chat(
        client, "hello", max_tokens=4, logprobs=True, top_logprobs=2, stream=True
    )
    parts = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert [x for part in parts for x in part.content] == content


def test_a_stop_string_ends_the_text_before_it(client):
    text = complete(client, "hello", max_tokens=12).choices[0].text
    stop = text[4:6]
    answer = complete(client, "hello", max_tokens=12, stop=[stop])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_a_seed_fixes_what_is_drawn(client):
    options = {"max_tokens": 12, "temperature": 1.5}
    one, again, other = (
        complete(client, "hello", seed=seed, **options).choices[0].text
        for seed in (7, 7, -8)
    )
    assert one == again != other


def test_top_p_near_zero_is_greedy(client):
    greedy = complete(client, "hello", max_tokens=8).choices[0].text
    drawn = complete(client, "hello", max_tokens=8, temperature=5, top_p=1e-6)
    assert drawn.choices[0].text == greedy


def test_prompts_of_a_list_are_answered_in_order(client):
    singles = [complete(client, text, max_tokens=4) for text in ("hello", "you")]
    both = complete(client, ["hello", "you"], max_tokens=4)
    assert [c.text for c in both.choices] == [a.choices[0].text for a in singles]
    assert [c.index for c in both.choices] == [0, 1]
    ids = complete(client, [encode("hello"), encode("you")], max_tokens=4)
    assert [c.text for c in ids.choices] == [c.text for c in both.choices]
    assert both.usage.prompt_tokens == 8


def test_models_name_the_one_served(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_32_concurrent_requests_say_what_they_say_one_by_one(server, client):
    # So that no request decides alone when the scales freeze.
    complete(client, "a" * 60, max_tokens=1, extra_body={"cache_salt": "freeze"})
    wait_for(lambda: server.worker.stats.frozen)
    prompts = [prompt_of(4 + seed % 20, seed) for seed in range(32)]

    def ask(prompt, salt):
        # Other salts share no pages: everything is computed again.
        answer = complete(client, prompt, max_tokens=24, extra_body=salt)
        return answer.choices[0].text

    serial = [ask(prompt, {"cache_salt": "serial"}) for prompt in prompts]
    before = server.worker.stats
    with ThreadPoolExecutor(32) as threads:
        salts = [{"cache_salt": "concurrent"}] * 32
        concurrent = list(threads.map(ask, prompts, salts))
    after = server.worker.stats
    assert concurrent == serial
    assert len(set(serial)) > 16
    # They did run together, and had to give up pages to each other.
    assert after.num_steps - before.num_steps < 32 * 24 / 2
    assert after.num_preemptions > before.num_preemptions


def test_closing_a_stream_frees_its_pages(slow_server):
    stream = complete(
        slow_server.openai(), "hello", max_tokens=50, stream=True, n=2, seed=1
    )
    for _ in range(3):
        next(stream)
    assert slow_server.worker.stats.num_used_pages > 0
    stream.close()
    slow_server.wait_until_idle()
    stats = slow_server.worker.stats
    assert stats.num_aborted == 2
    assert stats.num_output_tokens < 80


def test_a_full_queue_refuses_with_429():
    with RunningServer(step_seconds=0.02, max_open=2) as server:
        client = server.openai()
        streams = [
            complete(client, "hello", max_tokens=50, stream=True) for _ in range(2)
        ]
        with pytest.raises(openai.RateLimitError) as caught:
            complete(client, "hello", max_tokens=1)
        assert caught.value.code == "queue_full"
        assert caught.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.BadRequestError, match="at most 2 choices"):
            complete(client, "hello", max_tokens=1, n=3)
        for stream in streams:
            stream.close()
        server.wait_until_idle()
        assert complete(client, "hello", max_tokens=1).usage.completion_tokens == 1


def test_who_exceeds_the_context_is_told_so(client):
    with pytest.raises(openai.BadRequestError, match="at most 64 tokens") as caught:
        complete(client, "hello", max_tokens=100)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="at most 64 tokens"):
        complete(client, ["fine", "x" * 70], max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="at least 1 token"):
        complete(client, "")


def test_a_wrong_key_is_refused():
    with RunningServer(api_key="secret") as server:
        right, wrong = server.openai("secret"), server.openai("guess")
        assert complete(right, "hello", max_tokens=1).choices
        with pytest.raises(openai.AuthenticationError) as caught:
            complete(wrong, "hello", max_tokens=1)
        assert caught.value.code == "invalid_api_key"
        assert server.get("/v1/models").status_code == 401
        assert server.get("/v1/unknown").status_code == 401
        assert server.get("/health").status_code == 200


def test_before_it_accepts_it_says_503_and_then_where_the_calibration_stands():
    begin = threading.Event()
    prompts = [prompt_of(30, seed) for seed in range(4)]

    def prepare(engine):
        engine.warm_up(greedy_only=True, background=True)
        begin.wait(60)
        calibrate_on(engine, prompts)

    with RunningServer(prepare=prepare, waits=False) as server:
        wait_for(lambda: server.server.started)
        ready = server.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["status"] == "starting"
        wait_for(lambda: server.get("/ready").json()["steps_to_compile"])
        wait_for(lambda: server.get("/ready").json()["steps_compiled"] == 2)
        assert server.get("/ready").json()["steps_to_compile"] == 2
        assert server.get("/health").status_code == 200
        with pytest.raises(openai.InternalServerError, match="starting"):
            complete(server.openai(), "hello")
        begin.set()
        wait_for(lambda: server.worker.state == "accepting")
        ready = server.get("/ready")
        assert ready.status_code == 200
        assert ready.json()["status"] == "frozen"
        assert "steps_compiled" not in ready.json()
        assert ready.json()["tokens_seen"] >= 60
        assert complete(server.openai(), "hello", max_tokens=1).choices


def test_ready_tells_calibrating_from_frozen():
    with RunningServer(ready_when="frozen") as server:
        ready = server.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "calibrating")
        # It answers all the same: else nobody would ever fill the window.
        complete(server.openai(), "hello", max_tokens=8)
        assert server.get("/ready").json()["tokens_seen"] == 5 + 7
        complete(server.openai(), "x" * 60, max_tokens=1)
        ready = server.get("/ready")
        assert (ready.status_code, ready.json()["status"]) == (200, "frozen")


def test_metrics_follow_the_engine(server, client):
    complete(client, "a" * 60, max_tokens=3)
    response = server.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    values = dict(re.findall(r"^(\S+) (\S+)$", response.text, re.MULTILINE))
    stats = server.worker.stats
    assert float(values["fp8kv_steps_total"]) == stats.num_steps
    assert float(values["fp8kv_output_tokens_total"]) == stats.num_output_tokens
    assert float(values["fp8kv_calibration_frozen"]) == 1
    assert float(values["fp8kv_pages"]) == 24
    scales = server.engine.calibration.k_scale
    for layer in range(tiny_model.NUM_LAYERS):
        name = f'fp8kv_scale{{group="0",layer="{layer}",tensor="k"}}'
        assert float(values[name]) == float(scales[layer, 0])
        assert f'fp8kv_saturated_values_total{{layer="{layer}",tensor="v"}}' in values
    finished = float(values["fp8kv_request_duration_seconds_count"])
    assert finished == stats.num_finished - stats.num_aborted
    assert float(values["fp8kv_time_to_first_token_seconds_sum"]) > 0
    ok = 'fp8kv_http_responses_total{path="/v1/completions",status="200"}'
    assert float(values[ok]) >= 1


def test_a_template_that_refuses_is_a_400(client):
    messages = [{"role": "assistant", "content": "hello"}]
    with pytest.raises(openai.BadRequestError, match="last message"):
        client.chat.completions.create(messages=messages, **GREEDY)


def test_without_a_template_chats_are_a_422():
    plain = dataclasses.replace(MODEL, render_chat=None)
    assert MODEL.render_chat is render_chat
    with (
        RunningServer(model=plain) as server,
        pytest.raises(openai.UnprocessableEntityError, match="no chat template"),
    ):
        chat(server.openai(), "hello")
