"""A small statement-store node: the JSON-RPC methods of a real one, in memory. For tests and the demo."""
