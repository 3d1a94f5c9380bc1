"""The commands of `ntf-agent`."""
