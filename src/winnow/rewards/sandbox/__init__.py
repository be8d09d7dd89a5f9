"""Runs programs that nobody has read: `local.LocalSandbox` is what others use."""
