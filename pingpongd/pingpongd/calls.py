"""What `call` steps may use: the configuration's `[calls]`, checked and with its secrets filled in. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from pingpong_bus.chain import Chain
from pingpong_bus.errors import ChainError, ConfigError

if TYPE_CHECKING:  # which asks us whether it is right
    from pingpongd.config import CallConfig

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""As chains can write it (`chain.Name`)."""
_VARIABLE = re.compile(r"\$(?:\$|([A-Za-z_][A-Za-z0-9_]*))")
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e]*")
_FRAMING = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers that say how a message is cut and packed, which is ours to say."""
_SECRET_HEADER = re.compile(r"auth|token|secret|key|cookie|passw|credential|signature", re.IGNORECASE)


def check_call_configs(calls: Mapping[str, CallConfig]) -> None:
    """Refuse what could never be called.

    Raises:
        ConfigError: naming the key.
    """
    for name, call in calls.items():
        where = f"calls.{name}"
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f'"{name}" is not 1 to 64 letters, digits, _ and -, so that no chain can name it.', field=where
            )
        if (call.command is None) == (call.url is None):
            raise ConfigError("a call has one of command and url.", field=where, hint="Keep one of them.")
        if call.command is not None:
            if not call.command or not call.command[0]:
                raise ConfigError("the command is empty.", field=f"{where}.command", hint='Such as ["jq", "."].')
            if any("\0" in word for word in call.command):
                raise ConfigError("no command can hold a NUL.", field=f"{where}.command", hint="Leave it out.")
            if call.headers:
                raise ConfigError("a command has no headers.", field=f"{where}.headers", hint="Leave them out.")
        else:
            _check_url(call.url or "", f"{where}.url")
            if call.environment:
                raise ConfigError("a url has no environment.", field=f"{where}.environment", hint="Leave it out.")
        for variable, value in call.environment.items():
            if not variable or "=" in variable or "\0" in variable + value:
                raise ConfigError(
                    "no environment can hold it.",
                    field=f"{where}.environment.{variable}",
                    hint='Give it a name without "=", and leave out NULs.',
                )
        for header, value in call.headers.items():
            if header.lower() in _FRAMING:
                raise ConfigError(
                    "the daemon sets this header itself, or never.",
                    field=f"{where}.headers.{header}",
                    hint="Leave it out.",
                )
            if not _HEADER.fullmatch(header) or not _HEADER_VALUE.fullmatch(value):
                raise ConfigError(
                    "it is no header of HTTP.",
                    field=f"{where}.headers.{header}",
                    hint="Write it in ASCII, on one line.",
                )


def _check_url(url: str, where: str) -> None:
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        plain = url.isascii() and not any(one.isspace() for one in url)
    except ValueError:
        whole = plain = False
    if not whole or not plain:
        raise ConfigError(
            "it is no URL that can be posted to.", field=where, hint='Such as "http://127.0.0.1:8000/search".'
        )
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            "the URL has a password in it.", field=where, hint='Write it as a header, such as "Basic $LOGIN".'
        )


def resolve_calls(calls: Mapping[str, CallConfig], environment: Mapping[str, str]) -> dict[str, CallConfig]:
    """The calls with the daemon's environment variables in the place of "$NAME" in headers and environments; "$$" is a
    dollar sign.

    Raises:
        ConfigError: there is no such variable, or it cannot stand in a header.
    """
    return {
        name: msgspec.structs.replace(
            call,
            headers=_filled(call.headers, environment, f"calls.{name}.headers", _HEADER_VALUE),
            environment=_filled(call.environment, environment, f"calls.{name}.environment", None),
        )
        for name, call in calls.items()
    }


def _filled(
    values: Mapping[str, str], environment: Mapping[str, str], where: str, allowed: re.Pattern[str] | None
) -> dict[str, str]:
    found = {}
    for key, value in values.items():
        for variable in _variables(value):
            if variable not in environment:
                raise ConfigError(
                    f"the daemon's environment has no variable {variable}.",
                    field=f"{where}.{key}",
                    hint="Set it, or write $$ for a dollar sign.",
                )
        found[key] = _VARIABLE.sub(lambda one: environment[one[1]] if one[1] else "$", value)
        if allowed is not None and not allowed.fullmatch(found[key]):
            raise ConfigError(
                "its variables hold what no header may.", field=f"{where}.{key}", hint="Use one line of ASCII."
            )
    return found


def call_secrets(calls: Mapping[str, CallConfig], environment: Mapping[str, str]) -> set[str]:
    """What of the calls must stand in no log: the variables that they name, and headers and variables of commands whose
    names say so."""
    found: set[str] = set()
    for call in calls.values():
        for key, value in (*call.headers.items(), *call.environment.items()):
            names = _variables(value)
            found |= {environment[name] for name in names if name in environment}
            if _SECRET_HEADER.search(key) and not names:
                found |= {value, value.rpartition(" ")[2]}  # "Bearer TOKEN" is told without its first word, too
    return found - {""}


def quoted(what: str, said: str) -> str:
    """What the other side said, for the end of an error's sentence; nothing where it said nothing.

    It may quote what it was given. So it is written as `redaction.py` knows it: clients see it, and the log does not.

    Args:
        what: ends with a word that it knows, such as "answer" or "output".
        said: with any spaces.
    """
    words = " ".join(said.split())
    return f"; {what}: {json.dumps(words, ensure_ascii=False)}" if words else ""


def _variables(value: str) -> list[str]:
    return [name for name in _VARIABLE.findall(value) if name]


def check_calls(chain: Chain, calls: Mapping[str, CallConfig]) -> None:
    """Refuse a chain whose steps call what is not allowed.

    Raises:
        ChainError: naming the step, and what there is.
    """
    for index, agent in enumerate(chain.agents):
        if agent.call is not None and agent.call not in calls:
            there = ", ".join(sorted(calls)) or "none"
            raise ChainError(
                f'the daemon has no call "{agent.call}".',
                field=f"agents[{index}].call",
                hint=f"Its configuration allows: {there}.",
            )
