"""Prompts from files, generated tasks or a user's code, and a loader that can resume."""
