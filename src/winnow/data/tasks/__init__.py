"""Generated tasks and demonstrations of them."""
