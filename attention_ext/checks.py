"""What the arguments of a call must be: tensors, numbers, defaults. torch is not imported here."""

import functools
import inspect
import numbers
import operator
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from itertools import zip_longest
from typing import Any, TypeVar

from shakespeare.attention_ext.parts import DEVICES, MOST_SCORES, Part

Function = TypeVar("Function", bound=Callable)
Form = TypeVar("Form")  # a dataclass
Sizes = tuple[int, int, int, int, int, int]  # B, H, Hk, Nq, Nk, d


def plain(value: Any) -> Any:
    """What a number of NumPy, or an array or tensor (), holds; any other value as it is."""
    if isinstance(value, int | float):  # also those that torch.compile has made symbols
        return value
    return value.item() if getattr(value, "shape", None) == () else value


def whole_number(name: str, value: Any, must: str = "a whole number") -> int:
    """The int of a whole number: Python's, NumPy's, or an array or tensor (). Raises TypeError for others."""
    plain_value = plain(value)
    if not isinstance(plain_value, bool) and (
        isinstance(plain_value, int) or not hasattr(plain_value, "shape")
    ):
        try:
            return operator.index(plain_value)
        except TypeError:
            pass
    raise TypeError(f"{name} is {type_text(value)}; it must be {must}")


def real_number(name: str, value: Any, must: str = "a number") -> float:
    """The int or float of a real number, also an infinite one or NaN. Raises TypeError for others."""
    plain_value = plain(value)
    if isinstance(plain_value, bool) or not isinstance(plain_value, numbers.Real):
        raise TypeError(f"{name} is {type_text(value)}; it must be {must}")
    return int(plain_value) if isinstance(plain_value, numbers.Integral) else float(plain_value)


def finite(name: str, value: Any) -> float:
    """The float of a real number. Raises TypeError as real_number(), ValueError if it is infinite or NaN."""
    number = real_number(name, value)
    if not abs(number) <= sys.float_info.max:
        raise ValueError(f"{name} is {number}; it must be finite")
    return float(number)


def truth(name: str, value: Any) -> bool:
    """The bool of True, False, 1, 0 or NumPy's, or an array or tensor () of one. Raises TypeError."""
    if isinstance(value, bool):
        return value
    plain_value = plain(value)
    if not isinstance(plain_value, int) or plain_value not in (0, 1):
        raise TypeError(f"{name} is {type_text(value)}; it must be True or False")
    return bool(plain_value)


def type_text(value: object) -> str:
    """A value's type with its article, and the shape that an array or a tensor has: 'an int'."""
    name = type(value).__name__
    shape = getattr(value, "shape", ())
    article = "an" if name[0] in "aeioAEIO" or name == "ndarray" else "a"  # a uint8
    return f"{article} {name} of shape {tuple(shape)}" if shape else f"{article} {name}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def none_is_default(function: Function) -> Function:
    """The function, where None for an argument stands for its default."""
    parameters = inspect.signature(function).parameters
    known = {name: p.default for name, p in parameters.items() if p.default is not p.empty}

    @functools.wraps(function)
    def called(*args, **options):
        names = list(parameters)[: len(args)]
        args = tuple(known.get(name) if v is None else v for name, v in zip_longest(names, args))
        options = {name: known.get(name) if v is None else v for name, v in options.items()}
        return function(*args, **options)

    return called  # type: ignore[return-value]


def set_defaults(record: Any) -> None:
    """Give each field of a dataclass that is None its default, if it has one."""
    for field in fields(record):
        if getattr(record, field.name) is None and field.default is not MISSING:
            object.__setattr__(record, field.name, field.default)


def set_whole(record: Any, *names: str) -> None:
    """Make ints of these fields of a dataclass, unless they are None. Raises TypeError as whole_number()."""
    for name in names:
        value = getattr(record, name)
        if value is not None:
            object.__setattr__(record, name, whole_number(name, value))


def made(form: type[Form], values: object, **others) -> Form:
    """A dataclass from the values whose names are fields of it, and from the others, which come first."""
    names = {field.name for field in fields(form)} & vars(values).keys()  # type: ignore[arg-type]
    return form(**{name: getattr(values, name) for name in names} | others)


# What check_tensors() let pass. torch.compile guards a set as a whole, of a dict the keys that it looks up.
_checked: dict[tuple[Any, ...], bool] = {}


def check_tensors(part: Part, q, k, v, causal: bool, min_rows: int = 1, grouped: bool = False) -> Sizes:
    """check_shapes() of tensors that the part takes; raises TypeError or ValueError naming another.

    min_rows: rows a tensor must have. grouped: heads of q may share one of k and v.
    """
    import torch

    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        name, t = next((name, t) for name, t in zip("qkv", (q, k, v)) if not isinstance(t, torch.Tensor))
        raise TypeError(f"{name} is {type_text(t)}; it must be a tensor")
    on_cpu = q.is_cpu and k.is_cpu and v.is_cpu and "cpu" in part.dtypes  # where each part takes float32
    if not (on_cpu and q.dtype is k.dtype is v.dtype is torch.float32):
        formats = part.name, *part.dtypes, q.device, q.dtype, k.device, k.dtype, v.device, v.dtype
        if formats not in _checked:
            for name, t in zip("qkv", (q, k, v)):
                _check_format(part, name, t, q)
            _checked[formats] = True
    return check_shapes(q, k, v, causal, min_rows, grouped)


def _check_format(part: Part, name: str, t, q) -> None:
    """Raise TypeError or ValueError unless the part takes a tensor's device and dtype, and q has the same."""
    if t.device.type not in part.dtypes:
        where = " or ".join(DEVICES[kind] for kind in part.dtypes if kind != "webgpu")
        raise ValueError(f"{name} is on {t.device}; it must be on {where} in {part.name}")
    if t.device != q.device:
        raise ValueError(f"{name} is on {t.device}; it must be on q's {q.device}")
    dtypes = part.dtypes[t.device.type]
    if str(t.dtype).removeprefix("torch.") not in dtypes:
        known = " or ".join(f"torch.{dtype}" for dtype in dtypes)
        raise TypeError(f"{name} is {t.dtype}; it must be {known} in {part.name}")
    if t.dtype != q.dtype:
        raise TypeError(f"{name} is {t.dtype}; it must be q's {q.dtype}")


def check_shapes(q, k, v, causal: bool, min_rows: int = 1, grouped: bool = False) -> Sizes:
    """The sizes B, H, Hk, Nq, Nk and d of a call's tensors or arrays.

    Raises ValueError, naming the argument, unless they have the shapes of a call.
    """
    of_q = q.shape
    of_k = k.shape
    if not (len(of_q) == len(of_k) == 4 and all(of_q) and all(of_k)):
        for name, shape in (("q", of_q), ("k", of_k)):
            if len(shape) != 4 or not all(shape if min_rows else (*shape[:2], shape[3])):
                must = f"it must be (B, H, N, d) with no empty dimension{'' if min_rows else ' but N'}"
                raise ValueError(f"{name} has shape {tuple(shape)}; {must}")
    B, H, Nq, d = of_q
    Bk, Hk, Nk, dk = of_k
    if grouped and H % Hk:
        raise ValueError(f"q has H={H} heads; it must be a multiple of k's {Hk}")
    if Bk != B or dk != d or Hk != H and not grouped:
        must = f"it must be ({B}, {H}, Nk, {d}), as q is {tuple(of_q)}"
        raise ValueError(f"k has shape {tuple(of_k)}; {must}")
    if v.shape != of_k:
        raise ValueError(f"v has shape {tuple(v.shape)}; it must be k's, {tuple(of_k)}")
    if causal and Nq > Nk:
        raise ValueError(f"q has Nq={Nq} rows; with causal=True it must have at most Nk={Nk}")
    check_size(Nq, Nk)
    return B, H, Hk, Nq, Nk, d


def check_size(Nq: int, Nk: int) -> None:
    """Raise ValueError if a call has too many scores."""
    if Nq * Nk >= MOST_SCORES:
        raise ValueError(f"q has Nq={Nq} and k Nk={Nk} rows; their product must be below 2^50")
