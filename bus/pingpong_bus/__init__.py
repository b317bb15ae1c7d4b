"""The token bus: token logs in shared memory, doorbells over ZeroMQ, and every message on the wire."""
