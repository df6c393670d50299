from __future__ import annotations

import random
from string import digits

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agilerl.llm_envs import TokenObservationWrapper
from agilerl.testing import bundled_model_path, guess_the_number_env, load_bundled_model
from agilerl.testing.guess_the_number import (
    HELD_OUT_SEED,
    boxed,
    chat_piece,
    game_tokens,
    kept_random_state,
    mixed_player,
    play,
    reset,
)
from agilerl.testing.tokenizer import SPECIAL_TOKENS, TURN_END_TOKEN_ID, byte_tokenizer

TASK = "guess_the_number"
TEXTS = [
    "Gr\u00fc\u00dfe, \u4f60\u597d",
    "1234 56.\n\n\t 7 ",
    "\\boxed{31}, you guessed higher than",
]


@pytest.fixture(scope="module")
def games() -> list[tuple[str, ...]]:
    env, player = guess_the_number_env(), mixed_player(0.5, random.Random(0))
    return [play(env, player, HELD_OUT_SEED + i).observations for i in range(20)]


def test_the_folder_is_small() -> None:
    files = {file.name: file.stat().st_size for file in bundled_model_path(TASK).iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert sum(files.values()) < 4_000_000


def test_an_unknown_task_is_refused() -> None:
    message = "task is 'chess'; it must be one of 'spell_backward', 'guess_the_number'"
    for call in (bundled_model_path, load_bundled_model):
        with pytest.raises(ValueError, match=message):
            call("chess")


def test_plain_transformers_load_it_with_the_same_ids(games: list[tuple[str, ...]]) -> None:
    model, tokenizer = load_bundled_model(TASK)
    plain = AutoTokenizer.from_pretrained(bundled_model_path(TASK))
    other = AutoModelForCausalLM.from_pretrained(bundled_model_path(TASK))
    assert model.config.vocab_size == len(tokenizer) == len(plain)
    assert torch.equal(model.get_input_embeddings().weight, other.get_input_embeddings().weight)
    for text in [*TEXTS, *(chat_piece(shown, first=True) for game in games for shown in game)]:
        ids = tokenizer(text).input_ids
        assert plain(text).input_ids == ids
        assert tokenizer.decode(ids) == plain.decode(ids) == text


def test_special_tokens_and_chat_template_are_those_of_the_byte_tokenizer() -> None:
    model, tokenizer = load_bundled_model(TASK)
    ours = byte_tokenizer()
    assert tokenizer.chat_template == ours.chat_template
    special = list(SPECIAL_TOKENS)
    assert tokenizer.convert_tokens_to_ids(special) == ours.convert_tokens_to_ids(special)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (
        ours.eos_token_id,
        ours.pad_token_id,
    )
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id


def test_digits_stand_alone_and_pieces_do_not_merge() -> None:
    _, tokenizer = load_bundled_model(TASK)
    sentences = set(tokenizer.get_added_vocab())
    merged = [token for token in tokenizer.get_vocab() if token not in sentences]
    assert sorted(token for token in merged if set(token) & set(digits)) == list(digits)
    game = play(guess_the_number_env(), mixed_player(0.0, random.Random(1)), seed=11)
    ids, _ = game_tokens(tokenizer, game)
    assert tokenizer(tokenizer.decode(ids)).input_ids == ids


def test_prompts_are_short(games: list[tuple[str, ...]]) -> None:
    _, tokenizer = load_bundled_model(TASK)
    for first, *rest in games:
        assert len(tokenizer(chat_piece(first, first=True)).input_ids) <= 30
        for shown in rest:
            assert len(tokenizer(chat_piece(shown, first=False)).input_ids) <= 32
    assert len(tokenizer(boxed(3)).input_ids) == 4


def test_it_answers_in_the_format_and_reads_hints_some_of_the_time() -> None:
    model, tokenizer = load_bundled_model(TASK)
    torch.manual_seed(0)
    first = chat_piece(reset(guess_the_number_env(), HELD_OUT_SEED), first=True)
    prompt = first + boxed(4) + "<|im_end|>"
    hint = "At turn 1, you guessed 4, and the target number is lower than 4.Enter your next guess."
    batch = tokenizer([prompt + chat_piece(hint, first=False)] * 256, return_tensors="pt")
    outputs = model.generate(**batch, max_new_tokens=8, do_sample=True, top_k=0)
    answers = outputs[:, batch.input_ids.shape[1] :]
    assert (answers == TURN_END_TOKEN_ID).any(dim=1).float().mean() > 0.98
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    heeding = sum(text in {boxed(1), boxed(2), boxed(3)} for text in texts) / len(texts)
    assert 0.35 < heeding < 0.65


def test_the_warm_up_has_the_tokens_that_the_environment_wrapper_produces() -> None:
    _, tokenizer = load_bundled_model(TASK)
    for seed in range(8):
        game = play(guess_the_number_env(), mixed_player(0.3, random.Random(seed)), seed)
        wrapper = TokenObservationWrapper(guess_the_number_env(), tokenizer, max_turns=3)
        with kept_random_state():
            prompt, _ = wrapper.reset(seed=seed)
        for action in game.actions:
            answer = torch.tensor([tokenizer(action + "<|im_end|>").input_ids])
            prompt = wrapper.step(torch.cat([prompt["input_ids"], answer], dim=1))[0]
        ids, action_mask, _, rewards = wrapper.get_episode_data()
        expected_ids, written = game_tokens(tokenizer, game)
        assert ids[0].tolist() == expected_ids
        assert action_mask[0].tolist() == written[1:]
        assert rewards.tolist()[: len(game.rewards)] == pytest.approx(list(game.rewards))
