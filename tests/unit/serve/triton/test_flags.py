"""What a tritonserver is told for its models."""

from __future__ import annotations

import pytest

from serve.config.model_config import ModelConfig
from serve.repository.read import ModelInfo
from serve.triton.flags import MORE_LOADERS, MOST_LOADERS, loaders_for


@pytest.mark.parametrize(
    ("models", "threads"),
    [(0, MORE_LOADERS), (1, 1 + MORE_LOADERS), (60, 60 + MORE_LOADERS), (100_000, MOST_LOADERS)],
)
def test_each_model_that_may_be_loaded_has_a_thread_up_to_a_bound(models: int, threads: int) -> None:
    model = ModelInfo("a", ModelConfig("a", backend="python"), (1,))
    assert loaders_for([model] * models) == threads


def test_a_model_with_a_broken_folder_of_versions_has_one() -> None:
    assert loaders_for([ModelInfo("e", ModelConfig("e", platform="ensemble"), ())]) == 1 + MORE_LOADERS
