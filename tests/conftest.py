"""For all tests."""

from tests.time_limit import pytest_timeout_set_timer

__all__ = ["pytest_timeout_set_timer"]
