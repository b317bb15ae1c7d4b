"""`pingpongd install-service` and `uninstall-service`: what runs here, as a service of systemd.

`install_service_plan.py` says what there is to do, `install_service_unit.py` what stands in the unit; this looks at the
machine, and does it.
"""

from __future__ import annotations

import argparse
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from pingpong_bus.errors import ConfigError, PingpongError, UsageError
from pingpong_worker.pinning import cuda_uuids, present_cores
from pingpongd.config import DaemonConfig, load_config, parse_config
from pingpongd.install_service_config import first_config
from pingpongd.install_service_plan import (
    CLIENT_GROUP,
    MakeFolder,
    Places,
    Remove,
    Run,
    Step,
    WriteFile,
    plan_install,
    plan_uninstall,
    system_places,
    systemctl,
    user_places,
)
from pingpongd.install_service_unit import MARK, Service, render_unit
from pingpongd.model_names import served_models
from pingpongd.monitoring import talks_beyond

_HOMES = ("/home", "/root", "/run/user")
"""What ProtectHome=yes hides."""
_TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - named to be refused
"""What PrivateTmp=yes hides."""


def install(options: argparse.Namespace) -> None:
    """Install the service that the options describe.

    Raises:
        UsageError: not for this user, or there is no systemd.
        ConfigError: the configuration is off, or something is in the way.
    """
    places, config, first = _configured(options)
    command = _command(places, options.instance)
    checks = [partial(_require_manager, places, writes=not options.dry_run), partial(_require_ours, places.unit)]
    if not places.user:
        checks.append(partial(_require_reachable, [sys.executable, command[0], __file__]))
    obstacles = _obstacles(checks, dry_run=options.dry_run)
    text = (unit_folder() / ("user/pingpongd.service" if places.user else "pingpongd.service")).read_text("utf-8")
    unit = render_unit(text, _service(places, config, command))
    accounts = (unit_folder() / "sysusers.d" / "pingpongd.conf").read_text("utf-8")
    _carry_out(plan_install(places, unit, config=first, accounts=accounts), dry_run=options.dry_run)
    if options.dry_run:
        _say(f"\n{places.unit} would be:\n\n{unit}")
        _tell(obstacles)
    else:
        _say(_what_next(places, config, wrote_config=first is not None))


def uninstall(options: argparse.Namespace) -> None:
    """Remove the service that the options describe; what it keeps stays, unless they say otherwise.

    Raises:
        UsageError: not for this user, or there is no systemd, or no such service.
        ConfigError: the unit is not ours.
    """
    places = _places(options)
    checks = [
        partial(_require_manager, places, writes=not options.dry_run),
        partial(_require_there, places.unit),
        partial(_require_ours, places.unit),
    ]
    obstacles = _obstacles(checks, dry_run=options.dry_run)
    others = [unit for unit in places.unit.parent.glob("pingpongd*.service") if unit != places.unit]
    _carry_out(plan_uninstall(places, purge=options.purge, last=not others), dry_run=options.dry_run)
    if not options.purge:
        kept = [path for path in (places.config, *places.folders.values()) if path.exists()]
        _say("Kept, and removed with --purge: " + ", ".join(map(str, kept)) if kept else "Nothing of it is left.")
    _tell(obstacles)


def _obstacles(checks: Sequence[Callable[[], None]], *, dry_run: bool) -> list[PingpongError]:
    """Why it cannot be done here. That ends it, unless it is only to be told what would be done."""
    found: list[PingpongError] = []
    for check in checks:
        try:
            check()
        except (UsageError, ConfigError) as error:
            if not dry_run:
                raise
            found.append(error)
    return found


def _tell(obstacles: Sequence[PingpongError]) -> None:
    for error in obstacles:
        _say(f"Note: here it would be refused: {error}")


def unit_folder() -> Path:
    """The unit files that are shipped: systemd/ of the project, which is linked into this package."""
    return Path(__file__).resolve().parent / "systemd"


def _places(options: argparse.Namespace) -> Places:
    instance = options.instance or "default"
    config = options.config.absolute() if options.config else None
    if options.user:
        return user_places(instance, Path.home(), os.environ, config)
    return system_places(instance, config)


def _configured(options: argparse.Namespace) -> tuple[Places, DaemonConfig, str | None]:
    """Places and configuration; and the text of the configuration, where it has still to be written."""
    places = _places(options)
    overrides = {"instance": options.instance} if options.instance else {}
    if places.config.exists() or options.config:
        config = load_config(places.config, overrides)
        if not options.instance and config.instance != "default":  # named by the file alone
            options.instance = config.instance
            named = options.config or places.config
            places = _places(argparse.Namespace(**{**vars(options), "config": named}))
        return places, config, None
    text = first_config(
        path=str(places.config),
        unit=places.unit.name,
        user=places.user,
        gpus=_gpus(),
        cores=present_cores(),
    )
    return places, parse_config(tomllib.loads(text) | overrides, source=str(places.config)), text


def _gpus() -> int:
    try:
        return len(cuda_uuids())
    except ConfigError:  # no driver, or nothing that could ask it
        return 0


def _command(places: Places, instance: str | None) -> list[str]:
    """The daemon's command line in this environment."""
    script = Path(sys.prefix) / "bin" / "pingpongd"
    program = [str(script)] if os.access(script, os.X_OK) else [sys.executable, "-m", "pingpongd"]
    named = ["--instance", instance] if instance else []
    return [*program, *named, "--config", str(places.config)]


def _service(places: Places, config: DaemonConfig, command: Sequence[str]) -> Service:
    models = [Path(model).expanduser() for model in served_models(config).values()]
    read = [Path(sys.prefix), Path(sys.executable).resolve(), Path(__file__).resolve(), places.config]
    read += [model.absolute() for model in models]
    return Service(
        instance=places.instance,
        user=places.user,
        command=command,
        start_seconds=config.start_seconds,
        drain_seconds=config.drain_seconds,
        client_group=config.client_group,
        reads_homes=any(str(path).startswith(f"{home}/") for path in read for home in _HOMES),
        fetches=config.engine == "vllm" and not all(model.is_dir() for model in models),
        talks_beyond=talks_beyond(config),
        writable=[folder for folder in (config.runtime_dir, config.state_dir, config.log_dir) if folder],
        confined=not places.user or _has_namespaces(),
    )


def _has_namespaces() -> bool:
    """Whether the kernel gives a user namespaces: some distributions forbid it."""
    program = shutil.which("unshare")
    if program is None:
        return False
    return subprocess.run([program, "--user", "--mount", "true"], capture_output=True, check=False).returncode == 0


def _require_manager(places: Places, *, writes: bool) -> None:
    """Raise UsageError unless systemd runs and this user may change its service."""
    if shutil.which("systemctl") is None or not Path("/run/systemd/system").is_dir():
        raise UsageError(
            "systemd does not run on this machine.",
            hint="Run `pingpongd --config FILE` under whatever does: it stays in the foreground and stops at SIGTERM.",
        )
    if places.user:
        if not (Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent") / "systemd").is_dir():
            raise UsageError(
                "your own systemd cannot be reached: XDG_RUNTIME_DIR names no folder of it.",
                hint="Log in as the user, not by su or sudo; or `machinectl shell USER@`.",
            )
    elif writes and os.geteuid() != 0:
        raise UsageError("the system's service is changed by root.", hint="Use sudo, or --user for one of your own.")


def _require_there(unit: Path) -> None:
    """Raise UsageError where there is no such unit."""
    if not unit.exists():
        raise UsageError(f"{unit} does not exist: nothing to uninstall.", hint="Name the right --instance or --user.")


def _require_ours(unit: Path) -> None:
    """Raise ConfigError for a unit that somebody else wrote."""
    if unit.exists() and not unit.read_text(encoding="utf-8", errors="replace").startswith(MARK):
        raise ConfigError(f"{unit} was not written by this command.", hint="Move it away, then try again.")


def _require_reachable(paths: Sequence[str]) -> None:
    """Raise ConfigError where the service's user cannot get at this installation: systemd would only say 203/EXEC."""
    for path in {Path(path).resolve() for path in paths} | {Path(path).absolute() for path in paths}:
        if any(path.is_relative_to(folder) for folder in _TEMPORARY):
            raise ConfigError(
                f"{path} is in a temporary folder, and a service has such folders of its own.",
                hint="Install pingpongd where it can stay, such as /opt.",
            )
        for folder in path.parents:
            if not folder.stat().st_mode & stat.S_IXOTH:
                raise ConfigError(
                    f"the service's user could not reach {path}: {folder} is closed to others.",
                    hint=f"Install pingpongd where all may read, such as /opt, or `chmod o+x {folder}`.",
                )


def _carry_out(steps: Sequence[Step], *, dry_run: bool) -> None:
    for step in steps:
        _say(f"{'would ' if dry_run else ''}{step}")
        if not dry_run:
            try:
                _do(step)
            except OSError as error:
                raise ConfigError(f"could not {step}: {error.strerror}.") from None


def _do(step: Step) -> None:
    match step:
        case WriteFile(path, text, mode, group):
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f".{path.name}.new")  # it appears complete, or not at all
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - of a descriptor
                file.write(text)
            if group is not None:
                shutil.chown(new, group=group)
            new.chmod(mode)
            new.rename(path)
        case MakeFolder(path, mode):
            path.mkdir(mode=mode, parents=True, exist_ok=True)
        case Remove(path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        case Run(command, may_fail):
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            if done.returncode != 0 and not may_fail:
                words = done.stderr.strip().splitlines()
                raise ConfigError(f"could not {step}: {words[-1] if words else f'exit code {done.returncode}'}.")


def _what_next(places: Places, config: DaemonConfig, *, wrote_config: bool) -> str:
    def line(command: str, what: str) -> str:
        return f"  {command:<58} {what}"

    unit = places.unit.name.removesuffix(".service")
    lines = ["", "Next:"]
    if wrote_config:
        lines.append(line(f"$EDITOR {places.config}", "model and devices, as found on this machine"))
    lines += [
        line(f"pingpongd check --config {places.config}", "whether it can work"),
        line(" ".join(systemctl(places, "enable", "--now", unit)), "start it, now and at every boot"),
    ]
    if places.user:
        lines.append(line(f"loginctl enable-linger {pwd.getpwuid(os.getuid()).pw_name}", "at boot, not at login"))
    elif config.client_group:
        lines.append(line(f"usermod -aG {config.client_group} YOU", "let YOU use it, from the next login on"))
    else:
        lines.append(f'  Only root and the service can use it: set client_group = "{CLIENT_GROUP}" in {places.config}.')
    return "\n".join(lines)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
