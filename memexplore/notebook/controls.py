"""Controls: ipywidgets that show and change one field of `Knobs` each, without a value of their own."""

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
    """A widget for one field of `Knobs`."""

    field: str
    widget: Any
    updated: Callable[[Knobs, Any], Knobs]
    """Returns the knobs with a value of the widget. Raises ValueError if the value is not a setting."""
    value_of: Callable[[Knobs], Any]
    """Returns the value that the widget shows for some knobs."""
    options_of: Callable[[Knobs], list[tuple[str, Any]]] | None = None
    """Returns labels and values for some knobs; None if they never change."""

    def show(self, knobs: Knobs) -> None:
        """Set the widget to the knobs. A value that is not among its options is added to them."""
        value, widget = self.value_of(knobs), self.widget
        if hasattr(widget, "options"):
            options = list(self.options_of(knobs) if self.options_of else widget.options)
            if value not in [option for _, option in options]:
                options = _sorted([*options, (str(value), value)])
            if list(widget.options) != options:
                # Sent in one message, or the slider would jump to its first option and back.
                with widget.hold_sync():
                    widget.options = options
                    widget.value = value
                return
        if widget.value != value:
            widget.value = value

    def neighbours(self, knobs: Knobs) -> list[Knobs]:
        """Return the knobs with the next option of this control, and with the previous one."""
        if not hasattr(self.widget, "options"):
            return []
        values = [value for _, value in self.widget.options]
        value = self.value_of(knobs)
        index = values.index(value) if value in values else 0
        adjacent = [values[number] for number in (index + 1, index - 1) if 0 <= number < len(values)]
        return [self.updated(knobs, value) for value in adjacent]


def _sorted(options: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    options = list(options)
    if all(isinstance(value, int | float) for _, value in options):
        return sorted(options, key=lambda option: option[1])
    return options


def _field(field: str) -> tuple[Callable[[Knobs, Any], Knobs], Callable[[Knobs], Any]]:
    return lambda knobs, value: knobs.replace(**{field: value}), lambda knobs: getattr(knobs, field)


def _dropdown(field: str, label: str, texts: dict[Any, str]) -> Control:
    options = [(text, value) for value, text in texts.items()]
    return Control(
        field, widgets.Dropdown(options=options, description=label, style=_STYLE, layout=_LAYOUT), *_field(field)
    )


def _checkbox(field: str, label: str, off: Any, on: Any) -> Control:
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


def model_controls() -> list[Control]:
    """Return the controls of the model: precision, in place, checkpoints, memory format, offload and mode."""
    precision = {
        Precision.AS_WRITTEN: "as written",
        Precision.OFF: "fp32, no autocast",
        Precision.FP16: "fp16 autocast",
        Precision.BF16: "bf16 autocast",
        Precision.ALL_BF16: "everything in bf16",
    }
    inplace = {InPlace.AS_WRITTEN: "as written", InPlace.OFF: "off", InPlace.ON: "on"}
    return [
        _dropdown("precision", "Precision", precision),
        _dropdown("inplace", "In place", inplace),
        _checkpoint(),
        _checkbox("memory_format", "channels_last", MemoryFormat.AS_WRITTEN, MemoryFormat.CHANNELS_LAST),
        _checkbox("offload", "saved tensors on the CPU", Offload.AS_WRITTEN, Offload.SAVED_TENSORS),
        _checkbox("mode", "inference only (eval, no_grad)", Mode.AS_WRITTEN, Mode.INFERENCE),
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

    def updated(knobs: Knobs, text: str) -> Knobs:
        if text == "layers":
            raise ValueError("No layer is chosen: click a layer in the Layers tab, then the Checkpoint button")
        return knobs.replace(checkpoint=Checkpoint.parse(text))

    def value_of(knobs: Knobs) -> str:
        kind = knobs.checkpoint.kind
        return kind.value if kind is CheckpointKind.LAYERS else str(knobs.checkpoint)

    options = [(text, value) for value, text in texts.items()]
    widget = widgets.Dropdown(options=options, description="Checkpoint", style=_STYLE, layout=_LAYOUT)
    return Control("checkpoint", widget, updated, value_of)


def batch_controls(step: Step | None) -> list[Control]:
    """Return the controls of batch size, micro-batches and input size; each has the value 1 without a step."""
    batch_size, input_size = (1, None) if step is None else (step.batch_size, step.input_size)
    largest = max(batch_size * 16, min(batch_size * 64, 1024))
    powers = [2**power for power in range(largest.bit_length())]
    batches = [batch_size, *(power for power in powers if batch_size / 64 <= power <= largest)]

    def with_batch(knobs: Knobs, value: int) -> Knobs:
        count = knobs.accumulation or 1
        # The largest number of equal micro-batches up to the present one.
        count = next(number for number in range(min(count, value), 0, -1) if value % number == 0)
        return knobs.replace(batch=None if value == batch_size else value, accumulation=None if count == 1 else count)

    def divisors(knobs: Knobs) -> list[tuple[str, int]]:
        batch = knobs.batch or batch_size
        return _numbers(number for number in range(1, batch + 1) if batch % number == 0)

    sizes = (
        [1]
        if step is None or input_size is None
        else _input_sizes(input_size, are_images=step.size_dimensions.start > 1)
    )
    return [
        Control(
            "batch",
            _slider("Batch", _numbers(batches), batch_size),
            with_batch,
            lambda knobs: knobs.batch or batch_size,
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
            _slider("Input size", _numbers(sizes), input_size or 1),
            lambda knobs, value: knobs.replace(input_size=None if value == input_size else value),
            lambda knobs: knobs.input_size or input_size or 1,
        ),
    ]


def _input_sizes(size: int, *, are_images: bool) -> list[int]:
    """Return sizes that models accept: multiples of a quarter for images, powers of two for sequences."""
    if are_images:
        return [max(size * quarters // 4, 1) for quarters in range(1, 9)]
    return [size, *(2**power for power in range(20) if size / 16 <= 2**power <= size * 8)]


def optimizer_controls() -> list[Control]:
    """Return the controls of the update of the weights."""
    zero = {
        ZeroGrad.AS_WRITTEN: "as written",
        ZeroGrad.TO_NONE: "gradients to None",
        ZeroGrad.TO_ZERO: "gradients to zeros",
    }
    return [
        _dropdown("optimizer", "Optimizer", {kind: kind.value for kind in Optimizer}),
        _dropdown("update", "Update", {kind: kind.value for kind in Update}),
        _dropdown("zero_grad", "zero_grad", zero),
    ]


def layers_control(field: str, label: str) -> Control:
    """Return a text field of layer names, for checkpointing, freezing or LoRA."""
    widget = widgets.Text(description=label, placeholder="none", continuous_update=False, style=_STYLE, layout=_LAYOUT)
    if field != "checkpoint":
        updated, value_of = _field(field)
        return Control(
            field,
            widget,
            lambda knobs, text: updated(knobs, tuple(text.split())),
            lambda knobs: " ".join(value_of(knobs)),
        )

    def with_layers(knobs: Knobs, text: str) -> Knobs:
        names = tuple(text.split())
        return knobs.replace(checkpoint=Checkpoint(CheckpointKind.LAYERS, layers=names) if names else Checkpoint())

    return Control(field, widget, with_layers, lambda knobs: " ".join(knobs.checkpoint.layers))


def rank_control() -> Control:
    """Return the control of the rank of LoRA."""
    return Control("lora_rank", _slider("LoRA rank", _numbers(2**power for power in range(9)), 8), *_field("lora_rank"))


def device_controls(gpu: str) -> list[Control]:
    """Return the controls of the GPU and its allocator settings.

    `gpu` is the initial target; a real one is listed first.
    """
    names = [str(key) for key in gpu_catalogue.gpus().index]
    initial = gpu if targets.is_real(gpu) else gpu_catalogue.find(gpu).key
    options = (
        [(targets.display_name(initial) if targets.is_real(initial) else initial, initial)]
        if initial not in names
        else []
    )
    options += [(name, name) for name in names]
    widget = widgets.Dropdown(options=options, value=initial, description="GPU", style=_STYLE, layout=_LAYOUT)
    mebibytes = [("unlimited", ""), *((f"{size} MiB", str(size)) for size in (20, 32, 64, 128, 256, 512, 1024))]
    divisions = [("off", ""), *((f"{count} steps", str(count)) for count in (2, 4, 8, 16))]
    thresholds = [("off", ""), *((f"{percent} %", f"{percent / 100:g}") for percent in (50, 60, 70, 80, 90))]
    return [
        Control(
            "gpu",
            widget,
            lambda knobs, value: knobs.replace(gpu=None if value == initial else value),
            lambda knobs: gpu_catalogue.find(knobs.gpu).key if knobs.gpu else initial,
        ),
        _setting_checkbox("expandable_segments", "expandable segments"),
        _setting_dropdown("max_split_size_mb", "Max split", mebibytes),
        _setting_dropdown("roundup_power2_divisions", "Round up 2ⁿ", divisions),
        _setting_dropdown("garbage_collection_threshold", "GC from", thresholds),
    ]


def setting_of(settings: str | None, name: str) -> str:
    """Return one option of a ``PYTORCH_CUDA_ALLOC_CONF`` string as text; empty if the string does not set it.

    >>> setting_of("max_split_size_mb:64,expandable_segments:True", "max_split_size_mb")
    '64'
    """
    return dict(_OPTION.findall((settings or "").replace(" ", ""))).get(name, "")


def with_setting(settings: str | None, name: str, value: str) -> str | None:
    """Return a ``PYTORCH_CUDA_ALLOC_CONF`` string with one option changed, or removed if the value is empty.

    >>> with_setting("expandable_segments:True", "max_split_size_mb", "64")
    'expandable_segments:True,max_split_size_mb:64'
    >>> with_setting("max_split_size_mb:64", "max_split_size_mb", "") is None
    True
    """
    options = dict(_OPTION.findall((settings or "").replace(" ", ""))) | {name: value}
    return ",".join(f"{name}:{value}" for name, value in options.items() if value) or None


def _setting_dropdown(name: str, label: str, options: list[tuple[str, str]]) -> Control:
    return Control(
        "settings",
        widgets.Dropdown(options=options, description=label, style=_STYLE, layout=_LAYOUT),
        lambda knobs, value: knobs.replace(settings=with_setting(knobs.settings, name, value)),
        lambda knobs: setting_of(knobs.settings, name),
    )


def _setting_checkbox(name: str, label: str) -> Control:
    return Control(
        "settings",
        widgets.Checkbox(description=label, indent=False, layout=_LAYOUT),
        lambda knobs, value: knobs.replace(settings=with_setting(knobs.settings, name, "True" if value else "")),
        lambda knobs: setting_of(knobs.settings, name).lower() == "true",
    )


def variable_control(name: str, values: list[Any], assigned: Any) -> Control:
    """Return a slider over the values of a variable of a cell; `assigned` is the value that the cell assigns."""

    def updated(knobs: Knobs, value: Any) -> Knobs:
        others = {variable: setting for variable, setting in knobs.variables if variable != name}
        return knobs.replace(variables=others if value == assigned else {**others, name: value})

    values = sorted({*values, assigned}) if isinstance(assigned, int | float) else values
    options = [(f"{value:g}" if isinstance(value, float) else str(value), value) for value in values]
    widget = _slider(name, options, assigned if assigned in values else values[0])
    return Control("variables", widget, updated, lambda knobs: dict(knobs.variables).get(name, assigned))
