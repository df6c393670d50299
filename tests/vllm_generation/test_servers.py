"""Generation by real vLLM servers."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from launched_once import launched_once
from transformers import PreTrainedModel
from vllm_agents import agent_on, prompts_of, train, twin_with_hf
from vllm_servers import API_KEY, TRAINER_LOGPROBS, LocalServer

from agilerl.algorithms import GRPO
from agilerl.llm.generation.vllm.engine import EngineError, Request, StagedAdapter
from agilerl.llm.generation.vllm.probe import PolicyMismatchError
from agilerl.llm.generation.vllm.servers import ServerPool
from agilerl.utils.algo_utils import VLLMConfig

pytestmark = pytest.mark.slow

MakeAgent = Callable[..., GRPO]


@pytest.fixture(scope="session")
def urls(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Two servers that all workers use until the end of the tests."""

    def launch(folder: Path) -> None:
        servers = [LocalServer(folder, *TRAINER_LOGPROBS) for _ in range(2)]
        for server in servers:
            server.wait()
        (folder / "urls.json").write_text(json.dumps([server.url for server in servers]))

    folder = launched_once(tmp_path_factory, "vllm-servers", launch)
    return tuple(json.loads((folder / "urls.json").read_text()))


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", API_KEY)


@pytest.fixture
def config(urls: tuple[str, ...], tmp_path: Path) -> VLLMConfig:
    return VLLMConfig(
        server_urls=urls,
        lora_staging_dir=str(tmp_path / "adapters"),
        startup_timeout=60,
        request_timeout=120,
    )


@pytest.fixture
def make_agent(base: PreTrainedModel, config: VLLMConfig) -> Iterator[MakeAgent]:
    made: list[GRPO] = []

    def make(**arguments: Any) -> GRPO:
        made.append(agent_on(base, **{"vllm_config": config, **arguments}))
        return made[-1]

    yield make
    for agent in made:
        agent.clean_up()


def get(url: str, path: str) -> httpx.Response:
    return httpx.get(url + path, headers={"Authorization": f"Bearer {API_KEY}"}, trust_env=False)


def served(url: str) -> set[str]:
    return {model["id"] for model in get(url, "/v1/models").json()["data"]}


def answered(url: str) -> float:
    lines = get(url, "/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("vllm:request_success_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def rows(agent: GRPO, prompts: Any, **arguments: Any) -> list[torch.Tensor]:
    return agent.get_action(prompts, **arguments).completion_ids


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize("steps", [0, 3])
def test_greedy_tokens_equal_the_hf_generators(
    make_agent: MakeAgent, base: PreTrainedModel, urls: tuple[str, ...], steps: int
) -> None:
    agent = make_agent()
    train(agent, steps)
    before = [answered(url) for url in urls]
    prompts = prompts_of(1, 30, 7, 64, 7, 90, seed=4)
    ours = rows(agent, prompts, training=False)
    assert all(answered(url) > n for url, n in zip(urls, before, strict=True))
    twin = twin_with_hf(agent, base)
    assert same(ours, rows(twin, prompts, training=False))
    twin.clean_up()


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.6}, {"temperature": 1.4, "top_k": 20, "top_p": 0.8, "min_p": 0.1}],
    ids=str,
)
def test_log_probs_are_the_trainers(make_agent: MakeAgent, settings: dict[str, Any]) -> None:
    agent = make_agent(**settings)
    found = train(agent, 3)
    assert found["importance_weight_mean"] == pytest.approx(1.0, abs=1e-3)
    assert found["importance_weight_max"] == pytest.approx(1.0, abs=1e-3)
    assert agent.generator.probe_difference < 1e-4


def test_samples_do_not_depend_on_the_server(
    make_agent: MakeAgent, config: VLLMConfig, urls: tuple[str, ...]
) -> None:
    """Each request has a seed; only rounding could make a difference, and here it does not."""
    prompts = prompts_of(*range(1, 61))
    settings = {"temperature": 1.5, "seed": 3}
    both = rows(make_agent(**settings), prompts)
    for url in urls:
        agent = make_agent(vllm_config=replace(config, server_urls=(url,)), **settings)
        assert same(rows(agent, prompts), both)
    for prompt, row in zip(prompts, both, strict=True):  # in order
        assert (row[:, : prompt["input_ids"].shape[1]] == prompt["input_ids"]).all()
    assert not same(rows(make_agent(temperature=1.5, seed=3, top_k=5), prompts), both)


def test_limits_and_ends_of_completions(make_agent: MakeAgent) -> None:
    agent = make_agent(
        temperature=2.0, top_k=0, top_p=1.0, group_size=16, max_output_tokens=90, max_model_len=100
    )
    action = agent.get_action(prompts_of(4, 80))
    assert action.sampling_logps is not None
    reported = iter(action.sampling_logps)
    ended = 0
    for ids, mask, room in zip(*action, (90, 20), strict=True):
        assert (mask.sum(1) <= room).all()
        for row, inside in zip(ids[:, 1:], mask, strict=True):
            logps = next(reported)
            assert logps is not None and len(logps) == inside.sum()
            ends = (row[inside] == 258).nonzero().flatten()
            assert ends.tolist() in ([], [len(logps) - 1])
            ended += len(ends)
    assert ended


def test_texts_end_completions_where_they_do_without_vllm(
    make_agent: MakeAgent, base: PreTrainedModel
) -> None:
    """Within the tokens that a server sends at a time."""
    settings = {"stop_sequences": ["e", "12"], "max_output_tokens": 80}
    prompts = prompts_of(*range(5, 40))
    twin = agent_on(base, use_vllm=False, vllm_config=None, **settings)
    expected = rows(twin, prompts, training=False)
    twin.clean_up()
    assert len({row.shape[1] - n for n, row in enumerate(expected, 5)}) > 3
    assert same(rows(make_agent(**settings), prompts, training=False), expected)


def test_agents_in_several_processes_sample_from_their_own_adapters(
    make_agent: MakeAgent, base: PreTrainedModel, config: VLLMConfig, tmp_path: Path
) -> None:
    """A pool and a directory each, as other processes have."""
    agents = [
        make_agent(vllm_config=replace(config, lora_staging_dir=str(tmp_path / name)))
        for name in ("first", "second")
    ]
    for seed, agent in enumerate(agents):
        train(agent, 3, seed=10 * seed)
    prompts = prompts_of(3, 20, 40)
    found = []
    for agent in agents:
        twin = twin_with_hf(agent, base)
        found.append(rows(agent, prompts, training=False))
        assert same(found[-1], rows(twin, prompts, training=False))
        twin.clean_up()
    assert not same(*found)


def test_servers_keep_nothing_of_an_agent(make_agent: MakeAgent, urls: tuple[str, ...]) -> None:
    agent = make_agent()
    train(agent, 3)
    adapter = agent.generator._served.name
    assert all(adapter in served(url) for url in urls)
    prefix = adapter.rsplit("-", 1)[0]
    assert all(sum(name.startswith(prefix) for name in served(url)) == 1 for url in urls)
    agent.clean_up()
    assert not any(name.startswith(prefix) for url in urls for name in served(url))


def test_an_agent_learns(make_agent: MakeAgent) -> None:
    """To say tokens with an even number; a server with an old adapter would go on as before."""
    agent = make_agent(batch_size=64, group_size=16, lr=2e-3, temperature=1.0, top_p=1.0, top_k=0)
    shares = []
    for step in range(10):
        action = agent.get_action(prompts_of(*[8] * 4, seed=step))
        groups = zip(*action, strict=True)
        rewards = torch.stack(
            [((ids[:, 1:] % 2 == 0) & mask).sum(1) / mask.sum(1) for ids, mask in groups]
        )
        shares.append(float(rewards.mean()))
        agent.learn((*action, rewards), sampling_logps=action.sampling_logps)
    assert shares[0] < 0.8
    assert sum(shares[-3:]) / 3 > 0.95


def test_what_a_server_refuses_is_an_error_with_its_message(
    make_agent: MakeAgent, urls: tuple[str, ...], config: VLLMConfig, tmp_path: Path
) -> None:
    agent = make_agent()
    train(agent)
    pool, adapter = agent.generator.engine, agent.generator._served
    with pytest.raises(EngineError, match=rf"{urls[0]}|{urls[1]}.*\(400\).*[Tt]oken"):
        pool.complete([Request([10**6], {"n": 1, "max_tokens": 1}, adapter)])
    with pytest.raises(EngineError, match=r"No adapter found.*lora_staging_dir"):
        pool.load_adapter(StagedAdapter("nowhere", 1, str(tmp_path / "nowhere")))
    agent.get_action(prompts_of(3))  # both are still there
    assert not any(server.dropped for server in pool._servers)


def test_a_wrong_key_is_an_error_at_once(
    config: VLLMConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "another")
    with pytest.raises(EngineError, match=r"refused \(401\).*Unauthorized"):
        ServerPool(config, 64)


def test_servers_for_shorter_rows_are_refused(make_agent: MakeAgent) -> None:
    with pytest.raises(ValueError, match=r"rows of up to 128 tokens.*--max-model-len 200"):
        make_agent(max_model_len=200)


def test_a_server_that_is_not_there_is_named(make_agent: MakeAgent, config: VLLMConfig) -> None:
    urls = (config.server_urls[0], "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"startup_timeout=2 s for the vLLM server .*:9, but it"):
        make_agent(vllm_config=replace(config, server_urls=urls, startup_timeout=2))
    assert time.monotonic() - started < 10


def test_servers_die_and_come_back(
    base: PreTrainedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One story, because a server takes half a minute to start."""
    plain, right = LocalServer(tmp_path), LocalServer(tmp_path, *TRAINER_LOGPROBS)
    try:
        plain.wait()
        right.wait()
        config = VLLMConfig(
            server_urls=(plain.url, right.url),
            lora_staging_dir=str(tmp_path / "adapters"),
            startup_timeout=60,
            request_timeout=60,
            max_retries=2,
        )
        _refused_without_the_extension(base, config, plain)
        plain.kill()
        back = LocalServer(tmp_path, *TRAINER_LOGPROBS, port=plain.port)
        back.wait()
        agent = agent_on(base, vllm_config=config)
        _loses_no_sample(agent, killed=back, left=right, log=caplog)
        back = LocalServer(tmp_path, *TRAINER_LOGPROBS, port=plain.port)
        back.wait()
        _is_used_again(agent, back, log=caplog)
        _fails_when_all_are_gone(agent, back, right)
        agent.clean_up()
    finally:
        plain.kill()
        right.kill()
        back.kill()


def _refused_without_the_extension(
    base: PreTrainedModel, config: VLLMConfig, plain: LocalServer
) -> None:
    agent = agent_on(base, vllm_config=config)
    message = rf"server {plain.url} reports log-probs.*--worker-extension-cls .*TrainerLogprobs"
    with pytest.raises(PolicyMismatchError, match=message):
        agent.get_action(prompts_of(3))
    agent.clean_up()


def _during(rollout: Callable[[], Any], do: Callable[[], None]) -> Any:
    """Do something half a second after a rollout has begun."""
    timer = threading.Timer(0.5, do)
    timer.start()
    try:
        return rollout()
    finally:
        timer.join()


def _loses_no_sample(
    agent: GRPO, killed: LocalServer, left: LocalServer, log: pytest.LogCaptureFixture
) -> None:
    prompts = prompts_of(*[10] * 200)
    agent.get_action(prompts_of(3))  # the adapter is there
    with log.at_level(logging.WARNING):
        action = _during(lambda: agent.get_action(prompts), killed.kill)
    assert [ids.shape[0] for ids in action.completion_ids] == [4] * 200
    for prompt, ids in zip(prompts, action.completion_ids, strict=True):
        assert (ids[:, :10] == prompt["input_ids"]).all()
    assert f"server {killed.url} is dropped" in log.text
    assert f"Left: {left.url}" in log.text
    assert log.text.count("is dropped") == 1


def _is_used_again(agent: GRPO, back: LocalServer, log: pytest.LogCaptureFixture) -> None:
    agent.get_action(prompts_of(3))
    assert answered(back.url) == 0
    train(agent, 2)
    agent.get_action(prompts_of(*[10] * 8))
    assert f"server {back.url} is back" in log.text
    assert answered(back.url) > 0


def _fails_when_all_are_gone(agent: GRPO, *servers: LocalServer) -> None:
    def kill() -> None:
        for server in servers:
            server.kill()

    started = time.monotonic()
    with pytest.raises(EngineError, match="no vLLM server is left") as caught:
        _during(lambda: agent.get_action(prompts_of(*[10] * 200)), kill)
    # Three attempts, with 0.5 s and 1 s at most between them, on one server and then on the other.
    assert time.monotonic() - started < 15
    assert all(server.url in str(caught.value) for server in servers)
