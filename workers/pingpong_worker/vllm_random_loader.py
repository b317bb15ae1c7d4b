"""vLLM model loaders for trying and measuring without weights: ``load_format = "random"`` and ``"counting"``.

vLLM's own "dummy" format gives every layer the same numbers, norms near zero and an output head equal to the embedding:
the model repeats one token and proves nothing. Here every tensor is drawn from a seed of its own, uniform ±0.035, and
norm weights are 1. The output varies with the whole context and the two best tokens lie close together: the harshest
case for a test of equality.

A "counting" model is one whose output is known: every token is followed by the next id, with a margin that no rounding
closes. What it computes, and how long that takes, is that of the shape; but a layer adds next to nothing to what it is
given, and the output head is the embedding, moved by one row. So whether an answer can be guessed is the benchmark's to
say: it can where the prompt holds the same ids in a row.
"""

from __future__ import annotations

from typing import Any

LOAD_FORMAT = "random"
COUNTING_FORMAT = "counting"
_QUIET = 1e-4
"""Of what a layer adds, in a model that counts."""
_HALF_WIDTH = 0.035
_FIRST_SEED = 1234


def register_loader() -> None:
    """Make the load formats known to this process; safe to call again."""
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

    class CountingLoader(RandomLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            """As a random one, then made to count.

            Raises:
                ValueError: the model has no output head of its own, or is split over devices.
            """
            super().load_weights(model, model_config)
            tensors = model.state_dict()
            embedding = next((t for name, t in tensors.items() if name.endswith("embed_tokens.weight")), None)
            head = next((t for name, t in tensors.items() if name.endswith("lm_head.weight")), None)
            ids = model_config.get_vocab_size()
            if embedding is None or head is None or embedding.data_ptr() == head.data_ptr() or len(head) < ids:
                raise ValueError('load_format "counting" takes a whole model whose output head is not its embedding.')
            head.data[1:ids] = embedding.data[: ids - 1]
            head.data[0] = embedding.data[ids - 1]
            for name, tensor in tensors.items():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    tensor.data.mul_(_QUIET)

    model_loader.register_model_loader(LOAD_FORMAT)(RandomLoader)
    model_loader.register_model_loader(COUNTING_FORMAT)(CountingLoader)
