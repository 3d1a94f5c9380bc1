"""What a command tells in one line, without a traceback."""


class AnalyticsError(Exception):
    """The command cannot be carried out; the message says why, or what to do."""


class JournalNotFoundError(AnalyticsError):
    """There is no journal where one was expected."""


class UnreadableError(JournalNotFoundError):
    """What was made of a journal, or of the store, cannot be read; the message says what to do."""
