"""From rows of tokens to hidden states at the actions, which the head makes log-probs of."""
