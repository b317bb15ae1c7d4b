"""A vLLM model loader for trying and measuring without weights: ``load_format = "random"``.

vLLM's own "dummy" format gives every layer the same numbers, norms near zero and an output head equal to the embedding:
the model repeats one token and proves nothing. Here every tensor is drawn from a seed of its own, uniform ±0.035, and
norm weights are 1. The output varies with the whole context and the two best tokens lie close together: the harshest
case for a test of equality.
"""

from __future__ import annotations

from typing import Any

LOAD_FORMAT = "random"
_HALF_WIDTH = 0.035
_FIRST_SEED = 1234


def register_loader() -> None:
    """Make `load_format` "random" known to this process; safe to call again."""
    from vllm.model_executor import model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight

    if LOAD_FORMAT in getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", ()):
        return

    class RandomLoader(BaseModelLoader):  # type: ignore[misc]
        def download_model(self, model_config: Any) -> None:
            """Nothing to fetch."""

        def load_weights(self, model: Any, model_config: Any) -> None:  # noqa: ARG002 - vLLM names them
            """Fill every tensor in place, the same way in every process."""
            for index, (name, tensor) in enumerate(sorted(model.state_dict().items())):
                if name.endswith("norm.weight"):
                    tensor.data.fill_(1.0)
                else:
                    initialize_single_dummy_weight(tensor, -_HALF_WIDTH, _HALF_WIDTH, _FIRST_SEED + index)

    model_loader.register_model_loader(LOAD_FORMAT)(RandomLoader)
