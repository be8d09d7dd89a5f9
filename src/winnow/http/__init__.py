"""HTTP between processes: a JSON client that retries, and what our own services check."""
