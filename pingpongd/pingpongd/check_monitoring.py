"""Can metrics, health and spans be had, as far as they are configured?"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping

from pingpong_bus.errors import ConfigError
from pingpongd.check_finding import Finding, doubtful, failed, passed
from pingpongd.config import DaemonConfig
from pingpongd.http_server import check_address
from pingpongd.monitoring import NO_METRICS, NO_TRACES, TRACE_MODULES, is_loopback, traces_endpoint


def monitoring_findings(config: DaemonConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Nothing to say of what is not configured. Ports are not tried: the daemon that has them may be running."""
    if config.http.listen is not None:
        yield _http_finding(config.http.listen)
    try:
        endpoint = traces_endpoint(config, environ)
    except ConfigError as error:
        yield failed("traces", error)
        return
    if endpoint is None:
        return
    missing = [name for name in TRACE_MODULES if not _is_there(name)]
    if not missing:
        yield passed("traces", f"spans are sent to {endpoint.host}")
    elif endpoint.configured:
        yield failed("traces", NO_TRACES)
    else:
        yield doubtful("traces", f"{endpoint.variable} is set, and no spans are sent.", NO_TRACES.hint)


def _http_finding(listen: str) -> Finding:
    if importlib.util.find_spec("prometheus_client") is None:
        return failed("http", NO_METRICS)
    try:
        check_address(listen)
    except ConfigError as error:
        return failed("http", error)
    if is_loopback(listen.rpartition(":")[0].strip("[]")):
        return passed("http", f"metrics and health at http://{listen}")
    text = f"metrics and health at http://{listen}: whoever reaches it may read them."
    return doubtful("http", text, "Let a firewall pass only those who should, or listen at 127.0.0.1.")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor is the package that it would be in
        return False
