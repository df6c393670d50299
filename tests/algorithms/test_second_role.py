"""An algorithm with a second trained adapter, as one with a critic has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from agent_helpers import lora, make_agent, small_model, train, weights
from peft import LoraConfig

from agilerl.algorithms import GRPO
from agilerl.llm.batch import make_batch
from agilerl.llm.policy import scatter_actions


class GRPOWithCritic(GRPO):
    """The critic's mean log-prob of a row learns to be the row's reward."""

    critic_lr = 3e-3

    def adapter_configs(self, actor: LoraConfig) -> dict[str, LoraConfig]:
        return super().adapter_configs(actor) | {"critic": lora(r=2, target_modules=["o_proj"])}

    def learning_rates(self) -> dict[str, float]:
        return super().learning_rates() | {"critic": self.critic_lr}

    def learn(self, experiences: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = super().learn(experiences, *args, **kwargs)
        ids, masks, rewards = experiences
        batch = make_batch(ids, masks)
        with self.policy.as_role("critic"):
            logp = self.policy.logprobs(batch, self.forward_config()).logp
            values = scatter_actions(logp, batch.action_mask).sum(1) / batch.action_mask.sum(1)
            # This rank's part of a mean over all ranks.
            rows = int(self.engine.ranks.sum(torch.tensor(len(batch))))
            loss = (values - rewards).square().sum() / rows
            self.engine.backward(loss)
        self.engine.step(self.max_grad_norm)
        return metrics | {"critic_loss": float(loss.detach())}


def with_critic(**changes: Any) -> GRPOWithCritic:
    return make_agent(GRPOWithCritic, **changes)


def both(agent: GRPO) -> torch.Tensor:
    return torch.cat([weights(agent, role) for role in agent.learning_rates()])


def test_both_roles_learn_and_neither_disturbs_the_other() -> None:
    agent, plain = with_critic(), make_agent()
    assert agent.policy.roles == ["actor", "reference", "critic"]
    before = weights(agent, "critic")
    losses = []
    for _ in range(4):
        losses.append(train(agent)["critic_loss"])
        train(plain)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    assert not torch.equal(weights(agent, "critic"), before)
    assert torch.equal(weights(agent), weights(plain))


def test_each_role_has_its_own_learning_rate() -> None:
    agent, slow = with_critic(), with_critic()
    slow.critic_lr = 0.0
    before = weights(slow, "critic")
    for each in (agent, slow):
        train(each)
    assert torch.equal(weights(slow, "critic"), before)
    assert torch.equal(weights(slow), weights(agent))
    assert [group["lr"] for group in slow.optimizer.param_groups] == [slow.lr, 0.0]
    agent.update_lr(agent.optimizer, (0.2, 0.3))
    assert [group["lr"] for group in agent.optimizer.param_groups] == [0.2, 0.3]


def test_a_clone_goes_on_as_the_original_does() -> None:
    agent = with_critic()
    train(agent)
    twin = agent.clone()
    assert torch.equal(both(twin), both(agent))
    for each in (agent, twin):
        train(each)
    assert torch.equal(both(twin), both(agent))


@pytest.mark.parametrize("lora_only", [True, False])
def test_a_checkpoint_holds_every_role(lora_only: bool, tmp_path: Path) -> None:
    agent = with_critic()
    train(agent)
    agent.save_checkpoint(tmp_path / "run", lora_only)
    assert (tmp_path / "run" / "critic").is_dir() == lora_only
    loaded = GRPOWithCritic.load(tmp_path / "run", actor_network=small_model())
    other = with_critic()
    other.load_checkpoint(tmp_path / "run", load_optimizer=True)
    other.rng.set_state(agent.rng.get_state())
    for each in (agent, loaded, other):
        train(each)
    assert torch.equal(both(loaded), both(agent)) and torch.equal(both(other), both(agent))


def test_the_critic_is_kept_if_asked(tmp_path: Path) -> None:
    source = with_critic(lora_config=lora(r=3))
    train(source)
    source.save_checkpoint(tmp_path / "run")
    agent = with_critic(lora_config=lora(r=5))
    before = weights(agent, "critic")
    agent.load_checkpoint(tmp_path / "run", merge_lora_configs=True, overwrite_critic_adapter=False)
    assert torch.equal(weights(agent, "critic"), before)
    agent.load_checkpoint(tmp_path / "run", merge_lora_configs=True)
    assert torch.equal(weights(agent, "critic"), weights(source, "critic"))
    train(agent)


class GRPOWithoutReference(GRPO):
    def adapter_configs(self, actor: LoraConfig) -> dict[str, LoraConfig]:
        return {"actor": actor}


def test_an_algorithm_without_a_reference_role_has_none_to_move() -> None:
    agent = make_agent(GRPOWithoutReference)
    assert agent.use_separate_reference_adapter
    agent.set_reference_policy(1)
    assert train(agent)["mean_kl"] > 0.0  # towards the bare base
