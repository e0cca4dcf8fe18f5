"""Strict value types of the `gear` section, which convert and drop nothing."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Strict,
    model_validator,
)
from pydantic_core import PydanticCustomError

from deepspeed_gear.schema import DTYPES, OPAQUE, is_legal_name
from deepspeed_gear.timeouts import MOST_TIMEOUT_S


class Words:
    """Description of the values that a type admits: alternatives after "must be"."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts


class GearModel(BaseModel):
    """A frozen part of the section, with the settings of a DeepSpeedConfigModel.

    It does not derive from that class, whose constructor drops every option with the value "auto"
    and takes a key `strict` for itself, and whose import takes as long as DeepSpeed's.

    A validator is built at the first use of a model and has those of the parts inside; built with
    each class they take twice as long, in every process. The texts below the options are left in
    the sources, which docs/hooks/config_reference.py reads.
    """

    model_config = ConfigDict(
        frozen=True,
        defer_build=True,
        extra="forbid",
        use_enum_values=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )


def defaults_of(model: type[GearModel]) -> dict[str, Any]:
    """Return a model's defaults by the names of its options in JSON, as JSON values."""
    known = {
        f.alias or name: f.default for name, f in model.model_fields.items() if not f.is_required()
    }
    return {
        name: v.model_dump(mode="json") if isinstance(v, BaseModel) else v
        for name, v in known.items()
    }


def dotted(*parts: object) -> str:
    """Join the parts of an option's name; a key that is no identifier stands in brackets."""
    # ("gear", "tables", "a.b", 0) is gear.tables['a.b'][0].
    name = ""
    for part in parts:
        word = isinstance(part, str) and part.replace("-", "_").isidentifier()
        name += (f".{part}" if name else str(part)) if word else f"[{part!r}]"
    return name


def refuse(rule: str, remedy: str = "") -> PydanticCustomError:
    """Return the error of a value check; `config_error` adds the option and the value.

    Args:
        remedy: "" is to correct the value, or to use the default.
    """
    return PydanticCustomError("gear", "{rule}", {"rule": rule, "remedy": remedy})


def conflict(rule: str, remedy: str, option: str = "", value: Any = None) -> PydanticCustomError:
    """Return the error of a model whose options contradict one another.

    Args:
        rule: The rule; `option_errors.config_error` puts the model's name in place of "{at}".
        option: The option that breaks the rule; "" for the model as a whole.
    """
    context = {"rule": rule, "remedy": remedy, "option": option, "value": value}
    message = f"{option} {rule}".strip().replace("{at}.", "")
    return PydanticCustomError("gear_conflict", "{message}", {**context, "message": message})


def _no_auto(value: Any) -> Any:
    if value == "auto":  # `option_errors.config_error` adds the remedy
        raise refuse("must not be 'auto'")
    return value


def _legal(name: str) -> str:
    if not is_legal_name(name):
        raise refuse(
            "must consist of letters, digits, '_', '-' and '.', and not start with '.'", "rename it"
        )
    return name


def _not_empty(text: str) -> str:
    if not text.strip():
        raise refuse("must not be empty")
    return text


def _short(most: int, name: str) -> str:
    if len(name) > most or "." in name or not name.isascii():
        raise refuse(f"must be {_SHORT.format(most)}", "choose another name")
    return name


_SHORT = "a name of at most {} letters, digits, '_' and '-'"

Int = Annotated[int, Strict()]
Count = Annotated[int, Strict(), Ge(1), Lt(2**62)]
Steps = Annotated[int, Strict(), Ge(1), Lt(2**31)]
Float = Annotated[float, Strict(), AllowInfNan(False)]
Flag = Annotated[bool, Strict()]
Name = Annotated[str, Strict(), BeforeValidator(_no_auto), AfterValidator(_legal), Words("a name")]
Text = Annotated[
    str,
    Strict(),
    BeforeValidator(_no_auto),
    AfterValidator(_not_empty),
    Words("a non-empty string"),
]
Name32 = Annotated[Name, AfterValidator(partial(_short, 32)), Words(_SHORT.format(32))]
Name64 = Annotated[Name, AfterValidator(partial(_short, 64)), Words(_SHORT.format(64))]
Fraction = Annotated[float, Strict(), AllowInfNan(False), Gt(0), Lt(1)]
Gamma = Annotated[float, Strict(), AllowInfNan(False), Ge(0), Le(1)]
Positive = Annotated[float, Strict(), AllowInfNan(False), Gt(0)]
Timeout = Annotated[float, Strict(), AllowInfNan(False), Gt(0), Le(MOST_TIMEOUT_S)]
# A union, so that a large int64 bound or padding value stays an int and is not rounded.
_IntOrFloat = Int | Float
Number = Annotated[_IntOrFloat, Words("a finite number")]
Scalar = Annotated[Flag | _IntOrFloat, Words("a finite number", "true", "false")]
Pad = Annotated[Literal["zero", "edge"] | _IntOrFloat, Words('"zero"', '"edge"', "a finite number")]
Offset = Annotated[int, Strict(), Gt(-(2**31)), Lt(2**31)] | Literal["n_step"]
StoredDtype = Literal[
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"
]
ColumnDtype = StoredDtype | Literal["bytes", "json"]
DtypeName = StoredDtype | Literal["engine"]
assert set(DTYPES) == set(get_args(StoredDtype))
assert OPAQUE == ("bytes", "json")


class RangeConfig(GearModel):
    """A range of values, closed; at least one end is given."""

    min: Number | None = None
    """Smallest admitted value."""
    max: Number | None = None
    """Largest admitted value."""

    @model_validator(mode="after")
    def _admits_some(self) -> Any:
        if not self.model_dump(exclude_none=True):
            names = [info.alias or name for name, info in type(self).model_fields.items()]
            raise conflict(
                f"must have {', '.join(names[:-1])} or {names[-1]}",
                "an empty condition admits everything; drop it",
            )
        if self.min is not None and self.max is not None and self.min > self.max:
            raise conflict(f"must be at most {{at}}.max ({self.max})", "swap them", "min", self.min)
        return self
