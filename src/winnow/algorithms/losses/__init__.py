"""Policy losses and the value loss."""
