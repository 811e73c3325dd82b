"""What an ONNX model's functions hold, in place of their calls, as ONNX Runtime runs them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from onnx import FunctionProto, ModelProto, NodeProto, checker, inliner

from compress.console.wording import counted
from compress.errors import StageError, first_line
from compress.formats.onnx.domains import has_operator, import_all, named_once, one_version
from compress.formats.onnx.scope import Taken, fresh, inner_nodes
from compress.vetting.onnx_functions import MAX_FUNCTIONS

__all__ = ["written_out"]

_Key = tuple[str, str, str]


def written_out(model: ModelProto) -> ModelProto:
    """The model, which may be changed, with what its functions hold in place of their calls.

    A function that has the name of one of ONNX Runtime's operators is never called there: it is left out. Functions
    run in the versions of operators that the model imports, whichever they import themselves.

    Args:
        model: vetted, so that its calls end, and what they make is bounded.

    Raises:
        StageError: onnx does not write them out.
    """
    named_once(model)
    called = [each for each in model.functions if not has_operator(each.domain, each.name)]
    if len(called) < len(model.functions):
        _put(model, called)
    if not called:
        import_all(model)
        return model
    one_version(model)
    if any(each.attribute_proto for each in called):
        saying = _Saying(called)
        saying.all_in([*model.graph.node, *inner_nodes(model.graph)], ())
        _put(model, list(saying.made.values()))
    made = ModelProto()
    try:
        made.CopyFrom(inliner.inline_local_functions(model))
    except checker.ValidationError as err:
        raise _refused(first_line(err)) from err
    if made.functions:
        raise _refused(f"onnx leaves the call of {made.functions[0].name!r} as it is")
    import_all(made)
    return made


class _Saying:
    """Calls that say all that their function has a default for, which onnx's inliner drops.

    What a function passes on of its own attributes is left out where its call does not say it, and then the default of
    the inner function holds. So there is a copy of a function for each set of attributes that its calls say.

    Attributes:
        made: these copies.

    Raises:
        StageError: there are too many.
    """

    def __init__(self, functions: Collection[FunctionProto]) -> None:
        self.made: dict[tuple[_Key, frozenset[str]], FunctionProto] = {}
        self._functions: dict[_Key, FunctionProto] = {
            (each.domain, each.name, each.overload): each for each in functions
        }
        self._taken = Taken(each.name for each in functions)

    def all_in(self, nodes: Iterable[NodeProto], given: Collection[str]) -> None:
        """Complete the calls among nodes, in place.

        Args:
            nodes: of the graph, or of a function; those of bodies, too.
            given: attributes that the call of this function says.
        """
        for node in nodes:
            for at in reversed(range(len(node.attribute))):
                if node.attribute[at].ref_attr_name and node.attribute[at].ref_attr_name not in given:
                    del node.attribute[at]
            key = (node.domain, node.op_type, node.overload)
            if key in self._functions:
                said = {each.name for each in node.attribute}
                node.attribute.extend(e for e in self._functions[key].attribute_proto if e.name not in said)
                node.op_type, node.overload = self._copy(key, frozenset(each.name for each in node.attribute)), ""

    def _copy(self, key: _Key, said: frozenset[str]) -> str:
        """The name of the copy of a function for calls that say these attributes."""
        if (key, said) not in self.made:
            if len(self.made) >= MAX_FUNCTIONS:
                most = counted(MAX_FUNCTIONS, "functions")
                raise _refused(f"its calls leave out other attributes each, which makes more than {most}")
            made = self.made[key, said] = FunctionProto()
            made.CopyFrom(self._functions[key])
            made.name, made.overload = fresh(made.name, self._taken), ""
            self._taken.add(made.name)
            self.all_in([*made.node, *inner_nodes(made)], said)
        name: str = self.made[key, said].name
        return name


def _refused(why: str) -> StageError:
    return StageError(
        "can't write out the functions of an ONNX model", why=why, mend="export the model again without functions"
    )


def _put(model: ModelProto, functions: Collection[FunctionProto]) -> None:
    del model.functions[:]
    model.functions.extend(functions)
