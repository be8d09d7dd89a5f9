"""Rewards of answers: scorers, the pipeline over them, shaping, and a service for other runs."""
