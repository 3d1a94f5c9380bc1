"""Errors that nobody expected: they end what was being done, never the agent."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable

from agent.errors import Stopped
from store.interface import StoreDamaged, StoreUnavailable
from transport.cancellation import first_cause, raise_if_cancelled

logger = logging.getLogger(__name__)


def survive(error: Exception, work: str) -> None:
    """Log a defect, or raise: an agent that has ended, or cannot store anything, does not go on.

    What a peer sent may be part of the error's text, so only its kind and place are logged.
    """
    cause = first_cause(error)
    if isinstance(cause, Stopped | StoreUnavailable | StoreDamaged):
        raise error
    place = "".join(traceback.format_tb(cause.__traceback__))
    logger.error("%s failed with %s\n%s", work, type(cause).__name__, place)


async def survived(attempt: Awaitable[object], work: str) -> bool:
    """Wait for work that is done again later in any case; False if it showed a defect."""
    try:
        await attempt
    except Exception as defect:
        raise_if_cancelled()
        survive(defect, work)
        return False
    return True
