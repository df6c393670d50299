"""The vector environment when things go wrong: interrupts, dead backends, slow closes."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from agilerl.llm_envs import (
    EnvironmentFailure,
    SyncMultiTurnVecEnv,
    TokenObservationWrapper,
    completion_checks,
    token_observation,
)
from agilerl.llm_envs.vector import environment_pool
from agilerl.testing import byte_tokenizer
from agilerl.typing import ActionResult, ReasoningPrompts

ANSWER = 9


class Game:
    """Prompt ``[1, seed]``, three turns with the feedback ``[50 + turn]``."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.turn_ids: list[int] = []
        self.turn = 0
        self.closed = threading.Event()

    def reset(self, seed: int | None = None) -> Any:
        assert seed is not None
        self.ids, self.turn_ids, self.turn = [1, seed], [-1, -1], 0
        return self.prompt(), {"seed": seed}

    def step(self, full_completion_ids: torch.Tensor) -> Any:
        answer = full_completion_ids[0, len(self.ids) :].tolist()
        self.turn += 1
        self.ids += [*answer, 50 + self.turn]
        self.turn_ids += [*[self.turn - 1] * len(answer), -1]
        return self.prompt(), 1.0, self.turn == 3, False, {"turn": self.turn}

    def get_episode_data(self) -> Any:
        turn_ids = torch.tensor([self.turn_ids[1:]])
        return torch.tensor([self.ids]), turn_ids >= 0, turn_ids, torch.zeros(3)

    def close(self) -> None:
        self.closed.set()

    def prompt(self) -> ReasoningPrompts:
        ids = torch.tensor([self.ids])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "text": str(self.ids)}


def act(prompts: list[ReasoningPrompts]) -> ActionResult:
    answer = torch.tensor([[ANSWER]])
    return ActionResult([torch.cat([p["input_ids"], answer], 1) for p in prompts], [])


class Factory:
    """Makes environments and keeps them for the test."""

    def __init__(self, make: Callable[[], Any] = Game) -> None:
        self.make = make
        self.made: list[Any] = []

    def __call__(self) -> Any:
        self.made.append(self.make())
        return self.made[-1]

    def closed(self) -> list[bool]:
        return [env.closed.is_set() for env in self.made]


def interrupt_main_thread() -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


class Held(Game):
    """Two of these hold the interpreter's main thread up in ``where``, then interrupt it."""

    where, held = "", 0
    release = threading.Event()
    late = threading.Semaphore(0)

    def reset(self, seed: int | None = None) -> Any:
        return self.hold("reset", lambda: super(Held, self).reset(seed))

    def step(self, full_completion_ids: torch.Tensor) -> Any:
        return self.hold("step", lambda: super(Held, self).step(full_completion_ids))

    def hold(self, where: str, then: Callable[[], Any]) -> Any:
        if where != Held.where or Held.held == 2:
            return then()
        Held.held += 1
        if Held.held == 2:
            interrupt_main_thread()
        Held.release.wait(10)
        result = then()
        Held.late.release()
        return result


@pytest.mark.parametrize("where", ["step", "reset"])
def test_an_interrupted_call_does_not_reach_the_next_batch(where: str) -> None:
    """Ctrl-C, and then the same environments again, as in a notebook."""
    Held.where, Held.held = where, 0
    Held.release.clear()
    factory = Factory(Held)
    env = SyncMultiTurnVecEnv(factory, 2, max_workers=2, reset_workers=2)
    with pytest.raises(KeyboardInterrupt):
        env.play(act, [2, 3])
    prompts = env.reset([7, 8])
    Held.release.set()
    for _ in range(2):
        assert Held.late.acquire(timeout=10)  # The old threads have done their worst.
    while prompts:
        prompts = env.step(act(prompts).completion_ids)
    episodes = env.episodes()
    assert [ids.tolist() for ids in episodes.token_ids] == [
        [[1, seed, 9, 51, 9, 52, 9, 53]] for seed in (7, 8)
    ]
    assert not episodes.failed.any()
    env.close()
    assert factory.closed() == [False, False, True, True]


def test_close_after_an_interrupt_leaves_what_a_thread_has() -> None:
    release = threading.Event()

    class Interrupted(Game):
        def step(self, full_completion_ids: torch.Tensor) -> Any:
            if self.ids[1] == 3:
                interrupt_main_thread()
                release.wait(10)
            return super().step(full_completion_ids)

    factory = Factory(Interrupted)
    env = SyncMultiTurnVecEnv(factory, 3, max_workers=1)
    with pytest.raises(KeyboardInterrupt):
        env.play(act, [2, 3, 4])
    env.close()
    release.set()
    # The first had stepped, the third had not begun.
    assert factory.closed() == [True, False, True]


def test_environments_that_were_made_are_closed_when_making_is_interrupted() -> None:
    def make() -> Game:
        if len(factory.made) == 2:
            time.sleep(0.2)  # So that the main thread knows of those.
            interrupt_main_thread()
            release.wait(10)
        return Game()

    release = threading.Event()
    factory = Factory(make)
    env = SyncMultiTurnVecEnv(factory, 4, max_workers=1)
    with pytest.raises(KeyboardInterrupt):
        env.reset([1, 2, 3, 4])
    release.set()
    env.close()
    assert factory.closed()[:2] == [True, True]


def test_environments_are_made_at_the_same_time_and_reset_one_by_one() -> None:
    barrier, resetting = threading.Barrier(4), []

    class Alone(Game):
        def reset(self, seed: int | None = None) -> Any:
            resetting.append(self)
            time.sleep(0.005)
            assert resetting == [self]
            resetting.remove(self)
            return super().reset(seed)

    def make() -> Game:
        barrier.wait(timeout=10)
        return Alone()

    env = SyncMultiTurnVecEnv(make, 4, max_workers=4)
    assert len(env.reset([1, 2, 3, 4])) == 4


@pytest.mark.parametrize("dead", ["make", "reset", "step", "get_episode_data"])
def test_a_dead_backend_costs_half_a_batch_of_time_outs(dead: str) -> None:
    release, began = threading.Event(), []

    class Dead(Game):
        def __getattribute__(self, name: str) -> Any:
            if name == dead:
                return hang
            return super().__getattribute__(name)

    def hang(*args: Any, **kwargs: Any) -> None:
        began.append(1)
        release.wait(30)

    def make() -> Any:
        return hang() if dead == "make" else Dead()

    env = SyncMultiTurnVecEnv(make, 12, max_workers=1, step_timeout=0.05)
    with pytest.raises(EnvironmentFailure, match="7 of 12 episodes have failed, more than"):
        env.play(act, range(12))
    assert env.timeouts == 7
    assert len(began) <= 8  # One more may have begun when the seventh was given up.
    release.set()
    env.close()


def test_failures_add_up_over_the_turns() -> None:
    class Fails(Game):
        def step(self, full_completion_ids: torch.Tensor) -> Any:
            began.append(self.turn)
            if self.turn == 1:
                release.wait(30)
            if self.ids[1] <= 3:
                raise ConnectionError("gone")
            return super().step(full_completion_ids)

    began: list[int] = []
    release = threading.Event()
    env = SyncMultiTurnVecEnv(Fails, 12, max_workers=1, step_timeout=0.5)
    with pytest.raises(EnvironmentFailure, match="7 of 12 episodes have failed"):
        env.play(act, range(12))
    # Four fail in the first turn, so three more are enough in the second.
    assert began.count(0) == 12
    assert 3 <= began.count(1) <= 4
    release.set()


def test_environments_close_at_the_same_time() -> None:
    barrier = threading.Barrier(6)

    class Meets(Game):
        def close(self) -> None:
            barrier.wait(timeout=5)
            super().close()

    factory = Factory(Meets)
    env = SyncMultiTurnVecEnv(factory, 6, max_workers=2)
    env.reset(range(6))
    env.close()
    assert all(factory.closed())


def test_closes_that_hang_or_fail_share_a_deadline_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()

    class Hangs(Game):
        def close(self) -> None:
            if self.ids[1] == 0:
                raise OSError("no such container")
            if self.ids[1] % 4:
                release.wait(30)
            super().close()

    monkeypatch.setattr(environment_pool, "CLOSE_SECONDS", 0.5)
    env = SyncMultiTurnVecEnv(Hangs, 8, max_workers=1)
    env.reset(range(8))
    start = time.perf_counter()
    env.close()
    assert time.perf_counter() - start < 0.5 * 4
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "7 of 8 environments could not be closed. The first: OSError" in record.message
    release.set()
    assert not env.play(act, range(8)).failed.any()


def test_a_step_does_not_wait_for_the_close_of_an_environment_that_failed() -> None:
    release, closing = threading.Event(), threading.Event()

    class Fails(Game):
        def step(self, full_completion_ids: torch.Tensor) -> Any:
            if self.ids[1] == 2:
                raise ConnectionError("gone")
            return super().step(full_completion_ids)

        def close(self) -> None:
            if not closing.is_set():
                closing.set()
                assert release.wait(10)
            super().close()

    factory = Factory(Fails)
    env = SyncMultiTurnVecEnv(factory, 3, max_workers=1)
    episodes = env.play(act, [1, 2, 3])
    assert episodes.failed.tolist() == [False, True, False]
    assert closing.wait(10)
    assert not any(factory.closed())
    assert not env.play(act, [1, 1, 1]).failed.any()
    release.set()
    env.close()
    assert all(factory.closed())


def test_an_environment_that_failed_and_then_hangs_is_not_closed() -> None:
    release = threading.Event()

    class Fails(Game):
        def step(self, full_completion_ids: torch.Tensor) -> Any:
            if self.ids[1] == 2:
                raise ConnectionError("gone")
            return super().step(full_completion_ids)

        def get_episode_data(self) -> Any:
            if self.ids[1] == 2:
                release.wait(10)
            return super().get_episode_data()

    factory = Factory(Fails)
    env = SyncMultiTurnVecEnv(factory, 3, step_timeout=1.0)
    episodes = env.play(act, [1, 2, 3])
    assert episodes.failed.tolist() == [False, True, False]
    assert (env.failures, env.timeouts) == (1, 0)
    env.reset([1, 1, 1])
    env.close()
    release.set()
    assert factory.closed() == [True, False, True, True]


@pytest.mark.parametrize("inner", [None, "game-v0"])
def test_only_the_wrapper_is_looked_into(inner: Any) -> None:
    class Custom(Game):
        env = inner

    assert len(SyncMultiTurnVecEnv(Custom, 2).reset([1, 2])) == 2


class TextGame:
    def __init__(self) -> None:
        self.closes = 0

    def reset(self, seed: int | None = None) -> Any:
        return "start", {"game": seed}

    def step(self, action: str) -> Any:
        return "go", 1.0, False, False, {"said": action}

    def close(self) -> None:
        self.closes += 1


def test_what_was_made_is_closed_when_the_factory_is_refused() -> None:
    games = [TextGame(), TextGame()]
    twice = [*games, games[0]]
    env = SyncMultiTurnVecEnv(
        lambda: TokenObservationWrapper(twice.pop(), byte_tokenizer(), 3), 3, max_workers=1
    )
    with pytest.raises(ValueError, match="same environment twice"):
        env.reset([1, 2, 3])
    env.close()
    assert [game.closes for game in games] == [1, 1]
    bare = Factory(TextGame)
    env = SyncMultiTurnVecEnv(bare, 2)
    with pytest.raises(TypeError, match="has to be wrapped"):
        env.reset([1, 2])
    env.close()
    assert [game.closes for game in bare.made] == [1, 1]


def wrapped(turns: int = 3, **kwargs: Any) -> SyncMultiTurnVecEnv:
    tokenizer = byte_tokenizer()

    def make() -> TokenObservationWrapper:
        return TokenObservationWrapper(
            TextGame(), tokenizer, turns, apply_chat_template=False, **kwargs
        )

    return SyncMultiTurnVecEnv(make, 2, max_turns=2)


def say(prompts: list[ReasoningPrompts], *texts: str) -> list[torch.Tensor]:
    ids = [torch.tensor([list(text.encode())], dtype=torch.long) for text in texts]
    return [torch.cat([p["input_ids"], new], 1) for p, new in zip(prompts, ids, strict=True)]


def test_an_answer_that_is_wrong_is_the_callers_error() -> None:
    """It neither counts as a failure of the environment nor is it noticed after others stepped."""
    pad_id = byte_tokenizer().pad_token_id
    env = wrapped(max_model_len=20, pad_id=pad_id)
    prompts = env.reset([1, 2])
    with pytest.raises(ValueError, match=r"completion_ids\[1\] has 21 tokens, but max_model_len"):
        env.step(say(prompts, "a", "b" * 16))
    with pytest.raises(ValueError, match=r"completion_ids\[0\] has no token after its prompt"):
        env.step(say(prompts, "", "b"))
    padding = torch.full((1, 30), pad_id)
    short, full = say(prompts, "a", "b" * 14)
    prompts = env.step([short, torch.cat([full, padding], 1)])
    assert len(prompts) == 1  # The second row is full.
    env.step(say(prompts, "c"))
    episodes = env.episodes()
    assert (env.failures, episodes.failed.any().item()) == (0, False)
    assert episodes.turns.tolist() == [2, 1]
    assert [info["truncation_reason"] for info in episodes.infos] == ["max_turns", "max_model_len"]


def test_infos_are_those_of_the_last_step() -> None:
    class Fails(Game):
        def reset(self, seed: int | None = None) -> Any:
            if seed == 4:
                raise ConnectionError("gone")
            return super().reset(seed)

        def step(self, full_completion_ids: torch.Tensor) -> Any:
            if self.ids[1] == 2 and self.turn == 1:
                raise ConnectionError("gone")
            if self.ids[1] == 3:
                raise ConnectionError("gone")
            prompt, reward, terminated, truncated, info = super().step(full_completion_ids)
            return prompt, reward, terminated, truncated, None if self.ids[1] == 5 else info

    env = SyncMultiTurnVecEnv(Fails, 7)
    assert env.play(act, [1, 2, 3, 4, 5, 1, 1]).infos == [
        {"turn": 3},
        {"turn": 1},
        {"seed": 3},
        {},
        {},
        {"turn": 3},
        {"turn": 3},
    ]
    short = SyncMultiTurnVecEnv(Game, 1, max_turns=2).play(act, [1])
    assert short.infos == [{"turn": 2, "truncation_reason": "max_turns"}]
    reasons = [info["truncation_reason"] for info in wrapped(turns=1).play(act, [1, 2]).infos]
    assert reasons == ["max_turns", "max_turns"]


def test_an_info_that_is_no_dict_fails_the_episode(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(Game):
        def step(self, full_completion_ids: torch.Tensor) -> Any:
            result = super().step(full_completion_ids)
            return (*result[:4], "info") if self.ids[1] == 2 else result

    assert SyncMultiTurnVecEnv(Wrong, 2).play(act, [1, 2]).failed.tolist() == [False, True]
    assert "the info that step returned is 'info'; it must be a dict" in caplog.text


@pytest.mark.parametrize("in_a_batch", [True, False])
def test_an_answer_is_checked_once(in_a_batch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    plain = completion_checks.check_completion

    def counting(name: str, *args: Any, **kwargs: Any) -> None:
        checked.append(name)
        plain(name, *args, **kwargs)

    for module in (completion_checks, token_observation):
        monkeypatch.setattr(module, "check_completion", counting)
    if in_a_batch:
        wrapped().play(act, [1, 2])
        assert checked == ["completion_ids[0]", "completion_ids[1]"] * 2
    else:
        env = TokenObservationWrapper(TextGame(), byte_tokenizer(), 2)
        env.evaluate(act)
        assert checked == ["full_completion_ids"] * 2
