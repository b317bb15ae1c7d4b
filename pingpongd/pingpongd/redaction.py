"""What must not stand in a log: secrets, never; what prompts and outputs say, not unless it is asked for. Pure.

No log call hands over a prompt, an input or an output. What may quote one all the same is what others wrote: an error's
sentence, a trace, a line that an engine printed. Their long quotations and lists of ids are left out here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Final

from pingpongd.calls import call_secrets
from pingpongd.config import DaemonConfig

LONGEST: Final = 4_000
"""Characters of a text that are written; the rest is counted."""
_QUOTED = 100
"""Characters of a quotation that names a thing, such as a file; a longer one quotes what somebody wrote."""
_MARGIN = 1_000
"""Looked at behind them: a secret that is cut in two is not known any more."""
_LONGEST_LIST = 1_000
_SHORTEST_SECRET = 6
"""Characters: a shorter value, such as "1", stands in too many places by chance."""
_GONE = "***"

_SECRET_NAME = re.compile(
    r"TOKEN(?!IZER|S)|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE
)
_PARAMETER = r"(?:[A-Za-z0-9_-]{0,40}(?:token|key|secret|passw(?:or)?d|credential|signature)|sig)"
_SECRETS: Final = (
    # Known kinds, by how they begin.
    (re.compile(r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}"), _GONE),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{16,}"), _GONE),
    (re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-|xox[abprs]-)[A-Za-z0-9_-]{16,}"), _GONE),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), _GONE),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"), _GONE),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), _GONE),
    (re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE), rf"\1 {_GONE}"),
    # Who signs in to what: https://user:password@host and ?token=...
    (re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]{1,20}://)[^\s/@\"']{1,256}@"), rf"\1{_GONE}@"),
    (re.compile(rf"([?&]{_PARAMETER}=)[^\s&#\"']+", re.IGNORECASE), rf"\1{_GONE}"),
    # By name: HF_TOKEN=..., "api_key": "...", --api-key ...; "token 5" and "key: value" of a sentence are none.
    (
        re.compile(
            r"(?<![A-Za-z0-9_-])((?:[A-Za-z0-9_-]*(?:api[_-]?key|access[_-]?key|private[_-]?key|secret|passw(?:or)?d|"
            r"credentials?|[_-]token)|authorization)[\"']?(?:\s*[:=]\s*|\s+(?=[\"'])))([\"']?)[^\s\"',;}\])]{4,}",
            re.IGNORECASE,
        ),
        rf"\1\2{_GONE}",
    ),
)
_IDS = re.compile(r"\[\s*-?\d+(?:\s*,\s*-?\d+){7,}\s*(?:,\s*\.\.\.\s*)?\]")
_LABELLED = re.compile(
    r"\b((?:prompt|prompts|inputs?|text|content|messages|outputs?|answer|completion)[\"']?\s*[:=]\s*)"
    r"(\"(?:\\.|[^\"\\])*\"?|'(?:\\.|[^'\\])*'?)"
)
_BRACES = re.compile(r"\{\{(?!\s{0,9}[\w.-]{1,64}\s{0,9}\}\})([^{}]*)(?:\}\}|\Z)")
"""What stands in braces and is no name: a prompt's own text, which an error quotes as a reference that is none."""
_LONG_QUOTES = re.compile(rf"(?<!\w)(?:\"(?:\\.|[^\"\\]){{{_QUOTED},}}(?:\"|\Z)|'(?:\\.|[^'\\]){{{_QUOTED},}}(?:'|\Z))")


class Redactor:
    """Takes out of log lines what must not stand there.

    Args:
        prompts: whether what prompts and outputs say may stand there.
        secrets: values that must not, wherever they occur.
    """

    def __init__(self, *, prompts: bool = False, secrets: Iterable[str] = ()) -> None:
        self._prompts = prompts
        # The longest first: one may begin with another.
        known = sorted({one for one in secrets if len(one) >= _SHORTEST_SECRET}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def text(self, text: str) -> str:
        """A text without secrets, cut at `LONGEST` characters; without what prompts say, unless that is asked for."""
        length = len(text)
        text = text[: LONGEST + _MARGIN]
        if self._known is not None:
            text = self._known.sub(_GONE, text)
        for pattern, instead in _SECRETS:
            text = pattern.sub(instead, text)
        if not self._prompts:
            text = _IDS.sub(lambda found: f"[{found[0].count(',') + 1} numbers]", text)
            text = _LABELLED.sub(lambda found: f"{found[1]}<{len(found[2])} characters>", text)
            text = _BRACES.sub(lambda found: f"{{{{<{len(found[1])} characters>}}}}", text)
            text = _LONG_QUOTES.sub(lambda found: f"<{len(found[0])} characters>", text)
        return text if length <= LONGEST else f"{text[:LONGEST]} ... of {length:,} characters"

    def value(self, value: object) -> object:
        """The same for any value of a log line; lists are cut at 1,000 entries."""
        match value:
            case float() if not math.isfinite(value):
                return None  # JSON has no such number
            case bool() | int() | float() | None:
                return value
            case str():
                return self.text(value)
            case Mapping():
                return {str(name): self.value(one) for name, one in value.items()}
            case list() | tuple() | set() | frozenset():
                return [self.value(one) for _, one in zip(range(_LONGEST_LIST), value, strict=False)]
            case _:
                return self.text(str(value))


def secret_values(environment: Mapping[str, str]) -> set[str]:
    """Values of variables whose names say that they are secret, such as HF_TOKEN."""
    return {value for name, value in environment.items() if _SECRET_NAME.search(name)}


def redactor_of(config: DaemonConfig, environment: Mapping[str, str]) -> Redactor:
    """What a daemon's log needs.

    Args:
        config: it says whether prompts may be quoted; environments of workers stand in it.
        environment: the daemon's own.
    """
    environments = [environment, config.environment, *(group.environment for group in config.groups)]
    secrets = set().union(*map(secret_values, environments)) | call_secrets(config.calls, environment)
    return Redactor(prompts=config.log_prompts, secrets=secrets)
