"""Recipes: typed sections, rules across them, and how a YAML file becomes a `Config`."""
