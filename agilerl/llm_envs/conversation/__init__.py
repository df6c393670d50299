"""One conversation: what an environment returns, its text in a chat template, its token ids."""
