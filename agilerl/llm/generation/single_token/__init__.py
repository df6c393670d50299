"""A model on one token per row, as rollouts run it: its attention, decoder layers and head."""
