"""Plans of what a recipe takes on machines that are not here: memory, time, traffic and cost."""
