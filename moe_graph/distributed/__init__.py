"""Expert-parallel plans: limits and buffer sizes."""
