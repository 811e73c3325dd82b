"""A model that is not loaded is told of as Triton would, from its files."""

from __future__ import annotations

from pathlib import Path

from serve.gateway.oip.described import described
from serve.gateway.on_demand.catalogue import catalogue_of
from serve.pack.write import PackOptions, pack
from tests.serve_models import hook_file, tiny_artifact, unbatched_artifact


def test_it_has_the_batch_first_and_what_pack_says_of_it(tmp_path: Path) -> None:
    pack(tiny_artifact(tmp_path / "tiny"), repository=tmp_path / "models", name="hooked", hooks=hook_file(tmp_path))
    pack(unbatched_artifact(tmp_path / "one"), repository=tmp_path / "models", name="one", options=PackOptions())
    known = {name: described(each.info) for name, each in catalogue_of(tmp_path / "models").items() if each.info}
    hooked, network, one = known["hooked"], known["hooked_network"], known["one"]
    assert [str(each) for each in hooked.inputs] == ["text:BYTES[-1,1]"]
    assert [str(each) for each in network.outputs] == ["logits:FP32[-1,3]"]
    assert (hooked.part_of, network.part_of) == ("", "hooked")
    assert hooked.example is not None
    assert [str(each) for each in one.inputs] == ["x:FP32[2,2]"]
    assert (hooked.batched, one.batched) == (True, False)
    assert one.versions == ("1",)
