"""A randomly initialised Qwen2 of any small size, for tests that need a real model but no skill."""

from __future__ import annotations

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from agilerl.checks import COUNT, Number, require
from agilerl.testing.tokenizer import PAD_TOKEN_ID, TURN_END_TOKEN_ID, VOCAB_SIZE


def tiny_model(  # noqa: PLR0913  a test changes one of them
    vocab_size: int = VOCAB_SIZE,
    hidden_size: int = 64,
    layers: int = 2,
    seed: int = 0,
    tie_word_embeddings: bool = True,
    *,
    heads: int = 4,
    key_value_heads: int = 2,
    intermediate_size: int | None = None,
    max_position_embeddings: int = 2048,
    initializer_range: float = 0.2,
    dtype: torch.dtype = torch.float32,
) -> Qwen2ForCausalLM:
    """Make a Qwen2 model with random weights on the vocabulary of :func:`byte_tokenizer`.

    The same arguments give the same weights, and the caller's random state is left as it was.
    Random weights cannot show that training works: a frozen random head caps what LoRA can reach.
    Use :func:`load_bundled_model` for that.

    Args:
        vocab_size: Ids, at least the tokenizer's 260. More gives a head of realistic width.
        hidden_size: Width, a multiple of ``2 * heads`` (rotary embeddings need even head widths).
        layers: Transformer blocks.
        seed: Seed of the weights.
        tie_word_embeddings: One matrix for the embedding and the head.
        heads: Attention heads, a multiple of ``key_value_heads``.
        key_value_heads: Heads of the keys and values.
        intermediate_size: Width of the MLP; None is twice ``hidden_size``.
        max_position_embeddings: Longest sequence, in tokens.
        initializer_range: Standard deviation of the weights. At the usual 0.02 so small a model
            spreads its probability almost evenly over all tokens, and most tests see nothing.
        dtype: Data type of the weights.

    Returns:
        The model on the CPU in eval mode; its eos id is the tokenizer's end of a turn.

    Raises:
        ValueError: A size is not positive, or sizes do not divide as stated above.
    """
    if intermediate_size is None:
        intermediate_size = 2 * hidden_size
    Number(VOCAB_SIZE, integer=True)("vocab_size", vocab_size)
    sizes = {"hidden_size": hidden_size, "layers": layers, "heads": heads}
    sizes |= {"key_value_heads": key_value_heads, "intermediate_size": intermediate_size}
    for name, size in sizes.items():
        COUNT(name, size)
    require(
        heads % key_value_heads == 0,
        f"heads is {heads}; it must be a multiple of {key_value_heads=}",
    )
    require(
        hidden_size % (2 * heads) == 0,
        f"hidden_size is {hidden_size}; it must be a multiple of 2 * heads = {2 * heads}",
    )
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=initializer_range,
        bos_token_id=None,
        eos_token_id=TURN_END_TOKEN_ID,
        pad_token_id=PAD_TOKEN_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=TURN_END_TOKEN_ID, pad_token_id=PAD_TOKEN_ID
    )
    return model.to(dtype=dtype).eval()
