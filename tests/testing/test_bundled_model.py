from __future__ import annotations

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from agilerl.llm.prompts import PromptEncoder, fill_template
from agilerl.testing import (
    SPELL_BACKWARD_CONVERSATION,
    bundled_model_path,
    byte_tokenizer,
    load_bundled_model,
    spell_backward_correct,
    spell_backward_datasets,
)


def test_the_folder_is_small_and_in_float32() -> None:
    files = {file.name: file.stat().st_size for file in bundled_model_path().iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert sum(files.values()) < 4_000_000
    with safe_open(bundled_model_path() / "model.safetensors", framework="pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    assert sum(tensor.numel() for tensor in tensors) < 1_000_000


def test_plain_transformers_load_it_with_the_same_ids() -> None:
    model = AutoModelForCausalLM.from_pretrained(bundled_model_path())
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
    ours = byte_tokenizer()
    messages = [{"role": "user", "content": "Gr\u00fc\u00dfe, \u4f60\u597d"}]
    text = ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
    )
    assert tokenizer(text).input_ids == ours(text).input_ids
    assert tokenizer.decode(ours(text).input_ids) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (256, 258)
    assert len(tokenizer) == model.config.vocab_size == len(ours)


def test_the_loaded_pair_agrees_on_its_special_tokens() -> None:
    model, tokenizer = load_bundled_model()
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == tokenizer.eos_token_id
        assert config.pad_token_id == tokenizer.pad_token_id
    text = "e\u0301 comes back as it was"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_it_half_knows_its_task() -> None:
    model, tokenizer = load_bundled_model()
    _, held_out = spell_backward_datasets(0, 200, seed=0)
    encoder = PromptEncoder(tokenizer)
    prompts = [
        encoder.render(fill_template(SPELL_BACKWARD_CONVERSATION, {"question": question}))
        for question in held_out["question"]
    ]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    outputs = model.generate(**batch, max_new_tokens=9, do_sample=False)
    completions = tokenizer.batch_decode(
        outputs[:, batch.input_ids.shape[1] :], skip_special_tokens=True
    )
    pairs = zip(completions, held_out, strict=True)
    correct = [spell_backward_correct(completion, **row) for completion, row in pairs]
    assert 0.3 < sum(correct) / len(correct) < 0.5
    ended = (outputs == tokenizer.eos_token_id).sum(dim=1) > 1  # the prompt holds one
    assert ended.float().mean() > 0.95
