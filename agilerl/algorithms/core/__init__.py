"""Base classes of the agents."""

from agilerl.algorithms.core.evolvable import EvolvableAlgorithm
from agilerl.algorithms.core.llm_algorithm import LLMAlgorithm

__all__ = ["EvolvableAlgorithm", "LLMAlgorithm"]
