"""config.pbtxt: what is written comes back, and what can't be read is told."""

from __future__ import annotations

import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.errors import RepositoryError
from serve.config.model_config import (
    Accelerator,
    CudaOptimization,
    DataType,
    EnsembleStep,
    ExecutionAccelerators,
    GraphOptimization,
    ModelAllVersions,
    ModelConfig,
    ModelDynamicBatching,
    ModelEnsembling,
    ModelInput,
    ModelInstanceGroup,
    ModelLatestVersions,
    ModelOptimizationPolicy,
    ModelOutput,
    ModelPinnedMemoryBuffer,
    ModelQueuePolicy,
    ModelRateLimiter,
    ModelResponseCache,
    ModelSpecificVersions,
    ModelTensorReshape,
    ModelTransactionPolicy,
    ModelVersionPolicy,
    ModelWarmup,
    RateLimiterResource,
    WarmupInput,
)
from serve.config.pbtxt import from_pbtxt, to_pbtxt

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
COUNTS = st.integers(0, 2**31 - 1)
DIMS = st.lists(st.integers(-1, 2**62), max_size=3).map(tuple)
TYPES = st.sampled_from(typing.get_args(DataType))
RESHAPES = st.none() | st.builds(ModelTensorReshape, DIMS)
INPUTS = st.builds(ModelInput, TEXTS, TYPES, DIMS, RESHAPES, st.booleans())
OUTPUTS = st.builds(ModelOutput, TEXTS, TYPES, DIMS, RESHAPES, TEXTS)
RATES = st.builds(
    ModelRateLimiter, st.lists(st.builds(RateLimiterResource, TEXTS, COUNTS), max_size=2).map(tuple), COUNTS
)
GROUPS = st.builds(
    ModelInstanceGroup,
    COUNTS,
    st.sampled_from(["KIND_AUTO", "KIND_GPU", "KIND_CPU"]),
    st.lists(COUNTS, max_size=2).map(tuple),
    st.none() | RATES,
    st.lists(TEXTS, max_size=2).map(tuple),
)
QUEUES = st.builds(ModelQueuePolicy, st.sampled_from(["REJECT", "DELAY"]), COUNTS, st.booleans(), COUNTS)
BATCHINGS = st.builds(
    ModelDynamicBatching,
    st.lists(COUNTS, max_size=2).map(tuple),
    COUNTS,
    st.booleans(),
    COUNTS,
    COUNTS,
    st.none() | QUEUES,
    st.dictionaries(COUNTS, QUEUES, max_size=2),
)
MAPS = st.dictionaries(TEXTS, TEXTS, max_size=3)
ACCELERATORS = st.lists(st.builds(Accelerator, TEXTS, MAPS), max_size=2).map(tuple)
OPTIMIZATIONS = st.builds(
    ModelOptimizationPolicy,
    st.none() | st.builds(GraphOptimization, st.integers(-1, 2)),
    st.none() | st.builds(CudaOptimization, st.booleans()),
    st.none() | st.builds(ExecutionAccelerators, ACCELERATORS, ACCELERATORS),
    st.none() | st.builds(ModelPinnedMemoryBuffer, st.booleans()),
    st.none() | st.builds(ModelPinnedMemoryBuffer, st.booleans()),
)
STEPS = st.builds(EnsembleStep, TEXTS, st.integers(-1, 9), MAPS, MAPS)
ENSEMBLES = st.builds(ModelEnsembling, st.lists(STEPS, max_size=3).map(tuple))
POLICIES = st.one_of(
    st.builds(ModelVersionPolicy, latest=st.builds(ModelLatestVersions, COUNTS)),
    st.just(ModelVersionPolicy(all=ModelAllVersions())),
    st.builds(ModelVersionPolicy, specific=st.builds(ModelSpecificVersions, st.lists(COUNTS, max_size=2).map(tuple))),
)
WARMUP_INPUTS = st.one_of(
    st.builds(WarmupInput, TYPES, DIMS, zero_data=st.just(True)),
    st.builds(WarmupInput, TYPES, DIMS, random_data=st.just(True)),
    st.builds(WarmupInput, TYPES, DIMS, input_data_file=TEXTS.filter(bool)),
)
WARMUPS = st.builds(ModelWarmup, TEXTS, COUNTS, st.dictionaries(TEXTS, WARMUP_INPUTS, max_size=2), COUNTS)
# One scheduler at most, as Triton has it.
SCHEDULERS = st.one_of(
    st.just((None, None)),
    BATCHINGS.map(lambda batching: (batching, None)),
    ENSEMBLES.map(lambda ensemble: (None, ensemble)),
)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    batching, ensemble = draw(SCHEDULERS)
    return ModelConfig(
        name=draw(TEXTS),
        platform=draw(TEXTS),
        backend=draw(TEXTS),
        version_policy=draw(st.none() | POLICIES),
        max_batch_size=draw(COUNTS),
        input=tuple(draw(st.lists(INPUTS, max_size=2))),
        output=tuple(draw(st.lists(OUTPUTS, max_size=2))),
        optimization=draw(st.none() | OPTIMIZATIONS),
        default_model_filename=draw(TEXTS),
        metric_tags=draw(MAPS),
        model_transaction_policy=draw(st.none() | st.builds(ModelTransactionPolicy, st.booleans())),
        response_cache=draw(st.none() | st.builds(ModelResponseCache, st.booleans())),
        instance_group=tuple(draw(st.lists(GROUPS, max_size=2))),
        dynamic_batching=batching,
        ensemble_scheduling=ensemble,
        parameters=draw(MAPS),
        model_warmup=tuple(draw(st.lists(WARMUPS, max_size=2))),
    )


@given(configs())
def test_what_is_written_is_read_back_the_same(config: ModelConfig) -> None:
    text = to_pbtxt(config)
    assert from_pbtxt(text) == config
    assert to_pbtxt(from_pbtxt(text)) == text


def test_fields_that_are_not_modelled_are_understood_and_left_out() -> None:
    config = from_pbtxt(
        'name: "a" model_operations { op_library_filename: "x" } batch_input { kind: BATCH_ITEM_SHAPE }'
    )
    assert config == ModelConfig("a")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('name: "a"\nmax_batch_sizes: 3', "2:1"),
        ("name: 3", "1:7"),
        ("{", "1:1"),
        ("input { data_type: FLOAT }", "FLOAT"),
    ],
)
def test_a_mistake_is_told_with_its_line(text: str, why: str) -> None:
    with pytest.raises(RepositoryError, match=r"models/a/config\.pbtxt") as caught:
        from_pbtxt(text, source="models/a/config.pbtxt")
    assert why in caught.value.why
