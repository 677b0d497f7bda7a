"""The policy as an HTTP endpoint: calls, the callers that answer them, and the wire protocols of clients."""
