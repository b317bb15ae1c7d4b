"""The worker: one process per device group, hosting one engine."""
