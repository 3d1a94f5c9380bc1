"""Pushes for signed statements: a second source of notifications, beside SMP routers."""
