"""Dynamic sampling: which prompts start, which groups are kept, when a step is full."""
