"""Any of Triton's own fields over a configuration, from tables: set by name, or refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from compress.errors import RepositoryError
from serve.config.overlay import lay_over
from serve.config.pbtxt import parse, text_of

BASE = """
name: "a" max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 5 }
instance_group { count: 2 kind: KIND_CPU } parameters { key: "k" value { string_value: "v" } }
metric_tags { key: "team" value: "x" }
"""


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"max_batch_size": 4}, "max_batch_size: 4"),
        ({"dynamic_batching": {"priority_levels": 2}}, "max_queue_delay_microseconds: 5\n  priority_levels: 2"),
        ({"dynamic_batching": {"priority_queue_policy": {"1": {"max_queue_size": 3}}}}, "key: 1"),
        ({"instance_group": [{"count": 3, "kind": "KIND_GPU"}]}, "count: 3\n  kind: KIND_GPU"),
        ({"instance_group": [{"rate_limiter": {"resources": [{"name": "R", "global": True}]}}]}, "global: true"),
        ({"parameters": {"new": "text"}}, 'string_value: "text"'),
        ({"metric_tags": {"site": "y"}}, 'key: "team"'),
        ({"response_cache": {"enable": True}}, "enable: true"),
        ({"model_transaction_policy": {}}, "model_transaction_policy {\n}"),
        ({"dynamic_batching": {"preferred_batch_size": [2, 4]}}, "preferred_batch_size: 2\n  preferred_batch_size: 4"),
    ],
)
def test_a_field_is_set_under_the_schemas_own_name(table: dict[str, Any], expected: str) -> None:
    message = parse(BASE)
    lay_over(message, table, where="network")
    assert expected in text_of(message)


def test_a_scheduler_takes_the_place_of_another() -> None:
    message = parse(BASE)
    lay_over(message, {"sequence_batching": {"max_sequence_idle_microseconds": 7}}, where="network")
    assert message.WhichOneof("scheduling_choice") == "sequence_batching"


def test_a_list_takes_the_place_of_what_was_there() -> None:
    message = parse(BASE)
    lay_over(message, {"instance_group": [{"count": 1}]}, where="network")
    assert [group.count for group in message.instance_group] == [1]


@pytest.mark.parametrize(
    ("table", "what", "mend"),
    [
        ({"max_batchsize": 4}, "'max_batchsize' in [network]", "max_batch_size"),
        ({"dynamic_batching": {"delay": 4}}, "'delay' in [network.dynamic_batching]", "max_queue_delay_microseconds"),
        ({"instance_group": [{"kind": "CPU"}]}, "network.instance_group[0].kind to 'CPU'", "KIND_CPU"),
        ({"max_batch_size": "many"}, "network.max_batch_size to 'many'", "another value"),
        ({"max_batch_size": True}, "network.max_batch_size to True", "another value"),
        ({"max_batch_size": 2**40}, "network.max_batch_size", "another value"),
        ({"dynamic_batching": 3}, "network.dynamic_batching to 3", "table"),
        ({"instance_group": {"count": 1}}, "network.instance_group", "list"),
        ({"response_cache": {"enable": 1}}, "network.response_cache.enable", "true or false"),
        ({"dynamic_batching": {"priority_queue_policy": {"x": {}}}}, "priority_queue_policy", "number as key"),
        ({"parameters": {"k": 3}}, "network.parameters.k", "another value"),
    ],
)
def test_what_the_schema_does_not_take_is_refused(table: dict[str, Any], what: str, mend: str) -> None:
    with pytest.raises(RepositoryError) as caught:
        lay_over(parse(BASE), table, where="network")
    assert what in caught.value.what
    assert mend in caught.value.mend
