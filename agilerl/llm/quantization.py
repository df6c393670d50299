"""Base models whose linear layers hold packed 4- or 8-bit weights (bitsandbytes).

Adapters stay in floating point, and so does the head, whose log-probs are computed in tiles from
its weights.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel

from agilerl.checks import require, shorten

_MATMUL_LOGGER = "bitsandbytes.autograd._functions"
_REMEDY = (
    "it must be a transformers.BitsAndBytesConfig, or a dict of its arguments such as "
    "{'load_in_4bit': True, 'bnb_4bit_quant_type': 'nf4'}"
)
QUANT_TYPES = ("nf4", "fp4")
COMPUTE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_HEAD = "lm_head"
_WRITTEN_BY_TRANSFORMERS = ("quant_method", "_load_in_4bit", "_load_in_8bit")
_running: WeakSet[PreTrainedModel] = WeakSet()
"""Models between :func:`run_as_in_training` and :func:`run_as_found`."""
_seen: set[str] = set()


def check_quantization_config(name: str, value: Any) -> None:
    """Refuse what does not say how bitsandbytes shall quantize.

    Raises:
        TypeError: The value, or one in it, has the wrong type.
        ValueError: It asks for no quantization, or for one that keeps whole weights.
    """
    if value is None:
        return
    require(
        isinstance(value, BitsAndBytesConfig | dict),
        f"{name} is {shorten(value)}; {_REMEDY}",
        TypeError,
    )
    _check_4bit_names(name, value if isinstance(value, dict) else vars(value))
    settings = _settings(name, value)
    bits = [key for key in ("load_in_4bit", "load_in_8bit") if settings[key]]
    require(
        len(bits) == 1,
        f"{name} has {' and '.join(bits) or 'neither load_in_4bit nor load_in_8bit'} set; set "
        "exactly one of load_in_4bit and load_in_8bit",
    )
    require(
        not settings["llm_int8_has_fp16_weight"],
        f"{name} has llm_int8_has_fp16_weight set, which keeps whole weights to train them; the "
        "base is frozen, so leave it at False",
    )


def require_bitsandbytes(name: str) -> None:
    """Refuse to quantize where bitsandbytes is not installed.

    Args:
        name: The argument that asks for it.

    Raises:
        ImportError: It is not.
    """
    require(
        importlib.util.find_spec("bitsandbytes") is not None,
        f"{name} is given, which needs bitsandbytes: pip install 'agilerl[quantization]'",
        ImportError,
    )


def loading_arguments(value: BitsAndBytesConfig | dict[str, Any] | None) -> dict[str, Any]:
    """Keyword arguments of ``from_pretrained`` that load a model quantized, but for its head.

    None gives none. transformers keeps the head whole by itself, but not where
    ``llm_int8_skip_modules`` is given.
    """
    if value is None:
        return {}
    settings = _settings("quantization_config", value)
    skipped = settings["llm_int8_skip_modules"]
    if skipped is not None and _HEAD not in skipped:
        settings["llm_int8_skip_modules"] = [*skipped, _HEAD]
    return {"quantization_config": BitsAndBytesConfig(**settings)}


def is_quantized(model: PreTrainedModel) -> bool:
    """Whether transformers has loaded a model with packed weights, of any library."""
    return getattr(model, "hf_quantizer", None) is not None


def recorded_quantization(model: PreTrainedModel) -> dict[str, Any] | None:
    """How a model was quantized, as a dict that :func:`loading_arguments` takes.

    None where it was not, or by another library than bitsandbytes.
    """
    if not is_quantized(model):
        return None
    config = model.config.quantization_config
    if isinstance(config, BitsAndBytesConfig):
        return _settings("quantization_config", config)
    return None


def prepare_quantized(name: str, model: PreTrainedModel) -> None:
    """Check a model that may be quantized.

    Args:
        name: The argument that the model came with.
        model: The plain model.

    Raises:
        ValueError: If its head is quantized, or it asks for more precision than 8 bits have.
    """
    if not is_quantized(model):
        return
    rounded = model.device.type == "cuda" and model.dtype == torch.float32
    require(
        not (rounded and (recorded_quantization(model) or {}).get("load_in_8bit", False)),
        f"{name} is quantized to 8 bits and in float32, but a GPU computes 8-bit products in "
        "float16; load it with dtype=torch.bfloat16 (model_config={'dtype': torch.bfloat16})",
    )
    head = model.get_output_embeddings()
    # A head that is tied to the embedding is a layer of bitsandbytes with a whole weight.
    whole = head.weight.is_floating_point() and not type(head).__module__.startswith("bitsandbytes")
    require(
        whole,
        f"{name} has a quantized head ({type(head).__name__}); add its "
        f"module's name ({_HEAD!r} in most models) to llm_int8_skip_modules of the "
        "BitsAndBytesConfig that it is loaded with",
    )


def run_as_in_training(model: PreTrainedModel) -> None:
    """On a CPU, have packed layers compute in evaluation mode what they do in training mode.

    In evaluation mode bitsandbytes repacks 4-bit weights with rounded scales for a kernel without a
    gradient, and rounds the inputs of 8-bit layers, columns with an outlier in any row left out, so
    that a row depends on the rows beside it. To be called whenever modes were set. What
    bitsandbytes logs of every product is said once until :func:`run_as_found`.
    """
    if is_quantized(model):
        _running.add(model)
        logging.getLogger(_MATMUL_LOGGER).addFilter(_said_once)
    if model.device.type != "cpu":
        return
    for layer in _packed_layers(model, "Linear8bitLt"):
        layer.training = True
    for layer in _packed_layers(model, "Linear4bit"):
        if layer.support_avx512bf16_for_cpu:
            layer.support_avx512bf16_for_cpu = False
            layer.state_dict()  # which undoes a repacking, but for scales that are not nested
            state = layer.weight.quant_state
            if state.absmax.dim() == 2:
                state.absmax = state.absmax.T.flatten().float()


def run_as_found(model: PreTrainedModel) -> None:
    """Undo :func:`run_as_in_training`, but for modes."""
    _running.discard(model)
    if not _running:
        logging.getLogger(_MATMUL_LOGGER).removeFilter(_said_once)
        _seen.clear()
    layers = _packed_layers(model, "Linear4bit")
    if layers:
        from bitsandbytes.functional import has_avx512bf16

        for layer in layers:
            layer.support_avx512bf16_for_cpu = has_avx512bf16()


def _packed_layers(model: PreTrainedModel, kind: str) -> list[Any]:
    """The layers of bitsandbytes of one class; PEFT's layers around them have the same name."""
    return [
        module
        for module in model.modules()
        if type(module).__name__ == kind and type(module).__module__.startswith("bitsandbytes.")
    ]


def _check_4bit_names(name: str, given: Mapping[str, Any]) -> None:
    """Refuse what transformers fails at only while it loads the weights."""
    kind = given.get("bnb_4bit_quant_type", QUANT_TYPES[0])
    require(
        kind in QUANT_TYPES,
        f"{name} has bnb_4bit_quant_type {shorten(kind)}; it must be one of "
        f"{', '.join(map(repr, QUANT_TYPES))}",
    )
    dtype = given.get("bnb_4bit_compute_dtype")
    known = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    require(
        dtype is None or known in COMPUTE_DTYPES,
        f"{name} has bnb_4bit_compute_dtype {shorten(dtype)}; it must be one of "
        f"{', '.join(map(str, COMPUTE_DTYPES))}, the name of one, or None",
    )


def _settings(name: str, value: BitsAndBytesConfig | dict[str, Any]) -> dict[str, Any]:
    """The arguments of a ``BitsAndBytesConfig``, defaults filled in; dtypes by their names."""
    config = value
    if isinstance(value, dict):
        given = {key: item for key, item in value.items() if key not in _WRITTEN_BY_TRANSFORMERS}
        unknown = sorted(given.keys() - BitsAndBytesConfig().to_dict().keys())
        method = value.get("quant_method", "bitsandbytes")
        require(method == "bitsandbytes", f"{name} has quant_method {method!r}; {_REMEDY}")
        require(not unknown, f"{name} has {', '.join(map(repr, unknown))}; {_REMEDY}")
        try:
            config = BitsAndBytesConfig(**given)
        except (TypeError, ValueError, AttributeError) as error:
            raise type(error)(f"{name} is {shorten(value)}: {error}") from error
    assert isinstance(config, BitsAndBytesConfig)
    written = config.to_dict()
    return {key: item for key, item in written.items() if key not in _WRITTEN_BY_TRANSFORMERS}


def _said_once(record: logging.LogRecord) -> bool:
    """Pass a message of a matrix product once: bitsandbytes repeats it in every forward."""
    message = record.getMessage()
    new = message not in _seen
    _seen.add(message)
    return new
