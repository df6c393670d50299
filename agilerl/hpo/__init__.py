"""Evolutionary hyperparameter optimisation: selection and mutation of a population of agents."""

from __future__ import annotations

from agilerl.hpo.mutation import Mutations, PerturbOrResample
from agilerl.hpo.tournament import TournamentSelection
from agilerl.hpo.truncation import TruncationSelection

__all__ = ["Mutations", "PerturbOrResample", "TournamentSelection", "TruncationSelection"]
