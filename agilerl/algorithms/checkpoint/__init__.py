"""What of an agent is saved, read back, and rebuilt."""
