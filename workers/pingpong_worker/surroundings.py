"""What all hops of a worker share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pingpong_bus.messages import WorkerMessage
from pingpong_bus.publisher import Publisher
from pingpong_bus.slab import Slab
from pingpong_bus.subscriber import Subscriber
from pingpong_worker.engine import Engine
from pingpong_worker.prompt import PromptCodec
from pingpong_worker.step_meter import StepMeter
from pingpong_worker.text_source import TokenizerShelf, no_other_tokenizers


@dataclass(frozen=True)
class Surroundings:
    """The engine, the logs and the supervisor, as a hop sees them."""

    engine: Engine
    prompts: PromptCodec | None
    """None where the model has no tokenizer."""
    slab: Slab
    subscriber: Subscriber
    publisher: Publisher
    report: Callable[[WorkerMessage], None]
    """Sends a message to the supervisor; never blocks."""
    meter: StepMeter = field(default_factory=StepMeter)
    """Of the engine."""
    tokenizers: TokenizerShelf = field(default_factory=lambda: TokenizerShelf(no_other_tokenizers))
    """Of models that other workers run."""
