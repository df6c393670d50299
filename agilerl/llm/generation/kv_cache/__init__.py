"""Keys and values of the tokens before, for decoding: of a batch, of shared prompts, of turns."""
