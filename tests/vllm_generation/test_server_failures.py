"""How servers are dealt with that fail in ways in which vLLM cannot be made to."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from vllm_agents import agent_on

from agilerl.llm.generation.vllm import servers
from agilerl.llm.generation.vllm.config import VLLMConfig
from agilerl.llm.generation.vllm.engine import EngineError, Request, StagedAdapter
from agilerl.llm.generation.vllm.servers import ServerPool

ADAPTER = StagedAdapter("adapter-1", 1, "/nowhere")
Handler = BaseHTTPRequestHandler
Completions = Callable[["FakeServer", Handler, dict[str, Any]], None]


class FakeServer:
    """Answers as vLLM does, but completions as it is told."""

    def __init__(self, completions: Completions) -> None:
        self.completions = completions
        self.requests: list[tuple[str, dict[str, Any]]] = []
        fake = self

        class Answering(Handler):
            def do_GET(self) -> None:
                respond(self, json.dumps({"data": [{"max_model_len": 128}]}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                fake.requests.append((self.path, body))
                if self.path == "/v1/completions":
                    fake.completions(fake, self, body)
                else:
                    respond(self, "")

            def log_message(self, *_: Any) -> None: ...

        class Quiet(ThreadingHTTPServer):
            request_queue_size = 256

            def handle_error(self, *_: Any) -> None: ...  # the client went away

        self._server = Quiet(("127.0.0.1", 0), Answering)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def asked(self) -> int:
        return sum(path == "/v1/completions" for path, _ in self.requests)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def respond(handler: Handler, text: str, status: int = 200) -> None:
    handler.send_response(status)
    handler.send_header("content-length", str(len(text.encode())))
    handler.end_headers()
    handler.wfile.write(text.encode())


def chunk(index: int, ids: list[int], **more: Any) -> str:
    logprobs = {"token_logprobs": [-0.5 * n for n in ids]}
    choice = {"index": index, "text": "", "token_ids": ids, "logprobs": logprobs, **more}
    return f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\n\n"


def right(fake: FakeServer, handler: Handler, body: dict[str, Any]) -> None:
    """The prompt's first token and another one, in two parts and in alternation."""
    first = body["prompt"][0]
    text = "".join(chunk(n, [first]) for n in range(body["n"]))
    ends = {"finish_reason": "length"}
    text += "".join(chunk(n, [n], **ends) for n in reversed(range(body["n"])))
    respond(handler, text + "data: [DONE]\n\n")


def then_right(answers: list[Completions]) -> Completions:
    left = list(answers)

    def completions(fake: FakeServer, handler: Handler, body: dict[str, Any]) -> None:
        (left.pop(0) if left else right)(fake, handler, body)

    return completions


def saying(text: str, status: int = 200) -> Completions:
    return lambda fake, handler, body: respond(handler, text, status)


def closing(fake: FakeServer, handler: Handler, body: dict[str, Any]) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(chunk(0, [1]).encode())


def hanging(fake: FakeServer, handler: Handler, body: dict[str, Any]) -> None:
    time.sleep(60)


def request(first: int = 7, n: int = 2) -> Request:
    return Request([first, 8], {"n": n, "max_tokens": 2, "logprobs": 0}, ADAPTER)


MakePool = Callable[..., tuple[ServerPool, list[FakeServer]]]


@pytest.fixture
def pool_of() -> Iterator[MakePool]:
    made: list[FakeServer] = []
    pools: list[ServerPool] = []

    def make(*completions: Completions, **settings: Any) -> tuple[ServerPool, list[FakeServer]]:
        fakes = [FakeServer(each) for each in completions]
        made.extend(fakes)
        given = {"startup_timeout": 5, "request_timeout": 5, "max_retries": 2} | settings
        urls = tuple(fake.url for fake in fakes)
        pools.append(ServerPool(VLLMConfig(server_urls=urls, lora_staging_dir="x", **given), 64))
        pools[-1].load_adapter(ADAPTER)
        return pools[-1], fakes

    yield make
    for pool in pools:
        pool.close()
    for fake in made:
        with contextlib.suppress(OSError):
            fake.stop()


def test_parts_of_a_completion_are_put_together(pool_of: MakePool) -> None:
    pool, (fake,) = pool_of(right)
    (answer,) = pool.complete([request(n=3)])
    assert [sample.token_ids for sample in answer.samples] == [[7, 0], [7, 1], [7, 2]]
    assert [sample.logps for sample in answer.samples] == [[-3.5, 0.0], [-3.5, -0.5], [-3.5, -1.0]]
    assert fake.requests[-1][1]["model"] == "adapter-1"


def test_answers_are_in_order_and_the_faster_server_has_more(
    pool_of: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "OUTSTANDING", 4)

    def slow(fake: FakeServer, handler: Handler, body: dict[str, Any]) -> None:
        time.sleep(0.3)
        right(fake, handler, body)

    pool, (first, second) = pool_of(slow, right)
    answers = pool.complete([request(first=n) for n in range(60)])
    assert [answer.samples[0].token_ids[0] for answer in answers] == list(range(60))
    assert second.asked > 2 * first.asked > 0


@pytest.mark.parametrize(
    "failure",
    [
        saying("busy", 503),
        saying("slow down", 429),
        saying("<html>a proxy's page</html>"),
        saying('data: {"choices": [{"index": 0}]}\n\n'),
        saying('data: {"error": {"message": "EngineCore died", "code": 500}}\n\n'),
        saying(chunk(0, [1, 2], finish_reason="length")),  # only one of two completions
        saying("".join(chunk(n, [1], finish_reason="abort") for n in range(2))),
        closing,
    ],
)
def test_a_failure_that_passes_is_tried_again(
    pool_of: MakePool, failure: Completions, caplog: pytest.LogCaptureFixture
) -> None:
    pool, (fake,) = pool_of(then_right([failure, failure]))
    (answer,) = pool.complete([request()])
    assert [sample.token_ids for sample in answer.samples] == [[7, 0], [7, 1]]
    assert fake.asked == 3
    assert not caplog.records


def test_a_failure_that_stays_drops_the_server(
    pool_of: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool, (bad, good) = pool_of(saying("out of memory", 500), right)
    answers = pool.complete([request(first=n) for n in range(40)])
    assert [answer.samples[0].token_ids[0] for answer in answers] == list(range(40))
    (record,) = caplog.records
    assert record.getMessage() == (
        f"the vLLM server {bad.url} is dropped: it answered 500: 'out of memory'. Left: {good.url}"
    )
    before = bad.asked
    pool.complete([request()])
    assert bad.asked == before
    good.completions = saying("me too", 500)
    with pytest.raises(EngineError, match=r"no vLLM server is left.*out of memory.*me too"):
        pool.complete([request()])
    assert pool.ended


@pytest.mark.parametrize(
    "refusal",
    [
        saying('{"error": {"message": "no such token"}}', 400),
        saying('data: {"error": {"message": "no such token", "code": 400}}\n\n'),
    ],
)
def test_a_refusal_is_not_tried_again(pool_of: MakePool, refusal: Completions) -> None:
    pool, fakes = pool_of(refusal, refusal)
    with pytest.raises(EngineError, match=r"refused \(400\).*no such token"):
        pool.complete([request()])
    assert sum(fake.asked for fake in fakes) == 1
    assert not pool.ended


def test_a_server_that_hangs_is_dropped_in_time(
    pool_of: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool, (stuck, good) = pool_of(hanging, right, request_timeout=3)
    started = time.monotonic()
    answers = pool.complete([request(first=n) for n in range(40)])
    assert 3 <= time.monotonic() - started < 8
    assert [answer.samples[0].token_ids[0] for answer in answers] == list(range(40))
    assert f"server {stuck.url} is dropped: it made no progress for request_timeout=3 s" in (
        caplog.text
    )
    good.completions = hanging
    started = time.monotonic()
    with pytest.raises(EngineError, match="no vLLM server is left"):
        pool.complete([request()])
    assert time.monotonic() - started < 8


def test_a_busy_server_does_not_hang(pool_of: MakePool) -> None:
    """Requests wait in it for their turn longer than ``request_timeout``, but it works."""
    turn = threading.Lock()

    def one_by_one(fake: FakeServer, handler: Handler, body: dict[str, Any]) -> None:
        with turn:
            time.sleep(0.2)
            right(fake, handler, body)

    pool, (fake,) = pool_of(one_by_one, request_timeout=1)
    assert len(pool.complete([request()] * 12)) == 12
    assert fake.asked == 12


def test_a_restarted_server_is_dropped_and_used_again_with_the_next_adapter(
    pool_of: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool, (restarted, good) = pool_of(saying("no such model", 404), right)
    pool.complete([request()] * 4)
    assert restarted.asked == 2  # half of them, once each
    restarted.completions = right
    assert "does not know the adapter any more: it was restarted" in caplog.text
    newer = StagedAdapter("adapter-2", 2, "/nowhere")
    pool.load_adapter(newer)
    assert f"server {restarted.url} is back" in caplog.text
    pool.complete([Request([7, 8], {"n": 1}, newer)] * 4)
    assert restarted.asked > 2
    before = restarted.asked
    pool.complete([request()] * 4)  # it never got this one back
    assert restarted.asked == before
    good.completions = saying("", 500)
    with pytest.raises(EngineError, match=f"{restarted.url} came back later"):
        pool.complete([request()])


def test_a_dropped_server_that_stays_away_delays_nothing(
    pool_of: MakePool, caplog: pytest.LogCaptureFixture
) -> None:
    pool, (gone, _) = pool_of(right, right)
    gone.stop()
    pool.complete([request()] * 4)
    assert "is dropped" in caplog.text
    started = time.monotonic()
    pool.load_adapter(StagedAdapter("adapter-2", 2, "/nowhere"))
    assert time.monotonic() - started < 1
    assert "is back" not in caplog.text


def test_texts_may_hold_any_character(pool_of: MakePool) -> None:
    """Some of them end lines elsewhere, and JSON leaves them as they are."""
    text = "a\u2028b\u0085c"
    parts = "".join(chunk(n, [5], text=text, finish_reason="stop") for n in range(2))
    pool, _ = pool_of(saying(parts))
    assert pool.complete([request()])[0].samples[1].token_ids == [5]


def test_log_probs_that_are_no_numbers_are_nan(pool_of: MakePool) -> None:
    parts = "".join(
        chunk(n, [5], logprobs={"token_logprobs": [None]}, finish_reason="stop") for n in range(2)
    )
    pool, _ = pool_of(saying(parts))
    (logp,) = pool.complete([request()])[0].samples[0].logps or []
    assert logp != logp


def test_each_server_is_asked_for_the_probe(pool_of: MakePool) -> None:
    pool, fakes = pool_of(right, right, saying("", 500))
    found = pool.complete_on_each(request())
    assert list(found) == [f"the vLLM server {fake.url}" for fake in fakes[:2]]


def test_ctrl_c_ends_the_wait_and_the_requests(pool_of: MakePool) -> None:
    closed = threading.Event()

    def until_closed(fake: FakeServer, handler: Handler, body: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.end_headers()
        with contextlib.suppress(OSError):
            while True:
                handler.wfile.write(chunk(0, [1]).encode())
                time.sleep(0.05)
        closed.set()

    pool, (fake,) = pool_of(until_closed)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        pool.complete([request()])
    assert closed.wait(5)
    fake.completions = right
    assert pool.complete([request()])


def test_the_thread_ends_with_the_pool(pool_of: MakePool) -> None:
    fake = FakeServer(right)
    config = VLLMConfig(server_urls=(fake.url,), lora_staging_dir="x", startup_timeout=5)
    before = set(threading.enumerate())
    pool = ServerPool(config, 64)
    (thread,) = {t for t in set(threading.enumerate()) - before if t.name == "vllm-servers"}
    del pool
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()
    fake.stop()


def test_proxies_of_the_environment_are_passed_by(
    pool_of: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    pool, _ = pool_of(right)
    assert pool.complete([request()])


def test_waiting_for_a_server_is_told(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeServer(right)
    fake.stop()
    config = VLLMConfig(server_urls=(fake.url,), lora_staging_dir="x", startup_timeout=0.5)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(EngineError, match=r"startup_timeout=0.5 s .* not reachable: ConnectError"),
    ):
        ServerPool(config, 64)
    assert f"waiting for the vLLM server {fake.url}" in caplog.text


@pytest.mark.parametrize("package", ["httpx", "tenacity"])
def test_a_missing_package_is_named(
    package: str, base: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("servers", "server_client"):
        monkeypatch.delitem(sys.modules, f"agilerl.llm.generation.vllm.{module}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    config = VLLMConfig(server_urls=("http://127.0.0.1:9",), lora_staging_dir="x")
    with pytest.raises(ImportError, match=rf"{package}.*pip install httpx tenacity"):
        agent_on(base, vllm_config=config)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost", "ftp://host"])
def test_addresses_are_checked(url: str) -> None:
    with pytest.raises(ValueError, match=r"server_urls holds .*http://127.0.0.1:8000"):
        VLLMConfig(server_urls=(url,), lora_staging_dir="x")
