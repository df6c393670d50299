"""The vector environment on a small game whose ids are the test's own."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from agilerl import checks
from agilerl.algorithms.core import evaluation
from agilerl.llm_envs import (
    EVALUATION_SEED_START,
    EnvironmentFailure,
    SyncMultiTurnVecEnv,
    TokenObservationWrapper,
    row_of_seed,
)
from agilerl.llm_envs.dataset.repetition import RepetitionCheck
from agilerl.testing import byte_tokenizer
from agilerl.typing import ActionResult, ReasoningPrompts

ANSWER = 9


class Game:
    """Prompt ``[1, seed]``; each answer but the last gets the feedback ``[50 + turn]``.

    Lasts ``1 + seed % 3`` turns, with the rewards 1, 2, 3.
    """

    def __init__(self, turns: int = 3) -> None:
        self.max_turns = turns
        self.seed = -1
        self.turn = 0
        self.ids: list[int] = []
        self.turn_ids: list[int] = []
        self.closed = False

    def reset(self, seed: int | None = None) -> Any:
        assert seed is not None
        self.seed, self.turn = seed, 0
        self.ids, self.turn_ids = [1, seed], [-1, -1]
        return self.prompt(), {}

    def step(self, full_completion_ids: torch.Tensor) -> Any:
        self.record(full_completion_ids)
        done = self.turn == 1 + self.seed % 3
        if not done:
            self.ids.append(50 + self.turn)
            self.turn_ids.append(-1)
        return self.prompt(), float(self.turn), done, False, {}

    def record(self, full_completion_ids: torch.Tensor) -> None:
        answer = full_completion_ids[0, len(self.ids) :].tolist()
        self.ids += answer
        self.turn_ids += [self.turn] * len(answer)
        self.turn += 1

    def get_episode_data(self) -> Any:
        turn_ids = torch.tensor([self.turn_ids[1:]])
        return torch.tensor([self.ids]), turn_ids >= 0, turn_ids, torch.zeros(self.max_turns)

    def close(self) -> None:
        self.closed = True

    @property
    def transcript(self) -> str:
        return f"{self.turn} turns"

    def prompt(self) -> ReasoningPrompts:
        ids = torch.tensor([self.ids])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "text": str(self.ids)}


def act(prompts: list[ReasoningPrompts]) -> ActionResult:
    """Answers the n-th turn with n tokens; their log-probs are -n, -n - 0.5, ..."""
    answers = [1 + int((p["input_ids"] >= 50).sum()) for p in prompts]
    ids = [
        torch.cat([p["input_ids"], torch.full((1, n), ANSWER)], 1)
        for p, n in zip(prompts, answers, strict=True)
    ]
    logps: list[torch.Tensor | None] = [-n - torch.arange(n) / 2 for n in answers]
    return ActionResult(ids, [], logps)


def vec_env(
    factory: Callable[..., Any] = Game, batch_size: int = 3, **kwargs: Any
) -> SyncMultiTurnVecEnv:
    return SyncMultiTurnVecEnv(factory, batch_size, **kwargs)


def seeds_of(prompts: list[ReasoningPrompts]) -> list[int]:
    return [int(p["input_ids"][0, 1]) for p in prompts]


def test_a_batch_position_by_position() -> None:
    episodes = vec_env(batch_size=2).play(act, [3, 4])
    assert [ids.tolist() for ids in episodes.token_ids] == [
        [[1, 3, 9]],
        [[1, 4, 9, 51, 9, 9]],
    ]
    assert [mask.int().tolist() for mask in episodes.action_masks] == [[[0, 1]], [[0, 1, 0, 1, 1]]]
    assert [ids.tolist() for ids in episodes.turn_ids] == [[[-1, 0]], [[-1, 0, -1, 1, 1]]]
    assert episodes.rewards.tolist() == [[1, 0, 0], [1, 2, 0]]
    assert episodes.rewards.dtype == torch.float32
    assert episodes.returns.tolist() == [1, 3]
    assert episodes.turns.tolist() == [1, 2]
    assert episodes.sampling_logps is not None
    assert [row.tolist() for row in episodes.sampling_logps if row is not None] == [
        [-1.0],
        [-1.0, -2.0, -2.5],
    ]
    assert episodes.trajectory_ids.tolist() == [0, 1]
    assert not episodes.truncated.any()
    assert not episodes.failed.any()
    assert episodes.first_prompts == ["[1, 3]", "[1, 4]"]
    assert episodes.transcripts == ["1 turns", "2 turns"]
    assert episodes.generated_tokens == 4
    assert episodes.generation_seconds > 0
    assert episodes.environment_seconds > 0


def test_a_group_shares_its_seed_and_only_unfinished_episodes_are_prompted() -> None:
    env = vec_env(batch_size=3, group_size=2)
    prompts = env.reset([3, 5, 4])  # 1, 3 and 2 turns
    assert seeds_of(prompts) == [3, 3, 5, 5, 4, 4]
    prompts = env.step(act(prompts).completion_ids)
    assert seeds_of(prompts) == [5, 5, 4, 4]
    with pytest.raises(RuntimeError, match="episodes are not over"):
        env.episodes()
    prompts = env.step(act(prompts).completion_ids)
    assert seeds_of(prompts) == [5, 5]
    assert env.step(act(prompts).completion_ids) == []
    episodes = env.episodes()
    assert episodes.turns.tolist() == [1, 1, 3, 3, 2, 2]
    assert episodes.sampling_logps is None


def test_a_turn_without_log_probs_leaves_its_row_without() -> None:
    def first_only(prompts: list[ReasoningPrompts]) -> ActionResult:
        result = act(prompts)
        logps = [None if int(p["input_ids"][0, -1]) >= 50 else torch.zeros(1) for p in prompts]
        return ActionResult(result.completion_ids, [], logps)

    episodes = vec_env(batch_size=2).play(first_only, [0, 1])
    assert episodes.sampling_logps is not None
    assert [row is None for row in episodes.sampling_logps] == [False, True]


def test_too_few_log_probs_are_an_error() -> None:
    def none_at_all(prompts: list[ReasoningPrompts]) -> ActionResult:
        return ActionResult(act(prompts).completion_ids, [], [torch.zeros(0) for _ in prompts])

    with pytest.raises(ValueError, match="turn 0 of the episode with seed 7 has 1 generated"):
        vec_env(batch_size=1).play(none_at_all, [7])


def test_steps_run_at_the_same_time() -> None:
    barrier = threading.Barrier(6)

    class Meeting(Game):
        def step(self, full_completion_ids: torch.Tensor) -> Any:
            barrier.wait(timeout=5)
            return super().step(full_completion_ids)

    episodes = vec_env(Meeting, batch_size=6, max_workers=6).play(act, [0] * 6)
    assert not episodes.failed.any()


def test_results_do_not_depend_on_which_thread_is_first() -> None:
    class Uneven(Game):
        def step(self, full_completion_ids: torch.Tensor) -> Any:
            time.sleep(0.02 if self.seed < 4 else 0.0)
            return super().step(full_completion_ids)

    threaded = vec_env(Uneven, batch_size=8, max_workers=8).play(act, range(8))
    alone = vec_env(Game, batch_size=8, max_workers=1).play(act, range(8))
    for ours, theirs in zip(threaded.token_ids, alone.token_ids, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(threaded.rewards, alone.rewards)


class SeedsTheGlobalRandom(Game):
    """As GEM's games: seeds and draws from the ``random`` module, here slowly."""

    def reset(self, seed: int | None = None) -> Any:
        random.seed(seed)
        time.sleep(0.002)
        drawn = random.randrange(2, 50)
        _, info = super().reset(seed)
        self.ids[1] = drawn
        return self.prompt(), info


def test_environments_that_draw_from_the_global_random_are_reproducible() -> None:
    expected = []
    for seed in range(4):
        random.seed(seed)
        expected += [random.randrange(2, 50)] * 3
    env = vec_env(SeedsTheGlobalRandom, batch_size=4, group_size=3)
    for _ in range(3):
        assert seeds_of(env.reset(range(4))) == expected


class Fails(Game):
    """Fails in the second turn where the seed is 8."""

    def step(self, full_completion_ids: torch.Tensor) -> Any:
        if self.seed == 8 and self.turn == 1:
            self.record(full_completion_ids)
            return self.fail()
        return super().step(full_completion_ids)

    def fail(self) -> Any:
        raise ConnectionError("the game server is gone")


def test_a_crash_ends_one_episode(caplog: pytest.LogCaptureFixture) -> None:
    made: list[Game] = []

    def factory() -> Game:
        made.append(Fails())
        return made[-1]

    env = vec_env(factory, batch_size=3, on_failure=-0.5)
    episodes = env.play(act, [5, 8, 2])
    assert episodes.failed.tolist() == [False, True, False]
    assert episodes.turns.tolist() == [3, 2, 3]
    assert episodes.rewards.tolist() == [[1, 2, 3], [1, -0.5, 0], [1, 2, 3]]
    assert episodes.token_ids[1].tolist() == [[1, 8, 9, 51, 9, 9]]
    assert episodes.turn_ids[1].tolist() == [[-1, 0, -1, 1, 1]]
    assert (env.failures, env.timeouts) == (1, 0)
    (record,) = caplog.records
    assert "1 of 3 episodes failed and got on_failure=-0.5" in record.message
    assert "episode 1 (seed 8) in turn 1: ConnectionError: the game server" in record.message
    deadline = time.monotonic() + 10.0
    while not made[1].closed and time.monotonic() < deadline:
        time.sleep(0.001)  # it is closed in the background
    assert [game.closed for game in made] == [False, True, False]
    env.play(act, [5, 2, 2])
    assert len(made) == 4


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (lambda p: (p, float("nan"), True, False, {}), "reward nan, which is not a finite"),
        (lambda p: (p, None, True, False, {}), "reward None of type NoneType"),
        (lambda p: (p, 1.0, True, {}), r"step must return \(prompt, reward"),
        (lambda p: None, r"step must return \(prompt, reward.* got None"),
        (lambda p: ("text", 1.0, False, False, {}), r"prompt dict with input_ids.* got 'text'"),
        (lambda p: (p, 1.0, None, False, {}), "terminated = None"),
    ],
)
def test_a_wrong_return_value_ends_one_episode(
    outcome: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(Fails):
        def fail(self) -> Any:
            return outcome(self.prompt())

    episodes = vec_env(Wrong, batch_size=2, on_failure=-1.0).play(act, [5, 8])
    assert episodes.failed.tolist() == [False, True]
    assert episodes.rewards.tolist() == [[1, 2, 3], [1, -1, 0]]
    assert re.search(message, caplog.text)


def test_a_hang_ends_one_episode() -> None:
    release, made = threading.Event(), []

    class Hangs(Fails):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def fail(self) -> Any:
            release.wait()
            self.ids.append(77)  # Too late to matter.
            return self.prompt(), 100.0, True, False, {}

    env = vec_env(Hangs, batch_size=3, step_timeout=1.0, max_workers=1)
    episodes = env.play(act, [5, 8, 2])
    release.set()
    assert episodes.failed.tolist() == [False, True, False]
    assert episodes.rewards.tolist() == [[1, 2, 3], [1, 0, 0], [1, 2, 3]]
    assert episodes.token_ids[1].tolist() == [[1, 8, 9, 51, 9, 9]]
    assert (env.failures, env.timeouts) == (1, 1)
    assert not made[1].closed  # A thread still had it.
    assert not env.play(act, [5, 2, 2]).failed.any()
    assert len(made) == 4


class ResetFails(Game):
    def reset(self, seed: int | None = None) -> Any:
        if seed == 8:
            raise ConnectionError("no such game")
        return super().reset(seed)


def test_a_failing_reset_leaves_a_row_that_trains_nothing() -> None:
    env = vec_env(ResetFails, batch_size=2, group_size=2, on_failure=-1.0)
    prompts = env.reset([8, 3])
    assert seeds_of(prompts) == [3, 3]
    assert env.step(act(prompts).completion_ids, act(prompts).sampling_logps) == []
    episodes = env.episodes()
    assert episodes.failed.tolist() == [True, True, False, False]
    assert episodes.token_ids[0].tolist() == [[0, 0]]
    assert episodes.action_masks[0].tolist() == [[False]]
    assert episodes.turn_ids[0].tolist() == [[-1]]
    assert episodes.rewards.tolist() == [[-1, 0, 0], [-1, 0, 0], [1, 0, 0], [1, 0, 0]]
    assert episodes.turns.tolist() == [0, 0, 1, 1]
    assert episodes.first_prompts[:2] == ["", ""]
    assert episodes.sampling_logps is not None
    assert [len(row) for row in episodes.sampling_logps if row is not None] == [0, 0, 1, 1]


def test_more_than_half_of_a_batch_failing_is_an_error() -> None:
    env = vec_env(Fails, batch_size=3)
    prompts = env.reset([8, 5, 8])
    prompts = env.step(act(prompts).completion_ids)
    with pytest.raises(
        EnvironmentFailure, match=r"2 of 3 episodes have failed, more than.*=0.5.*seed 8"
    ) as caught:
        env.step(act(prompts).completion_ids)
    assert isinstance(caught.value.__cause__, ConnectionError)
    with pytest.raises(RuntimeError, match="no prompts are waiting"):
        env.step([])
    assert not env.play(act, [5, 5, 5]).failed.any()


def test_failing_resets_and_factories_are_counted_too() -> None:
    with pytest.raises(EnvironmentFailure, match=r"2 of 3 episodes.*before its first turn"):
        vec_env(ResetFails).reset([8, 8, 1])
    with pytest.raises(EnvironmentFailure, match=r"2 of 3.*unexpected keyword argument 'size'"):
        vec_env(Game, env_config={"size": 3}).reset([1, 2, 3])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda data: data[:3], r"get_episode_data must return \(token_ids"),
        (lambda data: [1, 2, 3, 4], "four tensors"),
        (lambda data: (data[0][0], *data[1:]), r"\(R, T\) ids"),
        (lambda data: (torch.tensor(3), *data[1:]), r"\(R, T\) ids"),
        (lambda data: (*data[:2], data[2] + 5, data[3]), "turn ids .* turns count from 0"),
    ],
)
def test_wrong_episode_data_fails_the_episode(
    data: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(Game):
        def get_episode_data(self) -> Any:
            right = super().get_episode_data()
            return data(right) if self.seed == 3 else right

    episodes = vec_env(Wrong, batch_size=2).play(act, [3, 4])
    assert episodes.failed.tolist() == [True, False]
    assert episodes.token_ids[0].tolist() == [[0, 0]]
    assert episodes.rewards.tolist() == [[0, 0, 0], [1, 2, 0]]
    assert re.search(message, caplog.text)


def test_max_turns_ends_episodes() -> None:
    episodes = vec_env(Game, max_turns=2).play(act, [3, 4, 5])
    assert episodes.turns.tolist() == [1, 2, 2]
    assert episodes.truncated.tolist() == [False, False, True]
    assert episodes.rewards.tolist() == [[1, 0], [1, 2], [1, 2]]
    longer = vec_env(Game, max_turns=5).play(act, [3, 4, 5])
    assert longer.rewards.shape == (3, 5)


def test_sizes_may_change_between_batches_and_environments_are_kept() -> None:
    made: list[Game] = []

    def factory(turns: int) -> Game:
        made.append(Game(turns))
        return made[-1]

    env = vec_env(factory, batch_size=2, env_config={"turns": 4})
    assert env.play(act, [1, 2]).rewards.shape == (2, 4)
    env.group_size = 3
    assert env.play(act, [1, 2]).turns.tolist() == [2, 2, 2, 3, 3, 3]
    env.batch_size, env.group_size = 1, 2
    assert env.play(act, [0]).turns.tolist() == [1, 1]
    assert len(made) == 6
    env.close()
    assert all(game.closed for game in made)
    assert len(env.play(act, [0]).turns) == 2


def test_environments_can_be_made_beforehand() -> None:
    made: list[Game] = []

    def factory() -> Game:
        if len(made) == 2:
            made.append(Game())
            raise OSError("no more")
        made.append(Game())
        return made[-1]

    env = vec_env(factory, batch_size=3)
    assert env.made_environments() == []
    env.make_environments([0, 2])
    assert (env.made_environments(), len(made)) == ([0, 2], 2)
    env.make_environments([0, 1, 2])  # one of them fails
    assert (env.made_environments(), len(made)) == ([0, 2], 3)
    assert env.play(act, [1, 2, 3]).turns.tolist() == [2, 3, 1]
    assert (env.made_environments(), len(made)) == ([0, 1, 2], 4)
    env.close()
    assert env.made_environments() == []


def test_evaluation_plays_its_seeds_once_each() -> None:
    sizes: list[int] = []
    seeds: list[int] = []

    def greedy(prompts: list[ReasoningPrompts]) -> ActionResult:
        if prompts[0]["input_ids"].shape[1] == 2:
            sizes.append(len(prompts))
            seeds.extend(seeds_of(prompts))
        return act(prompts)

    env = vec_env(batch_size=2, group_size=2, evaluation_episodes=7)
    env.reset([1, 2])
    episodes = env.play_evaluation(greedy)
    assert sizes == [3, 4]
    assert seeds == list(range(EVALUATION_SEED_START, EVALUATION_SEED_START + 7))
    assert episodes.turns.tolist() == [1 + seed % 3 for seed in seeds]
    assert episodes.trajectory_ids.tolist() == list(range(7))
    with pytest.raises(RuntimeError, match="call reset"):
        env.step([])
    evaluation = env.evaluate(act, loop=2)
    assert evaluation.rewards.tolist() == episodes.returns.tolist() * 2
    assert evaluation.questions == episodes.first_prompts * 2
    assert evaluation.completions == episodes.transcripts * 2


class TextGame:
    """Says ``go`` for ever."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return f"start {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "go", 1.0, False, False, {}


@pytest.mark.parametrize("sliding", [False, True])
def test_with_the_wrapper(sliding: bool) -> None:
    """Log-probs follow their turns into the rows of a sliding window."""
    tokenizer = byte_tokenizer()

    def factory() -> TokenObservationWrapper:
        length = 80 if sliding else None
        return TokenObservationWrapper(
            TextGame(), tokenizer, 4, max_model_len=length, enable_sliding_window=sliding
        )

    turn = 0

    def numbered(prompts: list[ReasoningPrompts]) -> ActionResult:
        nonlocal turn
        turn += 1
        answer = torch.tensor([[*tokenizer.encode("ab"), tokenizer.eos_token_id]])
        ids = [torch.cat([p["input_ids"], answer], 1) for p in prompts]
        return ActionResult(ids, [], [torch.full((3,), float(turn)) for _ in prompts])

    episodes = vec_env(factory, batch_size=2).play(numbered, [1, 2])
    assert episodes.truncated.all()
    assert episodes.returns.tolist() == [4, 4]
    rows = [len(ids) for ids in episodes.token_ids]
    assert (rows[0] > 1) == sliding
    assert episodes.trajectory_ids.tolist() == [0] * rows[0] + [1] * rows[1]
    assert episodes.sampling_logps is not None
    masks = torch.cat(episodes.action_masks)
    turn_ids = torch.cat(episodes.turn_ids)
    for logps, mask, turns in zip(episodes.sampling_logps, masks, turn_ids, strict=True):
        assert logps is not None
        assert logps.tolist() == (turns[mask] + 1).tolist()
    assert all("go" in transcript for transcript in episodes.transcripts)


def test_a_text_environment_has_to_be_wrapped() -> None:
    with pytest.raises(TypeError, match=r"TextGame.* return TokenObservationWrapper\(env, "):
        vec_env(TextGame).reset([1, 2, 3])
    with pytest.raises(TypeError, match=r"NoneType.* has no reset and no step"):
        vec_env(lambda: None).reset([1, 2, 3])


def test_one_environment_cannot_play_two_episodes() -> None:
    game = Game()
    with pytest.raises(ValueError, match="same environment twice"):
        vec_env(lambda: game).reset([1, 2, 3])
    text_game, tokenizer = TextGame(), byte_tokenizer()
    with pytest.raises(ValueError, match="wrapped environment included"):
        vec_env(lambda: TokenObservationWrapper(text_game, tokenizer, 3)).reset([1, 2, 3])


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"env_factory": Game()}, TypeError, "env_factory is .*must be a function"),
        ({"env_config": [1]}, TypeError, "env_config is .*must be a dict"),
        ({"batch_size": 0}, ValueError, "batch_size is .*must be at least 1"),
        ({"group_size": 1.5}, TypeError, "group_size is .*must be an integer"),
        ({"max_turns": 0}, ValueError, "max_turns is .*must be at least 1"),
        ({"max_workers": 0}, ValueError, "max_workers is .*must be at least 1"),
        ({"reset_workers": 0}, ValueError, "reset_workers is .*must be at least 1"),
        ({"step_timeout": 0}, ValueError, "step_timeout is 0"),
        ({"on_failure": float("nan")}, ValueError, "on_failure is nan"),
        ({"evaluation_episodes": 0}, ValueError, "evaluation_episodes is .*must be at least 1"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        SyncMultiTurnVecEnv(**{"env_factory": Game, "batch_size": 2, **kwargs})


def test_bad_calls_change_nothing() -> None:
    env = vec_env(batch_size=2)
    with pytest.raises(RuntimeError, match="call reset"):
        env.step([])
    with pytest.raises(ValueError, match="1 seeds for a batch_size of 2"):
        env.reset([1])
    with pytest.raises(TypeError, match=r"seeds\[1\] is .2.; it must be an integer"):
        env.reset([1, "2"])  # type: ignore[list-item]
    prompts = env.reset([1, 2])
    right = act(prompts).completion_ids
    for wrong, error, match in (
        (
            [right[0][0], right[1]],
            ValueError,
            r"completion_ids\[0\] has shape \(3,\); it must be \(1, T\)",
        ),
        (right[:1], ValueError, "1 entries for the 2 prompts"),
        (right[::-1], ValueError, r"completion_ids\[0\] does not start with the 2 tokens"),
        (
            [right[0], right[1].float()],
            TypeError,
            r"completion_ids\[1\] is .*must be a tensor of token",
        ),
        (torch.cat(right), TypeError, "must be a list of tensors"),
    ):
        with pytest.raises(error, match=match):
            env.step(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sampling_logps has 1 entries for the 2"):
        env.step(right, [torch.zeros(1)])
    assert seeds_of(env.step(right)) == [1, 2]


def test_a_real_game_is_the_same_each_time() -> None:
    """GEM's games seed and draw from the global ``random``; the example in the text is drawn."""
    pytest.importorskip("gem")
    from gem.envs.game_env.guess_the_number import GuessTheNumberEnv

    tokenizer = byte_tokenizer()

    def factory() -> TokenObservationWrapper:
        return TokenObservationWrapper(GuessTheNumberEnv(1, 10, 4), tokenizer, 4)

    def guess_five(prompts: list[ReasoningPrompts]) -> ActionResult:
        answer = torch.tensor([[*tokenizer.encode(r"\boxed{5}"), tokenizer.eos_token_id]])
        return ActionResult([torch.cat([p["input_ids"], answer], 1) for p in prompts], [])

    env = vec_env(factory, batch_size=4, group_size=3)
    first = env.play(guess_five, range(4))
    again = env.play(guess_five, range(4))
    assert first.first_prompts == again.first_prompts
    assert len(set(first.first_prompts)) > 1
    assert first.transcripts == again.transcripts
    assert torch.equal(first.rewards, again.rewards)
    assert all(len(set(first.transcripts[i : i + 3])) == 1 for i in range(0, 12, 3))


def test_episodes_of_a_group_begin_with_the_same_prompt() -> None:
    class Unseeded(Game):
        def reset(self, seed: int | None = None) -> Any:
            return super().reset(next(seeds))

    seeds = iter([7, 7, 8, 9])
    env = SyncMultiTurnVecEnv(Unseeded, batch_size=2, group_size=2)
    with pytest.raises(ValueError, match=r"episodes 2 and 3 .* seed 4, .* random.Random\(seed\)"):
        env.reset([3, 4])
    with pytest.raises(RuntimeError, match="no prompts are waiting"):
        env.step([])
    seeds = iter([7, 7, 8, 8])
    assert len(env.reset([3, 4])) == 4


def test_a_group_whose_first_episode_failed_is_of_one_task_too() -> None:
    class Unseeded(Game):
        def reset(self, seed: int | None = None) -> Any:
            if (number := next(numbers)) == 0:
                raise ConnectionError("gone")
            return super().reset(number)

    env = SyncMultiTurnVecEnv(Unseeded, batch_size=2, group_size=4)
    numbers = iter([7, 7, 7, 7, 0, 0, 8, 9])
    with pytest.raises(ValueError, match="episodes 6 and 7 are of one group, with the seed 4"):
        env.reset([3, 4])
    numbers = iter([0, 7, 7, 7, 0, 0, 0, 9])
    assert len(env.reset([3, 4])) == 4


class Rows(Game):
    """A task per row of data; ``held_out``: evaluation has rows of its own."""

    def __init__(self, held_out: bool) -> None:
        super().__init__()
        self.test = range(100, 110) if held_out else range(10)

    def reset(self, seed: int | None = None) -> Any:
        assert seed is not None
        return super().reset(row_of_seed(seed, range(10), self.test))


@pytest.mark.parametrize("evaluated_first", [False, True])
@pytest.mark.parametrize(("held_out", "trained"), [(False, 1), (False, 10), (True, 10)])
def test_evaluation_prompts_that_are_trained_on_warn(
    held_out: bool,
    trained: int,
    evaluated_first: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "_warned", set())
    env = SyncMultiTurnVecEnv(lambda: Rows(held_out), batch_size=trained, evaluation_episodes=20)
    if evaluated_first:
        env.evaluate(act)
    env.play(act, range(trained))
    for _ in range(2):
        env.evaluate(act)
    said = f"Of the prompts of evaluation at least {10 * trained}% are in training too"
    assert [said in r.message for r in caplog.records] == ([] if held_out else [True])


def test_of_many_training_prompts_only_those_of_evaluation_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "_warned", set())
    check = RepetitionCheck("evaluation", "training", "keep them apart")
    check.trained_on(range(1000))
    check.evaluated_on(range(990, 1010))
    check.trained_on(range(1000, 2000))
    assert check._trained == set(range(990, 1010))


def test_evaluation_of_one_environment_is_on_evaluation_seeds() -> None:
    class Text:
        def reset(self, seed: int | None = None) -> Any:
            return f"seed {seed}", {}

        def step(self, action: str) -> Any:
            return "", 0.0, True, False, {}

    wrapper = TokenObservationWrapper(Text(), byte_tokenizer(), 1, apply_chat_template=False)
    first = [f"seed {EVALUATION_SEED_START + i}" for i in range(3)]
    assert wrapper.evaluate(act, 3).questions == first
    game = Game()
    seeds = [str([1, EVALUATION_SEED_START + i]) for i in range(3)]
    assert evaluation.evaluate(game, act, 3).questions == seeds


def test_rows_of_seeds() -> None:
    rows = [
        row_of_seed(seed, "abc", "xy")
        for seed in (0, 4, EVALUATION_SEED_START - 1, EVALUATION_SEED_START)
    ]
    assert rows == ["a", "b", "abc"[(EVALUATION_SEED_START - 1) % 3], "x"]
    with pytest.raises(ValueError, match="test has no rows"):
        row_of_seed(EVALUATION_SEED_START, "abc", "")
    with pytest.raises(ValueError, match="seed is -1"):
        row_of_seed(-1, "abc", "xy")
