"""An engine that dies or hangs ends in an error, and none outlives its trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from processes import has_ended
from resume_helpers import make_agents, run_reasoning
from transformers import PreTrainedModel
from vllm_agents import CONFIG, agent_on, prompts_of, train

from agilerl.algorithms import GRPO
from agilerl.llm.generation.vllm.engine import EngineError
from agilerl.testing import bundled_model_path, load_bundled_model


def process_of(agent: GRPO) -> psutil.Process:
    return psutil.Process(agent.generator.engine._process.pid)


@pytest.fixture(scope="module")
def other_base() -> PreTrainedModel:
    """Engines of it may be ended without harm to other tests."""
    return load_bundled_model()[0]


@pytest.fixture(scope="module")
def impatient(other_base: PreTrainedModel) -> Iterator[GRPO]:
    agent = agent_on(other_base, max_output_tokens=100)
    agent.get_action(prompts_of(3))  # the first request compiles, without a sign of life
    agent.generator.engine._config = replace(CONFIG, request_timeout=2.0)
    yield agent
    agent.clean_up()


def test_an_interrupted_request_disturbs_no_later_one(impatient: GRPO) -> None:
    prompts = prompts_of(*[9] * 20)
    expected = impatient.get_action(prompts_of(5), training=False).completion_ids[0]
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(100):
            impatient.get_action(prompts)
    found = impatient.get_action(prompts_of(5), training=False).completion_ids[0]
    assert torch.equal(found, expected)


def test_what_vllm_refuses_is_an_error_that_names_it(impatient: GRPO) -> None:
    impatient.temperature = 3.0  # by hand: the constructor refuses it
    with pytest.raises(EngineError, match=r"refused a request: .*temperature must be in \[0, 2\]"):
        impatient.get_action(prompts_of(3))
    impatient.temperature = 0.9
    impatient.get_action(prompts_of(3))


def test_a_hang_ends_in_an_error(impatient: GRPO, other_base: PreTrainedModel) -> None:
    """The last test of this engine: later agents on the base get another."""
    process = process_of(impatient)
    process.suspend()
    started = time.monotonic()
    with pytest.raises(EngineError, match=rf"process {process.pid}\) made no progress for 2 s"):
        impatient.get_action(prompts_of(*[100] * 3000))  # more than fits into the socket
    assert time.monotonic() - started < 20
    assert has_ended(process.pid)
    with pytest.raises(EngineError, match="has ended"):
        impatient.get_action(prompts_of(3))


def test_a_run_whose_engine_dies_keeps_what_was_trained(
    other_base: PreTrainedModel, tmp_path: Path
) -> None:
    arguments = {"vllm_config": CONFIG, "use_vllm": True, "max_model_len": 128}
    (agent,) = make_agents(1, actor_network=other_base, **arguments)
    train(agent)
    pid = process_of(agent).pid
    calls = iter(range(3))

    def kill_in_the_second_iteration() -> None:
        if next(calls) == 1:
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(EngineError, match="exit status -9") as caught:
        run_reasoning(tmp_path, hook=kill_in_the_second_iteration, pop=[agent])
    saved = next(tmp_path.glob("crashed_in_iteration_*")) / "agent_0"
    assert any(str(saved.parent) in note for note in caught.value.__notes__)
    before = {n: p.clone() for n, p in agent.policy.parameters().items()}
    agent.clean_up()
    # A new agent on the base starts a new engine.
    (again,) = make_agents(1, actor_network=other_base, **arguments)
    again.load_checkpoint(saved)
    for name, parameter in again.policy.parameters().items():
        assert torch.equal(parameter, before[name])
    train(again)
    assert process_of(again).pid != pid
    again.clean_up()


def test_an_engine_that_does_not_start(other_base: PreTrainedModel, tmp_path: Path) -> None:
    config = replace(CONFIG, vllm_model_name_or_path=str(tmp_path))
    children = set(psutil.Process().children())
    with pytest.raises(EngineError, match=r"failed: .*\n"):
        agent_on(other_base, vllm_config=config)
    assert set(psutil.Process().children()) <= children
    assert all(not name.startswith("base_model") for name in other_base.state_dict())


def test_another_base_is_caught(other_base: PreTrainedModel) -> None:
    config = replace(CONFIG, vllm_model_name_or_path=str(bundled_model_path("guess_the_number")))
    agent = agent_on(other_base, vllm_config=config)
    with pytest.raises(EngineError, match=r"log-probs|vocab|out of"):
        agent.get_action(prompts_of(3))
    process = process_of(agent)
    agent.clean_up()
    assert has_ended(process.pid)


@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_no_engine_outlives_its_trainer(end: str) -> None:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("generate_forever.py"))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    fork = 0
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("ENGINE "))
        pid, fork, *directories = line.split()[1:]
        assert not has_ended(int(pid))
        process.send_signal(signal.Signals[end])
        assert process.wait(60) != 0
        assert not has_ended(int(fork))
    finally:
        process.kill()
        if fork:
            os.kill(int(fork), signal.SIGKILL)
        process.communicate()
    deadline = time.monotonic() + 30
    while not has_ended(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert has_ended(int(pid))
    # Log, adapters and base: what a killed trainer has left, its engine removes.
    assert not [directory for directory in directories if Path(directory).exists()]
