"""Notifications of connections: the device's token, and a notifier for every receive queue."""
