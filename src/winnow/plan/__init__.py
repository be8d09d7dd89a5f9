"""What a recipe would take on machines that are not here: memory, time, traffic and cost."""
