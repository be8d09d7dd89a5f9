"""Winnow trains language models by reinforcement learning from verifiable rewards.

Nothing is imported here: `import winnow` stays instant, and each module imports what it needs.
"""

__version__ = "0.1.0"
