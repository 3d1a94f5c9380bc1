"""What every error of the store is: apart from the records, so that it is quick to import."""

from __future__ import annotations


class StoreError(Exception):
    """The store cannot do it; the message is fit for an operator and holds no data."""
