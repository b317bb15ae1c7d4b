"""Where in a rendered chat template which text stands: what makes an output spliceable as ids.

A template is a program. It is run with stand-ins for the messages' texts, and taken as cut where every stand-in comes
back once, in order and unchanged. Whether the real texts, and whatever the outputs turn out to be, would also come back
so is then tried: outputs that are empty, that begin with a space, that hold one of the strings the template itself
mentions (it may look for them), and so on. Where one does not, the prompt cannot be known ahead of the outputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import msgspec
from jinja2 import Environment
from jinja2.exceptions import TemplateError

from pingpong_bus.chain import OutputPart, RenderedMessage, TextPart, merge_text
from pingpong_bus.errors import ChainError

Part = TextPart | OutputPart
Render = Callable[[list[dict[str, str]], Mapping[str, Any]], str]
"""Chat messages and further variables to text, with the generation prompt at its end."""

_STAND_IN = "qzj{:05d}vxk"
"""For a message, by its number."""
_OUTPUTS = ("qzj vxk", "Жщ-5_猫?")
"""For outputs, in two alphabets: what changes between them depends on what the messages say."""
_BEFORE, _AFTER = " \n", "\n "
"""What stand-ins are wrapped in to see whether a template trims."""
_PROBES = ("", "\n", " \nqzj\n ", "\n qzj \n", "qzj" * 4000)
"""Outputs of an agent that templates may treat in their own way."""
_TEMPLATE_FAULTS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What running a template may raise: its own complaints, and faults of its code."""
_REMEMBERED = 256
"""Shapes of prompts whose triggers are remembered."""
_PRIVATE_USE = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))
"""Characters without a meaning, of which one marks what is hidden from a template."""

_TRIMS = (
    "the chat template trims messages, and an output stands at the edge of one; put words around the reference to "
    "have it read ahead."
)
_DEPENDS = "the text that the chat template adds depends on what the messages say."
_CHANGES = "the chat template changes a message where an output is empty, long, or begins or ends with white space."


class Layout(NamedTuple):
    """A prompt as a sequence of parts."""

    parts: list[Part]
    """In order; text is `control` where it is the template's own."""
    obstacle: str
    """Why rendering with the real outputs may give other parts, as a sentence; empty where it cannot."""


class _Cut(NamedTuple):
    """A template's own text around its messages."""

    texts: list[str]
    """One more than there are messages."""
    trims: list[tuple[bool, bool]]
    """For each message, whether white space before and after it is taken away."""


class ChatTemplate:
    """One model's chat template.

    Args:
        render: runs it.
        source: its text, or the texts of all its variants.
        control_tokens: strings of the tokens that no message can contain as such.
        shown_tokens: those of them that answers contain as text, such as `</think>`, which templates look for.

    Raises:
        jinja2.TemplateSyntaxError: from `source`.
    """

    def __init__(
        self, render: Render, source: str, control_tokens: Iterable[str], shown_tokens: Iterable[str] = ()
    ) -> None:
        self._run = render
        lexer = Environment(autoescape=True).lexer
        strings = {token.value.strip() for token in lexer.tokenize(source) if token.type == "string"} - {""}
        self._literals = sorted(strings, key=len)  # where "a" matters, say so rather than that "bad" does
        longest_first = sorted(control_tokens, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._shown = frozenset(shown_tokens)
        self._triggers: dict[bytes, str] = {}

    def lay_out(self, messages: Sequence[RenderedMessage], kwargs: Mapping[str, Any]) -> Layout:
        """Take a prompt apart.

        Args:
            messages: the texts; whatever they say, they give no `control` text.
            kwargs: further variables of the template. Strings in them count as the template's own, so that they
                must be ones in which `control_token_in` finds nothing.

        Raises:
            ChainError: the template refuses these messages; without a field.
        """
        roles = [message.role for message in messages]
        rendered = [self._render(roles, _fill(messages, output), kwargs) for output in _OUTPUTS]
        cut = self._cut(roles, kwargs)
        if isinstance(cut, str):
            return Layout(self._find(messages, kwargs), cut)
        parts = _assemble(cut, messages)
        if rendered != [_text(parts, output) for output in _OUTPUTS]:
            return Layout(self._find(messages, kwargs), _DEPENDS)
        if not any(isinstance(part, OutputPart) for part in parts):
            return Layout(parts, "")
        return Layout(parts, self._obstacle(cut, parts, messages, kwargs))

    def control_token_in(self, value: Any) -> str:
        """The first control token that the strings of a JSON value spell, keys among them; empty where none does."""
        match value:
            case str():
                found = self._control.search(value)
                return found.group() if found else ""
            case dict():
                return next(filter(None, map(self.control_token_in, [*value.keys(), *value.values()])), "")
            case list():
                return next(filter(None, map(self.control_token_in, value)), "")
            case _:
                return ""

    def _render(self, roles: Sequence[str], contents: Sequence[str], kwargs: Mapping[str, Any]) -> str:
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        try:
            return self._run(messages, kwargs)
        except _TEMPLATE_FAULTS as error:
            reason = str(error).rstrip(".") or type(error).__name__
            raise ChainError(
                f"the model's chat template refuses this: {reason}.",
                hint="Use the roles that the model knows, or raw_prompt.",
            ) from error

    def _cut(self, roles: Sequence[str], kwargs: Mapping[str, Any]) -> _Cut | str:
        """The template's own text around stand-ins for the messages, or why there is no such thing."""
        stand_ins = [_STAND_IN.format(at) for at in range(len(roles))]
        texts = _between(self._try(roles, stand_ins, kwargs), stand_ins, roles)
        if isinstance(texts, str):
            return texts
        wrapped = self._try(roles, [f"{_BEFORE}{stand_in}{_AFTER}" for stand_in in stand_ins], kwargs)
        gaps = _between(wrapped, stand_ins, roles)
        return _Cut(texts, [(False, False)] * len(roles) if isinstance(gaps, str) else _trims(texts, gaps))

    def _try(self, roles: Sequence[str], contents: Sequence[str], kwargs: Mapping[str, Any]) -> str | None:
        """The rendering, or None where the template refuses."""
        try:
            return self._render(roles, contents, kwargs)
        except ChainError:
            return None

    def _obstacle(
        self, cut: _Cut, parts: list[Part], messages: Sequence[RenderedMessage], kwargs: Mapping[str, Any]
    ) -> str:
        """Why outputs could change the rendering elsewhere than at their place; empty where they do not."""
        for probe in _PROBES:
            if not self._holds(parts, messages, probe, kwargs):
                trimmed = any(
                    any(trims) and _reads(message) for trims, message in zip(cut.trims, messages, strict=True)
                )
                return _TRIMS if trimmed else _CHANGES
        # What the template looks for is tried once per shape of prompt, on short texts.
        shape = [_shape(message) for message in messages]
        key = msgspec.json.encode([shape, kwargs])
        trigger = self._triggers.get(key)
        if trigger is None:
            trigger = self._trigger(_assemble(cut, shape), shape, kwargs)
            if len(self._triggers) >= _REMEMBERED:
                self._triggers.clear()
            self._triggers[key] = trigger
        if not trigger:
            return ""
        quoted = json.dumps(trigger, ensure_ascii=False)
        return f"the chat template looks for {quoted} in messages, and an output might contain it."

    def _trigger(self, parts: list[Part], shape: Sequence[RenderedMessage], kwargs: Mapping[str, Any]) -> str:
        """A string of the template that changes the rendering when an output contains it; empty where none does."""
        for literal in self._literals:
            if not self._holds(parts, shape, literal, kwargs):
                return literal
            if not self._holds(parts, shape, f"{literal}qzj{literal}qzj{literal}", kwargs):
                return literal
        return ""

    def _holds(
        self, parts: list[Part], messages: Sequence[RenderedMessage], output: str, kwargs: Mapping[str, Any]
    ) -> bool:
        """Whether the rendering is these parts where every output is `output`."""
        roles = [message.role for message in messages]
        return self._try(roles, _fill(messages, output), kwargs) == _text(parts, output)

    def _find(self, messages: Sequence[RenderedMessage], kwargs: Mapping[str, Any]) -> list[Part]:
        """The parts of a rendering that cannot be cut: the template's control tokens, and all else as plain text.

        Control tokens that messages spell out are hidden from the template behind marks, and so are outputs. Before
        shown tokens there is only a tag, so that a template still finds them; where tags change what it says, they are
        hidden like the others. An output that does not come back is put at the end, so that the parts are not shorter
        than the prompt.
        """
        used = set("".join(_fill(messages, "")))
        mark = next((letter for letter in map(chr, _PRIVATE_USE) if letter not in used), "")
        if not mark:
            raise ChainError("the messages use every private character of Unicode.", hint="Leave one out.")
        roles = [message.role for message in messages]
        hidden: list[Part] = []

        def contents(tag: str | None) -> list[str]:
            """The messages with marks, and with `tag` before shown tokens; None hides these too."""
            hidden.clear()
            return ["".join(spell(part, tag) for part in merge_text(message.parts)) for message in messages]

        def spell(part: Part, tag: str | None) -> str:
            if isinstance(part, OutputPart):
                return hide(part)
            return self._control.sub(lambda match: replace(match.group(), tag), part.text)

        def replace(token: str, tag: str | None) -> str:
            return hide(TextPart(token)) if tag is None or token not in self._shown else f"{tag}{token}"

        def hide(part: Part) -> str:
            hidden.append(part)
            return f"{mark}{len(hidden) - 1}{mark}"

        tag = f"{mark}t"
        rendered = self._try(roles, contents(tag), kwargs)
        if rendered is None or rendered.replace(tag, "") != self._try(roles, contents(""), kwargs):
            rendered = self._render(roles, contents(None), kwargs)
        parts: list[Part] = []
        at, tagged = 0, False
        for found in re.finditer(f"{mark}(?:t|([0-9]+){mark})", rendered):
            parts.extend(self._classify(rendered[at : found.start()], tagged=tagged))
            tagged = found[1] is None
            if not tagged:
                parts.append(hidden[int(found[1])])
            at = found.end()
        parts.extend(self._classify(rendered[at:], tagged=tagged))
        return parts + [part for part in hidden if isinstance(part, OutputPart) and part not in parts]

    def _classify(self, text: str, *, tagged: bool) -> Iterator[Part]:
        """Control tokens and what is between them; one at the start of `tagged` text is a message's."""
        at = 0
        for match in self._control.finditer(text):
            yield TextPart(text[at : match.start()])
            yield TextPart(match.group(), control=not (tagged and match.start() == 0))
            at = match.end()
        yield TextPart(text[at:])


def _reads(message: RenderedMessage) -> bool:
    return any(isinstance(part, OutputPart) for part in message.parts)


def _shape(message: RenderedMessage) -> RenderedMessage:
    """The message with its own text replaced by something short."""
    return RenderedMessage(message.role, [TextPart("qzj") if isinstance(p, TextPart) else p for p in message.parts])


def _text(parts: Sequence[Part], output: str) -> str:
    return "".join(output if isinstance(part, OutputPart) else part.text for part in parts)


def _fill(messages: Sequence[RenderedMessage], output: str) -> list[str]:
    return [_text(message.parts, output) for message in messages]


def _assemble(cut: _Cut, messages: Sequence[RenderedMessage]) -> list[Part]:
    """The template's texts and the messages between them, of which the template trims the edges that are known."""
    parts: list[Part] = [TextPart(cut.texts[0], control=True)]
    for message, (trims_before, trims_after), text in zip(messages, cut.trims, cut.texts[1:], strict=True):
        own = merge_text(message.parts)
        if own and trims_before and isinstance(first := own[0], TextPart):
            own[0] = TextPart(first.text.lstrip())
        if own and trims_after and isinstance(last := own[-1], TextPart):
            own[-1] = TextPart(last.text.rstrip())
        parts += [*own, TextPart(text, control=True)]
    return merge_text(parts)


def _between(rendered: str | None, stand_ins: Sequence[str], roles: Sequence[str]) -> list[str] | str:
    """The texts around stand-ins, or which of them did not come back once and in order."""
    if rendered is None:
        return _DEPENDS
    texts: list[str] = []
    at = 0
    for stand_in, role in zip(stand_ins, roles, strict=True):
        count = rendered.count(stand_in)
        if count != 1:
            return f"the chat template {'repeats' if count else 'leaves out or changes'} the text of a {role} message."
        found = rendered.find(stand_in, at)
        if found < 0:
            return "the chat template changes the order of the messages."
        texts.append(rendered[at:found])
        at = found + len(stand_in)
    return [*texts, rendered[at:]]


def _trims(texts: Sequence[str], wrapped: Sequence[str]) -> list[tuple[bool, bool]]:
    """Which white space around each stand-in is missing from the texts between wrapped ones."""
    count = len(texts) - 1
    before, after = [False] * count, [False] * count
    for at, (text, gap) in enumerate(zip(texts, wrapped, strict=True)):
        for trims_after, trims_before in product((False, True), repeat=2):
            left = "" if trims_after or at == 0 else _AFTER
            right = "" if trims_before or at == count else _BEFORE
            if gap == f"{left}{text}{right}":
                if at > 0:
                    after[at - 1] = trims_after
                if at < count:
                    before[at] = trims_before
                break
    return list(zip(before, after, strict=True))
