"""Options as TOML, and back."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.artifact import sha256_of
from compress.cli import main
from compress.errors import ChangedError, RecipeError
from compress.formats.checkpoint import save
from compress.jobs.export import Silent, export
from compress.jobs.recipe_file import COMMANDS, read, recipe_text, write
from compress.options import ExportOptions, OptimizeOptions
from compress.options.ranges import check_ranges
from compress.stage import Progress
from tests.models import mlp
from tests.unit.compress.formats.test_checkpoint import X

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=20)


def test_what_is_written_is_what_is_not_at_its_default() -> None:
    text = recipe_text(Path("model.pt"), ExportOptions(output=Path("out"), prune=0.5, input=("x:float32[batch,3]",)))
    assert text == (
        'command = "export"\ncheckpoint = "model.pt"\ninput = ["x:float32[batch,3]"]\noutput = "out"\nprune = 0.5\n'
    )


@given(prune=st.floats(0.01, 0.99), calibration=TEXTS, smooth=st.booleans(), inputs=st.lists(TEXTS, max_size=3))
def test_an_export_survives_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, prune: float, calibration: str, smooth: bool, inputs: list[str]
) -> None:
    options = ExportOptions(
        output=Path("out"), prune=prune, calibration=calibration, smooth=smooth, input=tuple(inputs), int8="static"
    )
    path = tmp_path_factory.mktemp("recipe") / "r.toml"
    write(path, Path("model.pt"), options)
    command, values = read(path)
    assert command == "export"
    assert values["checkpoint"] == "model.pt"
    assert values["prune"] == prune
    assert values["calibration"] == calibration
    assert list(values.get("input", [])) == inputs
    assert values.get("smooth", False) is smooth


@pytest.mark.parametrize("kind", [ExportOptions, OptimizeOptions])
def test_every_field_has_a_key(kind: type, tmp_path: Path) -> None:
    """A value of each field's own kind is written and comes back."""
    samples = {
        "str | None": "top1",
        "Path | None": Path("x"),
        "bool": True,
        "int": 7,
        "float": 0.25,
        "float | None": 0.5,
    }
    for field in dataclasses.fields(kind):
        plain = str(field.type).removeprefix("Annotated[").split(", Parameter")[0].strip()
        if plain in samples and field.name != "output":
            options = dataclasses.replace(kind(output=Path("out")), **{field.name: samples[plain]})
            write(tmp_path / "r.toml", Path("m.pt"), options)
            assert field.name.replace("_", "-") in read(tmp_path / "r.toml")[1], field.name


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("checkpoint = ", "not TOML"),
        ("prune = 0.5", "no key `checkpoint`"),
        ('command = "fly"\ncheckpoint = "m.pt"', "'fly'"),
        (None, "No such file"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_told(text: str | None, why: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "r.toml").write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        read(tmp_path / "r.toml")
    assert why in caught.value.why


@pytest.mark.parametrize(
    ("line", "ways"), [('importance = "obs"', ("obs",)), ('importance = ["obs", "magnitude"]', ("obs", "magnitude"))]
)
def test_one_way_to_choose_channels_is_read_as_several_are(
    line: str, ways: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recipes of before it could be several name one, alone."""
    asked: list[OptimizeOptions] = []

    def take(_checkpoint: Path, options: OptimizeOptions, **_more: Any) -> None:
        asked.append(options)
        raise RecipeError("that will do", why="it is read", mend="nothing")

    monkeypatch.setattr("compress.jobs.export.optimize", take)
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'command = "optimize"\ncheckpoint = "m.pt"\noutput = "o"\n{line}\n', encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["run", str(recipe)])
    assert [options.importance for options in asked] == [ways]
    write(recipe, Path("m.pt"), asked[0])
    assert read(recipe)[1]["importance"] == list(ways)


@pytest.mark.parametrize(
    ("line", "said"),
    [("prune = 'much'", 'unable to convert "much"'), ("prun = 0.5", "Unknown option"), ("int8 = 'int4'", "int8")],
)
def test_a_wrong_key_or_value_names_the_recipe(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'checkpoint = "m.pt"\noutput = "o"\n{line}\n', encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        main(["run", str(recipe)])
    assert caught.value.code == 2
    error = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert said in error
    assert set(COMMANDS) == {"export", "optimize"}


def test_a_run_keeps_its_recipe_and_looks_whether_the_file_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(mlp(), tmp_path / "model.pt", inputs=X)
    recipe = tmp_path / "job.toml"
    recipe.write_text('# Mine.\ncheckpoint = "model.pt"\noutput = "out"\nint8 = "dynamic"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["compress", "run", "job.toml", "--seed", "3"])
    with pytest.raises(SystemExit) as ended:
        main(["run", "job.toml", "--seed", "3"])
    assert not ended.value.code
    command, kept = read(tmp_path / "out" / "recipe.toml")
    assert (command, kept["checkpoint"], kept["int8"], kept["seed"]) == ("export", "model.pt", "dynamic", 3)
    script = (tmp_path / "out" / "reproduce.sh").read_text()
    assert f"same {sha256_of(recipe)} job.toml\n" in script
    recipe.write_text("# Other.\n")
    done = subprocess.run([tmp_path / "out" / "reproduce.sh"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "job.toml is not what it was" in done.stderr


def test_a_recipe_may_come_through_a_pipe_which_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(mlp(), tmp_path / "model.pt", inputs=X)
    monkeypatch.chdir(tmp_path)
    reading, writing = os.pipe()
    os.write(writing, b'checkpoint = "model.pt"\noutput = "out"\nint8 = "dynamic"\n')
    os.close(writing)
    place = f"/dev/fd/{reading}"
    monkeypatch.setattr(sys, "argv", ["compress", "run", place, "--seed", "3"])
    try:
        with pytest.raises(SystemExit) as ended:
            main(["run", place, "--seed", "3"])
    finally:
        os.close(reading)
    assert not ended.value.code
    _, kept = read(tmp_path / "out" / "recipe.toml")
    assert (kept["int8"], kept["seed"]) == ("dynamic", 3)
    script = (tmp_path / "out" / "reproduce.sh").read_text()
    assert place not in script, "it has nothing more to say"
    assert "compress run out/recipe.toml\n" in script


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 100_000, "command = []", "command = {a = 1}", f"seed = {'9' * 5000}", "a = 1979-99-99", "\x00",
        "# " + "x" * (2 << 20),
    ],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_a_recipe_that_is_none_is_told_in_three_lines(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(RecipeError):
        read(tmp_path / "r.toml")


def test_what_has_no_end_is_not_read_to_it(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="more than"):
        read(Path("/dev/zero"))
    with pytest.raises(RecipeError, match="Is a directory"):
        read(tmp_path)
    sparse = tmp_path / "sparse.toml"
    with sparse.open("wb") as file:
        file.truncate(20 << 30)
    with pytest.raises(RecipeError, match="more than"):
        read(sparse)


@pytest.mark.parametrize("key", ["checkpoint", "eval", "input"])
def test_a_name_with_a_nul_in_it_which_no_command_line_can_have_is_refused(tmp_path: Path, key: str) -> None:
    value = '"a\\u0000b"' if key != "input" else '["x", "a\\u0000b"]'
    given = {"checkpoint": '"model.pt"', "output": '"out"'} | {key: value}
    (tmp_path / "r.toml").write_text("".join(f"{name} = {text}\n" for name, text in given.items()))
    with pytest.raises(RecipeError) as found:
        read(tmp_path / "r.toml")
    assert key in found.value.why
    assert "NUL" in found.value.why


def test_a_key_in_so_many_parts_that_it_takes_hours_to_read_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(".".join("a" * 500_000) + " = 1")
    with pytest.raises(RecipeError, match="recipe") as found:
        read(tmp_path / "r.toml")
    assert "dots" in found.value.why


@pytest.mark.parametrize("key", ["loader_workers", "devices", "rounds", "workers"])
def test_more_processes_or_rounds_than_any_machine_has_are_refused_before_the_first_begins(key: str) -> None:
    kind: Any = OptimizeOptions if key == "workers" else ExportOptions
    given = {"eval": "eval.npz"} if key == "workers" else {}
    options = kind(output=Path("out"), **given, **{key: 10**9})
    with pytest.raises(RecipeError) as found:
        check_ranges(options)
    assert key.replace("_", "-") in found.value.what


@pytest.mark.parametrize("key", ["importance", "allocate", "prune", "int8", "calibrators"])
def test_a_list_that_is_empty_in_a_recipe_is_refused_before_the_work(
    tmp_path: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r.toml").write_text(
        f'command = "optimize"\ncheckpoint = "m.pt"\noutput = "{tmp_path / "o"}"\neval = "e.npz"\n{key} = []\n'
    )
    with pytest.raises(SystemExit) as ended:
        main(["run", str(tmp_path / "r.toml")])
    assert ended.value.code == 2
    assert f"--{key} can't be empty" in capsys.readouterr().err


def test_no_artifact_tells_of_a_file_that_has_lost_its_name_to_another_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training may go on beside, and keep its newest checkpoint under the same name."""
    save(mlp(), tmp_path / "model.pt", inputs=X)
    save(mlp(), tmp_path / "newer.pt", inputs=X)
    read_then, newer = (sha256_of(tmp_path / name) for name in ("model.pt", "newer.pt"))
    assert read_then != newer

    class Replacing(Silent):
        def started(self, stage: str) -> Progress:
            if (tmp_path / "newer.pt").exists():
                (tmp_path / "newer.pt").replace(tmp_path / "model.pt")
            return super().started(stage)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["compress", "export", "model.pt", "-o", "out"])
    with pytest.raises(ChangedError, match=r"model\.pt was written to or replaced"):
        export(Path("model.pt"), ExportOptions(output=Path("out")), watcher=Replacing())
    assert not Path("out").exists()
    export(Path("model.pt"), ExportOptions(output=Path("out")))
    assert f"same {newer} model.pt\n" in Path("out/reproduce.sh").read_text()
