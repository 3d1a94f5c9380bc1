"""What an agent's calls raise. Texts are one line for people, and hold no ids, keys or codes."""

from __future__ import annotations


class AgentError(Exception):
    """Base of every error this package raises."""


class Misused(AgentError):
    """The command makes no sense here: nothing to work with, a file that cannot be read."""


class BadPush(AgentError):
    """A push that is not for this device, or not one at all."""
