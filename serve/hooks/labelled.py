"""Labels that a postprocess takes by the place of the largest score: as many as the network has classes."""

from __future__ import annotations

import ast

__all__ = ["label_lists", "length_of", "mislabelled"]

MEND = "name each class of the network once, in its order"


def label_lists(tree: ast.Module) -> dict[str, int]:
    """Constants of a module that postprocess indexes by nothing but an argmax, and at which line.

    `LABELS[int(scores.argmax())]` is one; where a number is added or a slice taken first, nobody knows what is meant.
    """
    found = {}
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or function.name != "postprocess":
            continue
        if len([*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]) != 1:
            return {}  # which of the outputs is it?
        for node in ast.walk(function):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and _is_argmax(node.slice):
                found[node.value.id] = node.lineno
    return found


def length_of(tree: ast.Module, name: str) -> int | None:
    """Of a list that is written out, or made for each of a range; None where only running it would tell."""
    lengths = []
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                lengths.append(_length(node.value))
    return lengths[0] if len(lengths) == 1 else None


def mislabelled(name: str, labels: int, output: str, classes: int) -> str:
    """What is wrong, "" where nothing is."""
    if labels == classes:
        return ""
    return f"{name} has {labels} labels, and the network's {output} has {classes} classes"


def _is_argmax(index: ast.expr) -> bool:
    if isinstance(index, ast.Call) and isinstance(index.func, ast.Name) and index.func.id == "int" and index.args:
        return _is_argmax(index.args[0])
    if not isinstance(index, ast.Call) or not isinstance(index.func, ast.Attribute) or index.func.attr != "argmax":
        return False
    of = index.func.value
    if isinstance(of, ast.Name) and of.id == "np" and index.args:  # np.argmax(scores)
        of = index.args[0]
    return isinstance(of, ast.Name)


def _length(value: ast.expr | None) -> int | None:
    if isinstance(value, ast.List | ast.Tuple):
        return None if any(isinstance(each, ast.Starred) for each in value.elts) else len(value.elts)
    if isinstance(value, ast.ListComp) and len(value.generators) == 1 and not value.generators[0].ifs:
        over = value.generators[0].iter
        if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.func.id == "range":
            match over.args:
                case [ast.Constant(value=int(count))]:
                    return count
    return None
