"""Workers as actors of a Ray cluster; the only place that imports ray."""
