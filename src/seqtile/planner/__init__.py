"""Plan, measure and explain the memory of a training step."""
