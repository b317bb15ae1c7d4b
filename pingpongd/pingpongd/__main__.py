"""The command `pingpongd`.

Exit codes: 0 stopped as asked, 2 usage, 70 an engine failed, 78 the configuration, the model or a device cannot work.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pingpong_bus.errors import ConfigError, PingpongError
from pingpongd.config import load_config
from pingpongd.daemon import run_daemon
from pingpongd.logs import set_up_logging


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pingpongd",
        description="Runs chains of LLM agents fast: prefills the next agent's prompt while the one before decodes.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; examples/cpu.toml is one")
    parser.add_argument("--model", help="Hugging Face name, folder, or smollm2-135m (embedded), over the file's")
    parser.add_argument("--instance", help="name of this daemon, over the file's")
    parser.add_argument("--runtime-dir", metavar="DIR", help="where the sockets are, over the file's")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], help="over the file's")
    parser.add_argument(
        "--log-format",
        choices=["auto", "json", "console"],
        default="auto",
        help="auto: JSON lines, unless standard error is a terminal",
    )
    parser.add_argument("--version", action="version", version=f"pingpongd {version('pingpongd')}")
    return parser


def _find_config() -> Path:
    """The configuration that is used where none is named."""
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    candidates = [home / "pingpongd" / "config.toml", Path("/etc/pingpongd/config.toml")]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ConfigError(
        f"no configuration is named and there is neither {candidates[0]} nor {candidates[1]}.",
        hint="Name one with --config; examples/cpu.toml is one.",
    )


def main() -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args()
    given = {"model": options.model, "instance": options.instance, "runtime_dir": options.runtime_dir}
    overrides: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if options.log_level:
        overrides["log_level"] = options.log_level
    try:
        config = load_config(options.config or _find_config(), overrides)
        set_up_logging(config.log_level, options.log_format)
        run_daemon(config)
    except PingpongError as error:
        sys.stderr.write(f"pingpongd: {error}\n")
        return 70 if error.exit_code in (1, 70) else error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
