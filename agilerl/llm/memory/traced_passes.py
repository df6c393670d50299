"""What the passes of a training step allocate, found by running them on fake tensors."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from agilerl.llm.adapters import default_lora_config
from agilerl.llm.batch import TrainBatch
from agilerl.llm.causal_lm import find_head
from agilerl.llm.forward.hidden_states import packed_rows_hidden_states
from agilerl.llm.forward.packed_rows import PackedRows
from agilerl.llm.forward.recomputation import recomputed_layers
from agilerl.llm.generation.kv_cache.growing_cache import GrowingCache
from agilerl.llm.logprobs import DEFAULT_TILE_COLUMNS, TILE_COLUMNS, token_logprobs
from agilerl.llm.memory.live_bytes import LiveBytes, make_fake, meta_model
from agilerl.llm.memory.settings import MemorySettings

# Fused attention without a mask in memory. On fake tensors transformers makes one always, as it
# cannot look into them for padding.
_MASKLESS = "agilerl_maskless"
AttentionInterface.register(_MASKLESS, sdpa_attention_forward)
AttentionMaskInterface.register(_MASKLESS, lambda *args, **kwargs: None)

# Layers of a model are alike, and a fake operation takes as long as a small real one.
FEW_LAYERS, MANY_LAYERS = 2, 4


@dataclass(frozen=True)
class UpdatePass:
    """Bytes of one forward and backward."""

    activations: int
    """Kept for backward when the decoder has run."""
    logits: int
    """Above these, at most, while log-probs are computed."""
    backward: int
    """Above these, at most, in backward."""

    @property
    def peak(self) -> int:
        """Of the whole pass."""
        return self.activations + max(self.logits, self.backward)


@dataclass(frozen=True)
class PrefillPass:
    """Bytes of one forward over prompts that fills a cache."""

    cache: int
    """Keys and values."""
    activations: int
    """Above these, at most."""


Pass = TypeVar("Pass", UpdatePass, PrefillPass)


class TracedModel:
    """A model of fake tensors with one adapter.

    Args:
        config: Of a causal language model.
        kind: The model's class; None: the one that transformers has for the config.
        dtype: Of the base.
        lora: The adapter; None: the default one.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        kind: type[PreTrainedModel] | None,
        dtype: torch.dtype,
        lora: LoraConfig | None,
    ) -> None:
        config = copy.deepcopy(config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
        model = model.to(dtype)
        self.weight_bytes = tensor_bytes(model)
        # The start values do not matter, and some are computed from the base's.
        lora = copy.deepcopy(lora or default_lora_config())
        lora.init_lora_weights, lora.lora_dropout = True, 0.0
        self.peft: PeftModel = meta_model(model, lora)
        self.model: PreTrainedModel = model
        decoder_config: Any = model.base_model.config
        if decoder_config._attn_implementation == "sdpa":
            decoder_config._attn_implementation = _MASKLESS
        self.adapter = [p for p in self.peft.parameters() if p.requires_grad]
        self._mode = FakeTensorMode()
        self._known = make_fake(self.peft, self._mode)

    @property
    def merged_bytes(self) -> int:
        """Of the weights that a rollout copies: the targeted ones, where merging is exact."""
        exact = (torch.float32, torch.float64)
        bases = [m.get_base_layer() for m in self.peft.modules() if isinstance(m, LoraLayer)]
        weights = [base.weight for base in bases if type(base).__name__ in ("Linear", "Conv1D")]
        return sum(weight.nbytes for weight in weights if weight.dtype in exact)

    def update(self, settings: MemorySettings) -> UpdatePass:
        """Run forward and backward of the largest micro-batch."""
        return self._of_all_layers(lambda: self._update(settings))

    def _update(self, settings: MemorySettings) -> UpdatePass:
        packed = _packed(settings, self._mode) if settings.layout == "packed" else None
        with self._mode, LiveBytes(self._known) as live:
            hidden = self._hidden(settings, packed)
            activations = live.now
            live.reset_peak()
            logp = self._logprobs(hidden, settings)
            del hidden
            logits = live.peak - activations
            live.reset_peak()
            logp.sum().backward()
            return UpdatePass(activations, logits, max(0, live.peak - activations))

    def _hidden(self, settings: MemorySettings, packed: PackedRows | None) -> torch.Tensor:
        """``(N, D)`` at the tokens that predict completions."""
        decoder, recompute = self.model.base_model, settings.gradient_checkpointing
        if packed is not None:
            return packed_rows_hidden_states(decoder, packed, recompute=recompute)
        with recomputed_layers(decoder) if recompute else contextlib.nullcontext():
            ids = torch.zeros(_rows_and_width(settings), dtype=torch.long)
            hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
        predictors = torch.zeros(sum(settings.micro_batch), dtype=torch.long)
        return hidden.flatten(0, 1).index_select(0, predictors)

    def _logprobs(self, hidden: torch.Tensor, settings: MemorySettings) -> torch.Tensor:
        head, device = find_head(self.model), torch.device(settings.device).type
        if head.weight is not None:
            # Of a frozen head two tiles of columns take as much as all, one after the other.
            columns = 2 * TILE_COLUMNS.get(device, DEFAULT_TILE_COLUMNS)
            bias = None if head.bias is None else head.bias[:columns]
            weight = head.weight[:columns]
            head = replace(head, weight=weight, bias=bias, vocab_size=len(weight))
        return token_logprobs(
            hidden,
            torch.zeros(len(hidden), dtype=torch.long),
            head,
            fp32=settings.cast_logprobs_to_fp32,
            tile_rows=settings.fused_logprobs_chunk_rows,
            entropy_gradient=settings.entropy_coef != 0.0,
            tiled_for=device,
        ).logp

    def prefill(self, prompts: int, tokens: int) -> PrefillPass:
        """Run some prompts of equal length as a rollout does."""
        return self._of_all_layers(lambda: self._prefill(prompts, tokens))

    def _of_all_layers(self, run: Callable[[], Pass]) -> Pass:
        """What a pass takes; of a model of many layers by what it takes with a few."""
        layers = _layer_list(self.model.base_model)[2]
        if len(layers) <= MANY_LAYERS:
            return run()
        few, many = (self._with_layers(count, run) for count in (FEW_LAYERS, MANY_LAYERS))
        further = (len(layers) - MANY_LAYERS) / (MANY_LAYERS - FEW_LAYERS)
        sizes = vars(many)
        return replace(
            many,
            **{
                part: size + round(further * (size - vars(few)[part]))
                for part, size in sizes.items()
            },
        )

    def _with_layers(self, count: int, run: Callable[[], Pass]) -> Pass:
        """What a pass takes with the first layers only."""
        parent, name, layers = _layer_list(self.model.base_model)
        parent._modules[name] = nn.ModuleList(list(layers)[:count])
        try:
            return run()
        finally:
            parent._modules[name] = layers

    def _prefill(self, prompts: int, tokens: int) -> PrefillPass:
        with self._mode, torch.no_grad(), LiveBytes(self._known) as live:
            cache = GrowingCache(0)
            ids = torch.zeros(prompts, tokens, dtype=torch.long)
            output = self.model.base_model(input_ids=ids, past_key_values=cache, use_cache=True)
            del output
            buffers = [layer.columns_in_use() for layer in cache.growing_layers]
            kept = sum(tensor.untyped_storage().nbytes() for pair in buffers for tensor in pair)
        return PrefillPass(kept, live.peak - kept)


def _layer_list(decoder: nn.Module) -> tuple[nn.Module, str, nn.ModuleList]:
    """The longest list of layers, with the module it is in and its name there."""
    lists = [
        (parent, name, child)
        for parent in decoder.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList)
    ]
    return max(lists, key=lambda found: len(found[2]))


def tensor_bytes(model: nn.Module) -> int:
    """Of a model's parameters and buffers, each once, without those of adapters."""
    named = [*model.named_parameters(), *model.named_buffers()]
    tensors = {id(tensor): tensor for name, tensor in named if "lora_" not in name}
    return sum(tensor.nbytes for tensor in tensors.values())


def _packed(settings: MemorySettings, mode: FakeTensorMode) -> PackedRows:
    """The largest micro-batch in one row of fake tensors."""
    completions = torch.tensor(settings.micro_batch)
    prompts = torch.full_like(completions, settings.prompt_tokens)
    lengths = prompts + completions
    tokens = torch.arange(int(lengths.max()))
    inside = (tokens[1:] >= prompts[:, None]) & (tokens[1:] < lengths[:, None])
    index = torch.arange(len(completions)) // settings.group_size
    ids = torch.zeros(len(lengths), len(tokens), dtype=torch.long)
    rows = PackedRows.of(TrainBatch(ids, inside, lengths, prompts, index, inside))
    return replace(
        rows,
        token_ids=mode.from_tensor(rows.token_ids),
        positions=mode.from_tensor(rows.positions),
        predictors=mode.from_tensor(rows.predictors),
    )


def _rows_and_width(settings: MemorySettings) -> tuple[int, int]:
    """Of the token ids that the decoder runs on where rows are not packed.

    With prompts that run once it runs twice, which keeps as much as one row of all tokens.
    """
    lengths, prompt = settings.micro_batch, settings.prompt_tokens
    if settings.layout == "shared_prompts":
        # A row's last token predicts nothing that is trained.
        return 1, settings.micro_batch_prompts * prompt + sum(lengths) - len(lengths)
    return len(lengths), prompt + max(lengths) - 1
