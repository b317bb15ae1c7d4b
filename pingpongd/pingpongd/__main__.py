"""The command `pingpongd`: serves, and with a word after it looks after the daemon as a service."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pingpong_bus.errors import ConfigError, PingpongError
from pingpongd.check import check
from pingpongd.config import DaemonConfig, load_config
from pingpongd.daemon import run_daemon
from pingpongd.install_service import install, uninstall
from pingpongd.logs import logs_json, set_redactor, set_up_logging
from pingpongd.patch_command import add_parser as add_patch_parser
from pingpongd.patch_command import patch
from pingpongd.redaction import redactor_of

_EXIT_CODES = """\
exit codes:
  0   stopped as asked
  2   usage: the command line is off
  70  an engine failed, again and again; a new start may help
  74  the chain store cannot be written or read, for now: a full disk
  78  the configuration, the model, a device, memory or the store's data can never work: mend it, then start
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pingpongd",
        description="Runs chains of LLM agents fast: prefills the next agent's prompt while the one before decodes.\n"
        "Without a command it serves until SIGTERM or Ctrl-C.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_common(parser, None)
    parser.add_argument("--model", help="Hugging Face name, folder, or smollm2-135m (embedded), over the file's")
    parser.add_argument("--runtime-dir", metavar="DIR", help="where the sockets are, over the file's")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], help="over the file's")
    parser.add_argument(
        "--log-format",
        choices=["auto", "json", "console"],
        default="auto",
        help="auto: JSON lines, unless standard error is a terminal",
    )
    parser.add_argument("--version", action="version", version=f"pingpongd {version('pingpongd')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    checking = commands.add_parser("check", help="examine configuration and machine, and say what to do")
    _add_common(checking, argparse.SUPPRESS)
    checking.add_argument("--json", action="store_true", help="one JSON object a line")

    installing = commands.add_parser("install-service", help="make it a service of systemd, from this installation")
    removing = commands.add_parser(
        "uninstall-service", help="stop and remove the service; keeps chains and configuration"
    )
    for command in (installing, removing):
        _add_common(command, argparse.SUPPRESS)
        command.add_argument("--user", action="store_true", help="of your own systemd, without root")
        command.add_argument("--dry-run", action="store_true", help="only say what would be done")
    removing.add_argument("--purge", action="store_true", help="remove chains, logs, cache and configuration, too")
    add_patch_parser(commands)
    return parser


def _add_common(parser: argparse.ArgumentParser, default: str | None) -> None:
    """What means the same everywhere; before or after the command."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", default=default, help="TOML file; examples/cpu.toml is one"
    )
    parser.add_argument("--instance", default=default, help="name of this daemon, over the file's")


def _find_config(instance: str | None) -> Path:
    """The configuration that is used where none is named: the instance's own, if it has one."""
    folders = [Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "pingpongd", Path("/etc/pingpongd")]
    names = [f"{instance}.toml", "config.toml"] if instance else ["config.toml"]
    candidates = [folder / name for name in names for folder in folders]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise ConfigError(
        f"no configuration is named and there is neither {' nor '.join(map(str, candidates))}.",
        hint="Name one with --config; examples/cpu.toml is one.",
    )


def _load(options: argparse.Namespace) -> DaemonConfig:
    names = ("model", "instance", "runtime_dir", "log_level")
    given: dict[str, Any] = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return load_config(options.config or _find_config(options.instance), given)


def main() -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args()
    try:
        match options.command:
            case "check":
                return check(lambda: _load(options), as_json=options.json)
            case "patch":
                return patch(options)
            case "install-service":
                install(options)
            case "uninstall-service":
                uninstall(options)
            case _:
                config = _load(options)
                set_redactor(redactor_of(config, os.environ))
                set_up_logging(config.log_level, options.log_format)
                faulthandler.enable()  # where it stood when the watchdog's SIGABRT, or a fault, ended it
                run_daemon(config, lambda: _load(options))
    except PingpongError as error:
        if not logs_json():  # else the event daemon_failed says it, and a reader of the log wants no other lines
            sys.stderr.write(f"pingpongd: {error}\n")
        return 70 if error.exit_code in (1, 70) else error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
