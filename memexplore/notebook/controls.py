"""The knobs as ipywidgets: each shows one field of `Knobs` and turns it; none holds a value of its own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

import ipywidgets as widgets

from memexplore import gpu_catalogue, targets
from memexplore.knobs.knobs import (
    Checkpoint,
    CheckpointKind,
    InPlace,
    Knobs,
    MemoryFormat,
    Mode,
    Offload,
    Optimizer,
    Precision,
    Update,
    ZeroGrad,
)
from memexplore.steps.step import Step

_STYLE = {"description_width": "92px"}
_LAYOUT = {"width": "100%", "margin": "1px 0"}
_OPTION = re.compile(r"([^,\[:]+):([^,\[]+|\[[^\]]*\])")


@dataclasses.dataclass(frozen=True, eq=False)
class Control:
    """One widget: `turned` gives the knobs after the widget took a value, `shown` the value for some knobs."""

    field: str
    widget: Any
    turned: Callable[[Knobs, Any], Knobs]
    shown: Callable[[Knobs], Any]
    choices: Callable[[Knobs], list[tuple[str, Any]]] | None = None
    """Labels and values, where they depend on the knobs."""

    def show(self, knobs: Knobs) -> None:
        """Have the widget show what the knobs say; a value that it does not have becomes one of its options."""
        value, widget = self.shown(knobs), self.widget
        if hasattr(widget, "options"):
            options = list(self.choices(knobs) if self.choices else widget.options)
            if value not in [worth for _, worth in options]:
                options = _in_order([*options, (str(value), value)])
            if list(widget.options) != options:
                # Told together, or the slider would jump to its first option and back.
                with widget.hold_sync():
                    widget.options = options
                    widget.value = value
                return
        if widget.value != value:
            widget.value = value

    def neighbours(self, knobs: Knobs) -> list[Knobs]:
        """The knobs with this one turned one notch up, and down."""
        if not hasattr(self.widget, "options"):
            return []
        values = [value for _, value in self.widget.options]
        value = self.shown(knobs)
        here = values.index(value) if value in values else 0
        beside = [values[place] for place in (here + 1, here - 1) if 0 <= place < len(values)]
        return [self.turned(knobs, value) for value in beside]


def _in_order(options: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    options = list(options)
    if all(isinstance(value, int | float) for _, value in options):
        return sorted(options, key=lambda option: option[1])
    return options


def _plain(field: str) -> tuple[Callable[[Knobs, Any], Knobs], Callable[[Knobs], Any]]:
    return lambda knobs, value: knobs.replace(**{field: value}), lambda knobs: getattr(knobs, field)


def _choice(field: str, label: str, words: dict[Any, str]) -> Control:
    options = [(text, value) for value, text in words.items()]
    return Control(
        field, widgets.Dropdown(options=options, description=label, style=_STYLE, layout=_LAYOUT), *_plain(field)
    )


def _switch(field: str, label: str, off: Any, on: Any) -> Control:
    widget = widgets.Checkbox(description=label, indent=False, layout=_LAYOUT)
    return Control(
        field,
        widget,
        lambda knobs, value: knobs.replace(**{field: on if value else off}),
        lambda knobs: getattr(knobs, field) == on,
    )


def _slider(label: str, options: list[tuple[str, Any]], value: Any) -> Any:
    return widgets.SelectionSlider(options=options, value=value, description=label, style=_STYLE, layout=_LAYOUT)


def _numbers(values: Iterable[int]) -> list[tuple[str, int]]:
    return [(str(value), value) for value in sorted(set(values))]


def of_model() -> list[Control]:
    """What is done to the model."""
    precision = {
        Precision.AS_WRITTEN: "as written",
        Precision.OFF: "fp32, no autocast",
        Precision.FP16: "fp16 autocast",
        Precision.BF16: "bf16 autocast",
        Precision.ALL_BF16: "everything in bf16",
    }
    inplace = {InPlace.AS_WRITTEN: "as written", InPlace.OFF: "off", InPlace.ON: "on"}
    return [
        _choice("precision", "Precision", precision),
        _choice("inplace", "In place", inplace),
        _checkpoint(),
        _switch("memory_format", "channels_last", MemoryFormat.AS_WRITTEN, MemoryFormat.CHANNELS_LAST),
        _switch("offload", "saved tensors on the CPU", Offload.AS_WRITTEN, Offload.SAVED_TENSORS),
        _switch("mode", "inference only (eval, no_grad)", Mode.AS_WRITTEN, Mode.INFERENCE),
    ]


def _checkpoint() -> Control:
    texts = {
        "as written": "as written",
        "none": "none",
        "every 1": "every block",
        "every 2": "every 2nd block",
        "every 3": "every 3rd block",
        "every 4": "every 4th block",
        "sqrt": "√N segments",
        "layers": "chosen layers",
        "keep matmuls": "keep matmuls",
        "norms": "norms, activations",
    }

    def turned(knobs: Knobs, text: str) -> Knobs:
        if text == "layers":
            raise ValueError("click a layer in the chart of layers, then its Checkpoint button below")
        return knobs.replace(checkpoint=Checkpoint.parse(text))

    def shown(knobs: Knobs) -> str:
        kind = knobs.checkpoint.kind
        return kind.value if kind is CheckpointKind.LAYERS else str(knobs.checkpoint)

    options = [(text, value) for value, text in texts.items()]
    widget = widgets.Dropdown(options=options, description="Checkpoint", style=_STYLE, layout=_LAYOUT)
    return Control("checkpoint", widget, turned, shown)


def of_batch(step: Step | None) -> list[Control]:
    """How large the input of a step is, and into how many micro-batches it is cut; without a step all are 1."""
    own, size = (1, None) if step is None else (step.batch_size, step.input_size)
    most = max(own * 16, min(own * 64, 1024))
    batches = [2**power for power in range(most.bit_length()) if own / 64 <= 2**power <= most]

    def batch_turned(knobs: Knobs, value: int) -> Knobs:
        count = knobs.accumulation or 1
        # The next smaller number of micro-batches that goes.
        count = next(number for number in range(min(count, value), 0, -1) if value % number == 0)
        return knobs.replace(batch=None if value == own else value, accumulation=None if count == 1 else count)

    def divisors(knobs: Knobs) -> list[tuple[str, int]]:
        batch = knobs.batch or own
        return _numbers(number for number in range(1, batch + 1) if batch % number == 0)

    sizes = {1: 1} if step is None or size is None else _sizes(size, images=step.size_dimensions.start > 1)
    return [
        Control(
            "batch", _slider("Batch", _numbers([own, *batches]), own), batch_turned, lambda knobs: knobs.batch or own
        ),
        Control(
            "accumulation",
            _slider("Micro-batches", divisors(Knobs()), 1),
            lambda knobs, value: knobs.replace(accumulation=None if value == 1 else value),
            lambda knobs: knobs.accumulation or 1,
            divisors,
        ),
        Control(
            "input_size",
            _slider("Input size", _numbers(sizes.values()), size or 1),
            lambda knobs, value: knobs.replace(input_size=None if value == size else value),
            lambda knobs: knobs.input_size or size or 1,
        ),
    ]


def _sizes(size: int, *, images: bool) -> dict[Any, int]:
    """Multiples of a quarter for images, powers of two for sequences: what models take."""
    if images:
        return {part: max(size * part // 4, 1) for part in range(1, 9)}
    powers = [2**power for power in range(20) if size / 16 <= 2**power <= size * 8]
    return dict(enumerate([size, *powers]))


def of_optimizer() -> list[Control]:
    """How the weights are updated."""
    zero = {
        ZeroGrad.AS_WRITTEN: "as written",
        ZeroGrad.TO_NONE: "gradients to None",
        ZeroGrad.TO_ZERO: "gradients to zeros",
    }
    return [
        _choice("optimizer", "Optimizer", {kind: kind.value for kind in Optimizer}),
        _choice("update", "Update", {kind: kind.value for kind in Update}),
        _choice("zero_grad", "zero_grad", zero),
    ]


def layers_text(field: str, label: str) -> Control:
    """A line of layer names, for checkpointing, freezing or LoRA."""
    widget = widgets.Text(description=label, placeholder="none", continuous_update=False, style=_STYLE, layout=_LAYOUT)
    if field != "checkpoint":
        turned, shown = _plain(field)
        return Control(
            field, widget, lambda knobs, text: turned(knobs, tuple(text.split())), lambda knobs: " ".join(shown(knobs))
        )

    def put(knobs: Knobs, text: str) -> Knobs:
        names = tuple(text.split())
        return knobs.replace(checkpoint=Checkpoint(CheckpointKind.LAYERS, layers=names) if names else Checkpoint())

    return Control(field, widget, put, lambda knobs: " ".join(knobs.checkpoint.layers))


def rank() -> Control:
    """The rank of LoRA."""
    return Control("lora_rank", _slider("LoRA rank", _numbers(2**power for power in range(9)), 8), *_plain("lora_rank"))


def of_device(gpu: str) -> list[Control]:
    """The GPU and its allocator's settings; `gpu` is the place as written, the first of the list where it is real."""
    names = [str(key) for key in gpu_catalogue.gpus().index]
    own = gpu if targets.is_real(gpu) else gpu_catalogue.find(gpu).key
    options = [(targets.display_name(own) if targets.is_real(own) else own, own)] if own not in names else []
    options += [(name, name) for name in names]
    widget = widgets.Dropdown(options=options, value=own, description="GPU", style=_STYLE, layout=_LAYOUT)
    mebibytes = [("unlimited", ""), *((f"{size} MiB", str(size)) for size in (20, 32, 64, 128, 256, 512, 1024))]
    divisions = [("off", ""), *((f"{count} steps", str(count)) for count in (2, 4, 8, 16))]
    thresholds = [("off", ""), *((f"{percent} %", f"{percent / 100:g}") for percent in (50, 60, 70, 80, 90))]
    return [
        Control(
            "gpu",
            widget,
            lambda knobs, value: knobs.replace(gpu=None if value == own else value),
            lambda knobs: gpu_catalogue.find(knobs.gpu).key if knobs.gpu else own,
        ),
        _setting_switch("expandable_segments", "expandable segments"),
        _setting("max_split_size_mb", "Max split", mebibytes),
        _setting("roundup_power2_divisions", "Round up 2ⁿ", divisions),
        _setting("garbage_collection_threshold", "GC from", thresholds),
    ]


def setting_of(settings: str | None, name: str) -> str:
    """The text of one option of a ``PYTORCH_CUDA_ALLOC_CONF`` string, empty where it is not given.

    >>> setting_of("max_split_size_mb:64,expandable_segments:True", "max_split_size_mb")
    '64'
    """
    return dict(_OPTION.findall((settings or "").replace(" ", ""))).get(name, "")


def with_setting(settings: str | None, name: str, value: str) -> str | None:
    """A ``PYTORCH_CUDA_ALLOC_CONF`` string with one option changed, or taken away where the value is empty.

    >>> with_setting("expandable_segments:True", "max_split_size_mb", "64")
    'expandable_segments:True,max_split_size_mb:64'
    >>> with_setting("max_split_size_mb:64", "max_split_size_mb", "") is None
    True
    """
    options = dict(_OPTION.findall((settings or "").replace(" ", ""))) | {name: value}
    return ",".join(f"{name}:{value}" for name, value in options.items() if value) or None


def _setting(name: str, label: str, options: list[tuple[str, str]]) -> Control:
    return Control(
        "settings",
        widgets.Dropdown(options=options, description=label, style=_STYLE, layout=_LAYOUT),
        lambda knobs, value: knobs.replace(settings=with_setting(knobs.settings, name, value)),
        lambda knobs: setting_of(knobs.settings, name),
    )


def _setting_switch(name: str, label: str) -> Control:
    return Control(
        "settings",
        widgets.Checkbox(description=label, indent=False, layout=_LAYOUT),
        lambda knobs, value: knobs.replace(settings=with_setting(knobs.settings, name, "True" if value else "")),
        lambda knobs: setting_of(knobs.settings, name).lower() == "true",
    )


def of_variable(name: str, values: list[Any], own: Any) -> Control:
    """A slider over the values of a variable of a cell; `own` is what the cell assigns."""

    def turned(knobs: Knobs, value: Any) -> Knobs:
        others = {variable: worth for variable, worth in knobs.variables if variable != name}
        return knobs.replace(variables=others if value == own else {**others, name: value})

    values = sorted({*values, own}) if isinstance(own, int | float) else values
    options = [(f"{value:g}" if isinstance(value, float) else str(value), value) for value in values]
    widget = _slider(name, options, own if own in values else values[0])
    return Control("variables", widget, turned, lambda knobs: dict(knobs.variables).get(name, own))
