"""Runs programs that nobody has read: on this machine (`local`), or by a service (`fusion`)."""
