"""Where completions end by stop sequences: hand-sized texts on a model whose answers are known."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from generation_helpers import sampling_of
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream
from transformers import AutoModelForCausalLM

from agilerl.llm.generation import Completions
from agilerl.llm.generation.hf import HFGenerator
from agilerl.llm.generation.stop_sequences import StopSequenceMatcher
from agilerl.llm.policy import Policy
from agilerl.llm.shared_base import SharedBase
from agilerl.testing import byte_tokenizer, load_bundled_model, tiny_model

PAD, TURN_END = 256, 258
PQR = 260
"""A token of three letters."""
# After "o" the letters "pqr" as one token, after "s" the two bytes of "é", then "t" and so on.
AFTER = {
    **{ord(a): ord(a) + 1 for a in "abcdefghijklmntuvwxy"},
    ord("o"): PQR,
    PQR: ord("s"),
    ord("s"): 0xC3,
    0xC3: 0xA9,
    0xA9: ord("t"),
    ord("z"): TURN_END,
}


@pytest.fixture(scope="module")
def alphabet(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """A policy that goes on with the alphabet from the last letter of its prompt."""
    path = tmp_path_factory.mktemp("alphabet")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["pqr"])
    tokenizer.save_pretrained(path)
    model = tiny_model(261, 264, 1, tie_word_embeddings=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        model.model.embed_tokens.weight[:, :261] = torch.eye(261)
        for token, successor in AFTER.items():
            model.lm_head.weight[successor, token] = 1.0
    model.save_pretrained(path)
    return policy_on(AutoModelForCausalLM.from_pretrained(path))


def policy_on(model: torch.nn.Module) -> Policy:
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    return Policy(SharedBase.of(model), {"actor": lora}, seed=0)


def ids(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()))


def complete(policy: Policy, *prompts: str, **settings: object) -> Completions:
    given = {"greedy": True, "eos_token_ids": (TURN_END,), "pad_token_id": PAD} | settings
    generator = HFGenerator(policy)
    return generator.generate([ids(p) for p in prompts], 1, sampling_of(**given), torch.Generator())


def texts_of(completions: Completions) -> list[str]:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["pqr"])
    return [tokenizer.decode(row) for row in completions.token_ids]


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        ((), "lmnopqrsétuvw"),  # 12 tokens, the limit
        (("m",), "lm"),
        (("mno",), "lmno"),
        (("opq",), "lmnopqr"),  # inside a token, which is kept whole
        (("q",), "lmnopqr"),
        (("pqr",), "lmnopqr"),
        (("rs",), "lmnopqrs"),
        (("é",), "lmnopqrsé"),  # of two tokens: half a character is no text
        (("\ufffd",), "lmnopqrsétuvw"),
        (("kl",), "lmnopqrsétuvw"),  # begins in the prompt
        (("jk",), "lmnopqrsétuvw"),  # is in the prompt
        (("u", "no", "q"), "lmno"),  # the one that is complete first
        (("nopqrsétu", "s"), "lmnopqrs"),
        (("nopqrsétu", "v"), "lmnopqrsétu"),
        (("Q", "lmm", "lm "), "lmnopqrsétuvw"),
    ],
)
def test_the_token_that_completes_a_text_is_the_last(
    alphabet: Policy, stops: tuple[str, ...], expected: str
) -> None:
    assert texts_of(complete(alphabet, "hijk", stop_sequences=stops)) == [expected]


@pytest.mark.parametrize(
    ("least", "expected"),
    [(0, "lm"), (1, "lm"), (2, "lmnopqrs"), (5, "lmnopqrs"), (6, "lmnopqrsétuvw")],
)
def test_no_text_ends_a_row_within_its_least_length(
    alphabet: Policy, least: int, expected: str
) -> None:
    made = complete(alphabet, "k", stop_sequences=("m", "s"), min_new_tokens=least)
    assert texts_of(made) == [expected]


def test_a_text_may_begin_within_the_least_length(alphabet: Policy) -> None:
    made = complete(alphabet, "k", stop_sequences=("lmn",), min_new_tokens=2)
    assert texts_of(made) == ["lmn"]


def test_special_tokens_are_text(alphabet: Policy) -> None:
    settings = {"eos_token_ids": (0,), "max_new_tokens": 4}
    assert texts_of(complete(alphabet, "x", **settings))[0].startswith("yz<|im_end|>")
    for stop in ("<|im_end|>", "z<|im"):
        made = complete(alphabet, "x", stop_sequences=(stop,), **settings)
        assert texts_of(made) == ["yz<|im_end|>"]


def test_rows_stop_each_on_their_own_and_the_others_go_on(alphabet: Policy) -> None:
    prompts = ["k", "abc", "xy", "n", "a", "c", "q", "m"]
    free = complete(alphabet, *prompts, return_logps=True)
    stopped = complete(alphabet, *prompts, return_logps=True, stop_sequences=("mn", "é"))
    assert texts_of(stopped) == [
        "lmn", "defghijklmn", "z<|im_end|>", "opqrsé", "bcdefghijklm", "defghijklmn",
        texts_of(free)[6], "nopqrsé",
    ]  # fmt: skip
    assert free.logps is not None and stopped.logps is not None
    pairs = zip(stopped.token_ids + stopped.logps, free.token_ids + free.logps, strict=True)
    for tokens, whole in pairs:
        torch.testing.assert_close(tokens, whole[: len(tokens)])


def test_what_follows_is_not_affected_by_chunks(alphabet: Policy) -> None:
    prompts = ["k", "abc", "xy", "n", "a", "c"]
    whole = complete(alphabet, *prompts, stop_sequences=("mn",))
    chunks = complete(alphabet, *prompts, stop_sequences=("mn",), chunk_size=2)
    assert texts_of(whole) == texts_of(chunks)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_turns_of_a_session_are_those_of_recomputation(greedy: bool) -> None:
    policy = policy_on(load_bundled_model()[0])
    stops = ("e", "a", "<|im")

    def play(cached: bool) -> list[str]:
        generator, rng = HFGenerator(policy), torch.Generator().manual_seed(1)
        sampling = sampling_of(
            greedy=greedy, eos_token_ids=(999,), pad_token_id=PAD, stop_sequences=stops
        )
        rows, texts = [ids(p) for p in ("Spell", "a word,", "then the next")], []
        with generator.session() if cached else nullcontext():
            for turn in range(3):
                made = generator.generate(rows, 1, sampling, rng).token_ids
                pairs = zip(rows, made, strict=True)
                rows = [torch.cat([*pair, ids(f" {turn}")]) for pair in pairs]
                texts += [bytes(i for i in row.tolist() if i < 256).decode("latin") for row in made]
        return texts

    cached = play(True)
    assert cached == play(False)
    assert any(text.endswith(("e", "a")) and len(text) < 12 for text in cached)


def whole_words(*words: str) -> Callable[..., StopSequenceMatcher]:
    """Makes matchers over a vocabulary of these words, whose ids are their places."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    core.decoder = decoders.Fuse()
    return lambda texts, **settings: StopSequenceMatcher(
        core, texts, [torch.tensor([0])], **settings
    )


@pytest.mark.parametrize(
    ("tokens", "stop", "at"),
    [
        ([1, 1, 1, 2], "aab", 3),  # begins anew within a failed match
        ([1, 2, 1, 2], "abab", 3),
        ([3, 3], "a-a", 1),  # -a|-a
        ([4], "bb", 0),
        ([1, 4], "abb", 1),
        ([1, 1, 5], "ab", None),  # an id that is not the tokenizer's
        ([1, 5, 2], "ab", 2),  # ... and adds nothing
    ],
)
def test_matches_over_any_cut_into_tokens(tokens: list[int], stop: str, at: int | None) -> None:
    matcher = whole_words("?", "a", "b", "-a", "bbb")((stop, "never"))
    found = [matcher.completes([0], [token], step) == [True] for step, token in enumerate(tokens)]
    assert found == [step == at for step in range(len(tokens))]


def test_every_occurrence_is_found_not_only_the_first() -> None:
    matcher = whole_words("?", "a", "b")(("ab",), min_new_tokens=2)
    found = [matcher.completes([0], [t], step)[0] for step, t in enumerate([1, 2, 1, 2])]
    assert found == [False, False, False, True]


def test_invalid_bytes_are_read_on() -> None:
    core = byte_tokenizer().backend_tokenizer
    matcher = StopSequenceMatcher(core, ("ab",), [ids("x")])
    rng = torch.Generator().manual_seed(0)
    noise = torch.randint(128, 256, (2000,), generator=rng).tolist()
    assert not any(matcher.completes([0], [token], step)[0] for step, token in enumerate(noise))
    # A character of the noise may still be open.
    end = [matcher.completes([0], [ord(c)], 2000)[0] for c in "    ab"]
    assert end == [False] * 5 + [True]


def test_bytes_that_change_what_was_read_before() -> None:
    """With byte fallback a space alone can; the decoder then refuses, and is started anew."""
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "a": 257, "b": 258}
    core = Tokenizer(models.BPE(vocab=pieces, merges=[], byte_fallback=True))
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    matcher = StopSequenceMatcher(core, ("ab",), [ids("x")])
    rng = torch.Generator().manual_seed(0)
    noise = torch.randint(128, 257, (500,), generator=rng).tolist()
    with pytest.raises(Exception, match="Invalid prefix"):
        stream = DecodeStream()
        for token in noise:
            stream.step(core, token)
    assert not any(matcher.completes([0], [token], step)[0] for step, token in enumerate(noise))
    end = [matcher.completes([0], [token], 500)[0] for token in (256, 256, 257, 258)]
    assert end == [False] * 3 + [True]


def test_no_tokenizer_beside_the_model(tmp_path: Path) -> None:
    tiny_model(layers=1).save_pretrained(tmp_path)
    policy = policy_on(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert len(complete(policy, "x").token_ids) == 1
    with pytest.raises(ValueError, match=rf"stop_sequences is \('a',\).*{tmp_path}.*model_name"):
        complete(policy, "x", stop_sequences=("a",))
    byte_tokenizer().save_pretrained(tmp_path)
    complete(policy, "x", stop_sequences=("a",))
