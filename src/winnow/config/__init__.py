"""Recipes: typed sections, the rules across them, and the way from a YAML file to a `Config`."""
