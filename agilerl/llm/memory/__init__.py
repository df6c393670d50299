"""How much memory a training step takes: predicted, used to choose sizes, named by errors."""
