"""`Knobs`: one frozen value with the changes to a training step; by default every field is as written in the code.

A choice can be given as a member of its enum or as its text. The `Literal` types list the texts for type checkers; a
test compares them with the enums.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from memexplore import gpu_catalogue
from memexplore.allocator import Settings
from memexplore.knobs.choices import (
    CheckpointKind,
    FsdpOffload,
    FsdpOffloadText,
    FsdpPrecision,
    FsdpPrecisionText,
    InPlace,
    InPlaceText,
    MemoryFormat,
    MemoryFormatText,
    Mode,
    ModeText,
    Offload,
    OffloadText,
    Optimizer,
    OptimizerText,
    Precision,
    PrecisionText,
    Strategy,
    StrategyText,
    Update,
    UpdateText,
    ZeroGrad,
    ZeroGradText,
)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An activation-checkpointing setting.

    As text: `as written`, `none`, `every 2`, `sqrt`, `layers encoder.0 encoder.1`, `keep matmuls` or `norms`.

    `every k` recomputes every k-th repeated block, `sqrt` splits the N blocks into √N segments, `layers` recomputes the
    named layers, `keep matmuls` recomputes all blocks except their matrix products and convolutions, `norms` recomputes
    only normalisations and activation functions.

    >>> Checkpoint.parse("every 2")
    Checkpoint(kind=<CheckpointKind.EVERY: 'every'>, every=2, layers=())
    >>> str(Checkpoint.parse("layers b a"))
    'layers b a'
    """

    kind: CheckpointKind = CheckpointKind.AS_WRITTEN
    every: int = 1
    layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise ValueError(f"every={self.every!r} is not a positive integer; write 1 or more")
        if (self.kind is CheckpointKind.LAYERS) != bool(self.layers):
            raise ValueError("layers= and kind LAYERS go together; name at least one layer, or choose another kind")

    @classmethod
    def parse(cls, text: str) -> Checkpoint:
        """Return the setting of a text. Raises ValueError, with the possible texts, for any other text."""
        first, *rest = text.split() or [""]
        if first == "every" and len(rest) == 1 and rest[0].isdecimal() and int(rest[0]) > 0:
            return cls(CheckpointKind.EVERY, int(rest[0]))
        if first == "layers" and rest:
            return cls(CheckpointKind.LAYERS, layers=tuple(rest))
        plain = {
            kind.value: kind for kind in CheckpointKind if kind not in (CheckpointKind.EVERY, CheckpointKind.LAYERS)
        }
        if text not in plain:
            raise ValueError(
                f"checkpoint={text!r} is not a setting; write one of {', '.join(plain)}, 'every 2', 'layers NAME NAME'"
            )
        return cls(plain[text])

    def __str__(self) -> str:
        if self.kind is CheckpointKind.EVERY:
            return f"every {self.every}"
        return " ".join([self.kind.value, *self.layers])


@dataclasses.dataclass(frozen=True, repr=False)
class Knobs:
    """Changes to a training step; a field that is "as written", None or empty changes nothing.

    Choices can be given as text: ``Knobs(precision="bf16", checkpoint="every 2", batch=16)``. `batch` is the effective
    batch, in samples; `accumulation` the number of its micro-batches. `input_size` is the height and width of images,
    or the length of sequences. `frozen` and `lora` name layers whose weights are frozen or get low-rank adapters of
    rank `lora_rank`; the empty name is the whole model. `settings` is a ``PYTORCH_CUDA_ALLOC_CONF`` string, `gpu` a
    name of the catalogue or a size. `variables` are values of variables of a notebook cell.

    `gpus` is the number of GPUs, with a process for each as `torchrun` starts them, and `batch` then the batch of one
    of them. `strategy` says what they share (DDP by default), `tensor_parallel` how many GPUs share each layer.
    `fsdp_precision` and `fsdp_offload` are policies of FSDP2.

    >>> Knobs(precision="bf16").precision
    <Precision.BF16: 'bf16'>
    >>> print(Knobs(checkpoint="every 2", batch=16))
    checkpoint every 2, batch 16
    >>> print(Knobs())
    as written
    >>> Knobs(checkpoint="every 2", batch=16)
    Knobs(checkpoint='every 2', batch=16)

    Raises ValueError for a value that is not a setting.
    """

    inplace: InPlace = InPlace.AS_WRITTEN
    checkpoint: Checkpoint = Checkpoint()
    precision: Precision = Precision.AS_WRITTEN
    batch: int | None = None
    accumulation: int | None = None
    optimizer: Optimizer = Optimizer.AS_WRITTEN
    update: Update = Update.AS_WRITTEN
    zero_grad: ZeroGrad = ZeroGrad.AS_WRITTEN
    input_size: int | None = None
    memory_format: MemoryFormat = MemoryFormat.AS_WRITTEN
    offload: Offload = Offload.AS_WRITTEN
    mode: Mode = Mode.AS_WRITTEN
    frozen: tuple[str, ...] = ()
    lora: tuple[str, ...] = ()
    lora_rank: int = 8
    settings: str | None = None
    gpu: str | None = None
    gpus: int | None = None
    strategy: Strategy = Strategy.AS_WRITTEN
    tensor_parallel: int | None = None
    fsdp_precision: FsdpPrecision = FsdpPrecision.AS_WRITTEN
    fsdp_offload: FsdpOffload = FsdpOffload.AS_WRITTEN
    variables: tuple[tuple[str, Any], ...] = ()

    CHOICES: ClassVar[dict[str, type[enum.Enum]]]
    """The fields whose values are members of an enum, with the enum."""

    if TYPE_CHECKING:
        # The fields accept more types than they have when read.
        def __init__(
            self,
            inplace: InPlace | InPlaceText = ...,
            checkpoint: Checkpoint | str = ...,
            precision: Precision | PrecisionText = ...,
            batch: int | None = ...,
            accumulation: int | None = ...,
            optimizer: Optimizer | OptimizerText = ...,
            update: Update | UpdateText = ...,
            zero_grad: ZeroGrad | ZeroGradText = ...,
            input_size: int | None = ...,
            memory_format: MemoryFormat | MemoryFormatText = ...,
            offload: Offload | OffloadText = ...,
            mode: Mode | ModeText = ...,
            frozen: str | Iterable[str] = ...,
            lora: str | Iterable[str] = ...,
            lora_rank: int = ...,
            settings: str | None = ...,
            gpu: str | None = ...,
            gpus: int | None = ...,
            strategy: Strategy | StrategyText = ...,
            tensor_parallel: int | None = ...,
            fsdp_precision: FsdpPrecision | FsdpPrecisionText = ...,
            fsdp_offload: FsdpOffload | FsdpOffloadText = ...,
            variables: Mapping[str, Any] | Iterable[tuple[str, Any]] = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name, choices in self.CHOICES.items():
            self._put(name, _choice(name, choices, getattr(self, name)))
        if isinstance(self.checkpoint, str):
            self._put("checkpoint", Checkpoint.parse(self.checkpoint))
        if not isinstance(self.checkpoint, Checkpoint):
            raise ValueError(f"checkpoint={self.checkpoint!r} is not a setting; write one such as 'every 2' or 'sqrt'")
        for name in ("batch", "accumulation", "input_size", "lora_rank", "gpus", "tensor_parallel"):
            self._put(name, _positive(name, getattr(self, name)))
        for name in ("frozen", "lora"):
            self._put(name, _layers(name, getattr(self, name)))
        self._put("variables", _variables(self.variables))
        for name, example in (("settings", "max_split_size_mb:128"), ("gpu", "T4")):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name}={value!r} is not a text; write one such as {name}={example!r}")
        if self.settings is not None:
            Settings.parse(self.settings)
        if self.gpu is not None:
            gpu_catalogue.find(self.gpu)

    def _put(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def changed(self) -> dict[str, Any]:
        """Return the fields that change something, by name.

        >>> Knobs(batch=4).changed()
        {'batch': 4}
        """
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default and (field.name != "lora_rank" or self.lora)
        }

    def replace(self, **changes: Any) -> Knobs:
        """Return the same knobs with some fields changed."""
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        return ", ".join(_text(name, value) for name, value in self.changed().items()) or "as written"

    def __repr__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        texts = [f"{name}={_code(value)}" for name, value in given.items() if value != getattr(type(self), name)]
        return f"Knobs({', '.join(texts)})"

    def _repr_html_(self) -> str:
        from memexplore.figures.values import changes_html

        changed = self.changed()
        written = {field.name: _value_text(field.name, field.default) for field in dataclasses.fields(self)}
        rows = [(name, _value_text(name, value), written[name]) for name, value in changed.items()]
        return changes_html(repr(self), rows, [name for name in written if name not in changed])


Knobs.CHOICES = {
    field.name: type(field.default) for field in dataclasses.fields(Knobs) if isinstance(field.default, enum.Enum)
}


_Choice = TypeVar("_Choice", bound=enum.Enum)


def _choice(name: str, choices: type[_Choice], value: Any) -> _Choice:
    try:
        return choices(value)
    except ValueError:
        texts = ", ".join(choice.value for choice in choices)
        raise ValueError(f"{name}={value!r} is not a setting; write one of {texts}") from None


def _positive(name: str, value: Any) -> int | None:
    """Return a positive integer, also one of numpy, as an int; None, except for the rank of adapters."""
    if value is None and name != "lora_rank":
        return None
    number = value.__index__() if hasattr(value, "__index__") and not isinstance(value, bool) else 0
    if number < 1:
        raise ValueError(f"{name}={value!r} is not a positive integer; write 1 or more")
    return int(number)


def _layers(name: str, value: Any) -> tuple[str, ...]:
    """Return names of layers as a tuple."""
    if isinstance(value, str):
        return (value,)
    names = tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(one, str) for one in names):
        hint = "; the rank is lora_rank=" if name == "lora" else ""
        raise ValueError(f"{name}={value!r} is not names of layers; write {name}='encoder.0' or a list of names{hint}")
    return names


def _variables(value: Any) -> tuple[tuple[str, Any], ...]:
    """Return variables and their values as pairs, those of a dict in alphabetical order."""
    pairs = (
        list(value.items()) if isinstance(value, Mapping) else list(value) if isinstance(value, Iterable) else [value]
    )
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError(f"variables={value!r} is not variables with values; write variables={{'name': value}}")
        if not isinstance(pair[1], Hashable):
            raise ValueError(f"variables: {pair[0]} = {pair[1]!r} is not hashable; give a number, a text or a tuple")
    found = tuple((name, one) for name, one in pairs)
    return tuple(sorted(found, key=lambda pair: pair[0])) if isinstance(value, Mapping) else found


def _code(value: Any) -> str:
    """Return the value of a field as a user writes it: a choice as its text."""
    if isinstance(value, enum.Enum):
        return repr(value.value)
    if isinstance(value, Checkpoint):
        # Only names of layers without spaces can be written as one text.
        if " ".join(value.layers).split() == list(value.layers):
            return repr(str(value))
        return f"Checkpoint(CheckpointKind.LAYERS, layers={value.layers!r})"
    return repr(value)


def _value_text(name: str, value: Any) -> str:
    """Return the value of a field as text without its name; a field that changes nothing is as written."""
    text = "" if value is None or value == () else _text(name, value)
    return text.removeprefix(f"{name.replace('_', ' ')} ") or "as written"


def _text(name: str, value: Any) -> str:
    noun = name.replace("_", " ")
    if name == "variables":
        return ", ".join(f"{variable} = {assigned!r}" for variable, assigned in value)
    if isinstance(value, tuple):
        return f"{noun} {' '.join(value)}"
    if name == "gpus":
        return f"{value} GPU{'' if value == 1 else 's'}"
    return f"{noun} {value.value if isinstance(value, enum.Enum) else value}"
