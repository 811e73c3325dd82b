"""What a pickle of torch.save may name, and what stands for it: nothing that a pickle names is imported or called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["DTYPES", "KEPT", "KEPT_FAMILIES", "OTHER_TENSORS", "PYTHON_2", "STORAGES", "Global", "Instance"]

STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
    }.items()
} | dict.fromkeys(("torch.storage.UntypedStorage", "torch.UntypedStorage"), torch.uint8)  # fmt: skip
DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
# Kept as descriptions; what stands here is never imported or called.
KEPT = frozenset(
    (
        "argparse.Namespace", "builtins.complex", "builtins.bytearray", "torch.device", "torch.Tensor",
        "torch.nn.parameter.Parameter", "torch.serialization._get_layout", "torch.torch_version.TorchVersion",
        "torch._C._nn.gelu",
        # Lightning's checkpoints keep the paths that a run was given.
        *(
            f"{module}.{kind}Path"
            for module in ("pathlib", "pathlib._local")
            for kind in ("Posix", "Windows", "PurePosix", "PureWindows")
        ),
        "numpy.dtype", "numpy.ndarray",
        *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
    )
)  # fmt: skip
KEPT_FAMILIES = ("torch.nn.modules.", "torch.nn.functional.", "numpy.dtypes.", "torch.per_")
OTHER_TENSORS = {
    f"torch._utils._rebuild_{name}"
    for name in (
        "qtensor", "sparse_tensor", "sparse_csr_tensor", "nested_tensor", "wrapper_subclass",
        "meta_tensor_no_storage", "device_tensor_from_numpy", "device_tensor_from_cpu_tensor",
    )
}  # fmt: skip
PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}


@dataclass(frozen=True, eq=False)
class Global:
    """A class or function that a pickle names; it was not imported."""

    name: str


@dataclass(eq=False)
class Instance:
    """An object that a pickle describes; it was not made.

    Attributes:
        name: of its class, or of the function that would give it.
        args: what that would be called with.
        state: what its `__setstate__` would be given, mostly its `__dict__`.
    """

    name: str
    args: tuple[Any, ...]
    state: Any = None
