"""How logits are made is read off the config, and compared with the model's own."""

from __future__ import annotations

import pytest
from model_families import FAMILIES, make_family

from agilerl.llm.causal_lm import check_head, find_head
from agilerl.llm.shared_base import SharedBase
from agilerl.testing import tiny_model


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match="no output embedding"):
        find_head(tiny_model().base_model)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_is_read_as_the_model_means_it(family: str) -> None:
    check_head(make_family(family))


def test_a_head_with_an_unknown_scale_is_refused() -> None:
    model = make_family("granite")
    forward = model.forward

    def scaled(*args: object, **kwargs: object) -> object:
        output = forward(*args, **kwargs)
        output.logits = output.logits * 3
        return output

    model.forward = scaled
    with pytest.raises(ValueError, match=r"GraniteForCausalLM.*not supported"):
        SharedBase.of(model)
