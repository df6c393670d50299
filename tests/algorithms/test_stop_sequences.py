"""The ``stop_sequences`` of an agent: what rewards, masks and the next turn see of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agent_helpers import make_agent, small_model
from datasets import Dataset

from agilerl.algorithms import GRPO
from agilerl.llm_envs import ReasoningGym, TokenObservationWrapper
from agilerl.testing import (
    SPELL_BACKWARD_CONVERSATION,
    bundled_model_path,
    byte_tokenizer,
    load_bundled_model,
)

TOKENIZER = byte_tokenizer()
QUESTION = "Spell this word backward (example: sun -> nus): {}"
WORDS = ("bawn", "flawed", "pyrrol")
DATA = Dataset.from_dict({"question": [QUESTION.format(word) for word in WORDS], "answer": WORDS})


@pytest.fixture
def bundled() -> dict[str, Any]:
    model, _ = load_bundled_model()
    return {"actor_network": model, "max_output_tokens": 10, "max_model_len": 200}


def gym(seen: list[str]) -> ReasoningGym:
    def reward(completion: str, answer: str, question: str) -> float:
        seen.append(completion)
        return float(len(completion))

    return ReasoningGym(
        DATA, DATA, TOKENIZER, reward, SPELL_BACKWARD_CONVERSATION, data_batch_size_per_gpu=3
    )


def answered(agent: GRPO) -> list[str]:
    """What the reward sees of greedy answers."""
    seen: list[str] = []
    agent.test(gym(seen))
    return seen


@pytest.mark.parametrize("stops", ["w", ["w"], ("w",), ["w", "wb"]])
def test_rewards_see_the_text_that_ended_a_completion(bundled: dict[str, Any], stops: Any) -> None:
    assert answered(make_agent(**bundled)) == ["nwab", "dewalf", "lorryp"]
    assert answered(make_agent(**bundled, stop_sequences=stops)) == ["nw", "dew", "lorryp"]


def test_every_generated_token_is_an_action_and_trained(bundled: dict[str, Any]) -> None:
    agent = make_agent(**bundled, stop_sequences=["w", "r"], temperature=0.7, group_size=4)
    seen: list[str] = []
    env = gym(seen)
    prompts = env.reset()
    action = agent.get_action(prompts)
    _, rewards = env.step(action.completion_ids)[:2]
    texts = [
        TOKENIZER.decode(row[1:][mask])
        for rows, masks in zip(action.completion_ids, action.action_masks, strict=True)
        for row, mask in zip(rows, masks, strict=True)
    ]
    assert any(text[-1] in "wr" for text in texts)
    for text, completion in zip(texts, seen, strict=True):
        assert text.removesuffix("<|im_end|>") == completion
        assert text[-1] in "wr" or text.endswith("<|im_end|>") or len(text) == 10
    metrics = agent.learn((*action, rewards))
    tokens = sum(int(mask.sum()) for mask in action.action_masks)
    assert metrics["completion_length"] == tokens / 12


def test_rewards_know_that_a_stop_sequence_ended_a_completion(bundled: dict[str, Any]) -> None:
    """Its own is the longest of its group, so that the ids alone look cut off."""
    seen: list[tuple[str, str]] = []

    def reward(completion: str, finish_reason: str) -> float:
        seen.append((completion, finish_reason))
        return 0.0

    env = ReasoningGym(DATA, DATA, TOKENIZER, reward, SPELL_BACKWARD_CONVERSATION, 3)
    make_agent(**bundled, stop_sequences=["w"]).test(env)
    assert sorted(seen) == [("dew", "stop"), ("lorryp", "stop"), ("nw", "stop")]
    seen.clear()
    make_agent(**(bundled | {"max_output_tokens": 4})).test(env)
    assert sorted(seen) == [("dewa", "length"), ("lorr", "length"), ("nwab", "length")]


class Repeat:
    """Asks the same word again and again."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return QUESTION.format("flawed"), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert action == "dew"
        return QUESTION.format("flawed"), 1.0, False, False, {}


def test_the_template_ends_a_turn_that_a_text_ended(bundled: dict[str, Any]) -> None:
    agent = make_agent(**(bundled | {"max_model_len": 400}), stop_sequences=["w"])
    env = TokenObservationWrapper(Repeat(), TOKENIZER, max_turns=2)
    with agent.rollout():
        prompt, _ = env.reset()
        first = agent.get_action([prompt], training=False)
        prompt, *_ = env.step(first.completion_ids[0])
    ids, mask, _, _ = env.get_episode_data()
    assert TOKENIZER.decode(ids[0, 1:][mask[0]]) == "dew"
    assert TOKENIZER.decode(prompt["input_ids"][0]).count("dew<|im_end|>\n<|im_start|>user") == 1


def test_clones_and_checkpoints_have_them(bundled: dict[str, Any], tmp_path: Path) -> None:
    given = bundled | {"actor_network": None, "model_name": str(bundled_model_path())}
    agent = make_agent(**given, stop_sequences=["w"])
    assert answered(agent.clone()) == ["nw", "dew", "lorryp"]
    agent.save_checkpoint(tmp_path / "saved")
    loaded = GRPO.load(tmp_path / "saved")
    assert loaded.stop_sequences == ["w"]
    assert answered(loaded) == ["nw", "dew", "lorryp"]


def test_a_changed_one_is_used_at_the_next_call(bundled: dict[str, Any]) -> None:
    agent = make_agent(**bundled)
    agent.stop_sequences = "al"
    assert answered(agent) == ["nwab", "dewal", "lorryp"]
    agent.stop_sequences = None
    assert answered(agent) == ["nwab", "dewalf", "lorryp"]


@pytest.mark.parametrize("how", ["memory", "no tokenizer", "another"])
def test_where_the_tokenizer_is_looked_for(how: str, tmp_path: Path) -> None:
    model = small_model()
    if how != "memory":
        model.save_pretrained(tmp_path)
        model.name_or_path = str(tmp_path)
    if how == "another":
        byte_tokenizer().save_pretrained(tmp_path)
        agent = make_agent(model=model, stop_sequences=["a"])
        assert agent.sampling_config().stop_sequences == ("a",)
        return
    place = "no directory" if how == "memory" else str(tmp_path)
    with pytest.raises(ValueError, match=rf"stop_sequences is \('a',\).*{place}.*model_name"):
        make_agent(model=model, stop_sequences=["a"])
    assert all(p.requires_grad for p in model.parameters()), "left as it was"


def test_a_tokenizer_that_runs_code_is_refused(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    model = small_model()
    model.save_pretrained(tmp_path)
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w').write('')\nclass Own: ...\n")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": [null, "own.Own"]}, "tokenizer_class": "Own"}'
    )
    with pytest.raises(ValueError, match="stop_sequences"):
        make_agent(
            model_name=str(tmp_path),
            stop_sequences=["a"],
            model_config={"trust_remote_code": True},
        )
    assert not ran.exists()
