"""Hugging Face models: loading, value heads, adapters, packed attention."""
