"""What an agent collects for one ``learn``: rollouts, rewards, and the metrics read off them."""
