"""What answers are worth: scorers, routing to them, shaping, and the service that runs them."""
