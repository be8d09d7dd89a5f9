"""Statistics of held-out answers, and comparisons of two evaluations."""
