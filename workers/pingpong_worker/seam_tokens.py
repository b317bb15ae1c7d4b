"""The ids of a joined prompt whose text comes bit by bit: the template's own text and the rest, part by part."""

from __future__ import annotations

from pingpong_bus.chain import TextPart
from pingpong_worker.incremental_tokens import GrowingIds
from pingpong_worker.prompt import PromptCodec


class SeamTokens:
    """Tokenizes one prompt.

    Attributes:
        ids: that no later text can change.

    Args:
        codec: of the model that reads.
    """

    def __init__(self, codec: PromptCodec) -> None:
        self.ids: list[int] = []
        self._codec = codec
        self._parts: list[TextPart] = []
        self._growing: GrowingIds | None = None

    @property
    def waiting(self) -> int:
        """Characters that the next call takes up again."""
        return 0 if self._growing is None else self._growing.waiting

    def feed(self, text: str, *, control: bool) -> None:
        """Take the prompt's next characters; where the kind changes, what came before has ended.

        Args:
            text: may be empty, which is no change of kind.
            control: whether it is the template's own, see `TextPart`.
        """
        if not text:
            return
        if self._growing is None or self._parts[-1].control is not control:
            first = self._growing is None
            self.finish()
            self._growing = self._codec.growing(control=control, first=first)
        self._parts.append(TextPart(text, control))
        self.ids += self._growing.feed(text)

    def finish(self) -> None:
        """The prompt, or a part of it, has ended."""
        if self._growing is not None:
            self.ids += self._growing.finish()

    def whole(self) -> list[int]:
        """The ids of all that came, each part tokenized at once: what `PromptCodec.join` gives of the same texts."""
        return self._codec.tokenize(self._parts)
