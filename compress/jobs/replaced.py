"""What a run of `export` or `optimize` may put in the place of what is there."""

from __future__ import annotations

from pathlib import Path

from compress.jobs.places import check_output
from compress.jobs.recipe_file import says
from compress.options import CompressOptions, EngineOptions, ExportOptions, OptimizeOptions

__all__ = ["check_outputs", "lost_recipe", "missed_of", "replaced_by", "searched_of"]


def lost_recipe(recipe: Path | None, checkpoint: Path, options: ExportOptions | OptimizeOptions) -> Path | None:
    """The recipe, unless it is an artifact's own, in whose place this run writes the same."""
    own = [folder / "recipe.toml" for folder in (options.output, missed_of(options))]
    if recipe is not None and recipe.resolve() in [path.resolve() for path in own]:
        return None if says(recipe, checkpoint, options) else recipe
    return recipe


def missed_of(options: CompressOptions) -> Path:
    """Where a result goes that misses a budget."""
    return options.output.parent / f"{options.output.name}.missed"


def searched_of(options: CompressOptions) -> Path:
    """Where a search tells of its candidates."""
    return options.output.parent / f"{options.output.name}.search"


def _may_miss(options: CompressOptions) -> bool:
    limits = ("max_drop", "target_latency_ms", "target_size_mb")
    return any(getattr(options, limit, None) is not None for limit in limits)


def check_outputs(options: CompressOptions) -> None:
    """Before hours of work: what a run may put its result in place of."""
    check_output(options.output)
    if _may_miss(options):
        check_output(missed_of(options))


def replaced_by(options: CompressOptions) -> list[Path]:
    """What a run may replace besides its output."""
    found = [missed_of(options)] if _may_miss(options) else []
    if isinstance(options, OptimizeOptions):
        found += [searched_of(options) / name for name in ("search.json", "search.html")]
    if isinstance(options, EngineOptions) and options.timing_cache is not None:
        found.append(options.timing_cache)
    return found
