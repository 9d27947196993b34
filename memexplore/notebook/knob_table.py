"""The table of knobs of an explorer. In: a step or a cell, its target, and what it says. Out: a list of `Knob`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from memexplore import gpu_catalogue, targets
from memexplore.knobs.choices import (
    CheckpointKind,
    InPlace,
    MemoryFormat,
    Mode,
    Offload,
    Optimizer,
    Precision,
    Update,
    ZeroGrad,
)
from memexplore.knobs.knobs import Checkpoint, Knobs
from memexplore.notebook import allocator_settings
from memexplore.notebook.knob import Knob, Option, numbers
from memexplore.notebook.several_gpus_knobs import several_gpus_knobs, why_not_several
from memexplore.steps.step import Step
from memexplore.units import size_text

LAYER_FIELDS = {"checkpoint": "Checkpoint", "frozen": "Freeze", "lora": "LoRA"}
"""Fields of `Knobs` that hold layer names, and the labels of their controls."""
AS_WRITTEN = "as written"
CHOSEN_LAYERS = "checkpoint layers"
"""Name of the knob with the layers of the checkpoint knob."""


def _field(field: str) -> tuple[Callable[[Knobs, Any], Knobs], Callable[[Knobs], Any]]:
    return lambda knobs, value: knobs.replace(**{field: value}), lambda knobs: getattr(knobs, field)


def _choice(
    field: str, label: str, group: str, texts: Mapping[Any, str], written: str, *, is_primary: bool = False
) -> Knob:
    """Return a list of choices; the first one is as written."""
    options = [Option(text, value) for value, text in texts.items()]
    options[0] = Option(f"{written} ({AS_WRITTEN})" if written else AS_WRITTEN, options[0].value)
    updated, value_of = _field(field)
    offered = _offered(options, written, value_of)
    return Knob(field, field, label, group, "choice", updated, value_of, offered, is_primary=is_primary)


def _offered(options: list[Option], written: str, value_of: Callable[[Knobs], Any]) -> Callable[[Knobs], list[Option]]:
    """Return the function of the options: one that says what is written is listed only while it is set, as by code."""

    def options_of(knobs: Knobs) -> list[Option]:
        value = value_of(knobs)
        return [option for option in options if option.label != written or option.value == value]

    return options_of


def _switch(field: str, label: str, group: str, off: Any, on: Any) -> Knob:
    options = [Option("off", off), Option("on", on)]
    return Knob(field, field, label, group, "switch", *_field(field), lambda knobs: options)


def knob_table(step: Step | None, target: str, written: Mapping[str, str]) -> list[Knob]:
    """Return the knobs of a step, or of a cell where it is None; `written` are texts by the fields of `Knobs`."""
    batch = batch_knobs(step) if step is not None else []
    by_name = {knob.name: knob for knob in (*batch, *_model_knobs(written), *_optimizer_knobs(written))}
    first = ("batch", "precision", "checkpoint", "accumulation", "optimizer")
    ordered = [by_name.pop(name) for name in first if name in by_name]
    return [*ordered, *by_name.values(), *_layer_knobs(), *_gpu_knobs(target), *several_gpus_knobs()]


def why_not_now(knobs: Knobs) -> dict[str, str]:
    """Return why controls cannot be set in a setting, by name.

    >>> why_not_now(Knobs())["lora_rank"]
    'No layer has LoRA'
    """
    return ({} if knobs.lora else {"lora_rank": "No layer has LoRA"}) | why_not_several(knobs)


def live_knob_table() -> list[Knob]:
    """Return the knobs that can be switched while a training loop runs."""
    by_name = {knob.name: knob for knob in _model_knobs({}) if knob.field != "mode"}
    accumulation = Knob(
        "accumulation",
        "accumulation",
        "Micro-batches",
        "Batch",
        "slider",
        lambda knobs, value: knobs.replace(accumulation=None if value == 1 else value),
        lambda knobs: knobs.accumulation or 1,
        lambda knobs: numbers(2**power for power in range(6)),
        unit="micro-batches",
        unit_of_one="micro-batch",
        is_primary=True,
    )
    layers = [knob for knob in _layer_knobs() if knob.name == CHOSEN_LAYERS]
    return [by_name.pop("precision"), by_name.pop("checkpoint"), accumulation, *by_name.values(), *layers]


# --- the knobs ------------------------------------------------------------------------------------------------------


def _model_knobs(written: Mapping[str, str]) -> list[Knob]:
    precision = {
        Precision.AS_WRITTEN: "",
        Precision.OFF: "fp32, no autocast",
        Precision.FP16: "fp16 autocast",
        Precision.BF16: "bf16 autocast",
        Precision.ALL_BF16: "everything in bf16",
    }
    inplace = {InPlace.AS_WRITTEN: "", InPlace.OFF: "off", InPlace.ON: "on"}
    texts = {field: written.get(field, "") for field in ("precision", "inplace", "checkpoint")}
    return [
        _choice("precision", "Precision", "Model", precision, texts["precision"], is_primary=True),
        _checkpoint_knob(texts["checkpoint"]),
        _choice("inplace", "In place", "Model", inplace, texts["inplace"]),
        _switch("memory_format", "channels_last", "Model", MemoryFormat.AS_WRITTEN, MemoryFormat.CHANNELS_LAST),
        _switch("offload", "Saved tensors on the CPU", "Model", Offload.AS_WRITTEN, Offload.SAVED_TENSORS),
        _switch("mode", "Inference only (eval, no_grad)", "Model", Mode.AS_WRITTEN, Mode.INFERENCE),
    ]


def _checkpoint_knob(written: str) -> Knob:
    texts = {
        "as written": f"{written} ({AS_WRITTEN})" if written else AS_WRITTEN,
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
    options = [Option(text, value) for value, text in texts.items()]

    def updated(knobs: Knobs, text: str) -> Knobs:
        if text == "layers" and knobs.checkpoint.kind is not CheckpointKind.LAYERS:
            raise ValueError("No layer is chosen: select a layer, then its Checkpoint button")
        return knobs if text == "layers" else knobs.replace(checkpoint=Checkpoint.parse(text))

    def value_of(knobs: Knobs) -> str:
        kind = knobs.checkpoint.kind
        return kind.value if kind is CheckpointKind.LAYERS else str(knobs.checkpoint)

    return Knob(
        "checkpoint",
        "checkpoint",
        "Checkpoint",
        "Model",
        "choice",
        updated,
        value_of,
        _offered(options, written, value_of),
        is_primary=True,
    )


def batch_knobs(step: Step) -> list[Knob]:
    """Return the knobs of batch size, micro-batches and input size."""
    own, input_size = step.batch_size, step.input_size
    largest = max(own * 16, min(own * 64, 1024))
    powers = [2**power for power in range(largest.bit_length())]
    batches = numbers([own, *(power for power in powers if own / 64 <= power <= largest)])

    def with_batch(knobs: Knobs, value: int) -> Knobs:
        count = knobs.accumulation or 1
        # The largest number of equal micro-batches up to the present one.
        count = next(number for number in range(min(count, value), 0, -1) if value % number == 0)
        return knobs.replace(batch=None if value == own else value, accumulation=None if count == 1 else count)

    def divisors(knobs: Knobs) -> list[Option]:
        batch = knobs.batch or own
        return numbers(number for number in range(1, batch + 1) if batch % number == 0)

    knobs = [
        Knob(
            "batch",
            "batch",
            "Batch",
            "Batch",
            "slider",
            with_batch,
            lambda knobs: knobs.batch or own,
            lambda knobs: batches,
            unit="samples",
            unit_of_one="sample",
            is_primary=True,
        ),
        Knob(
            "accumulation",
            "accumulation",
            "Micro-batches",
            "Batch",
            "slider",
            lambda knobs, value: knobs.replace(accumulation=None if value == 1 else value),
            lambda knobs: knobs.accumulation or 1,
            divisors,
            unit="micro-batches",
            unit_of_one="micro-batch",
            is_primary=True,
        ),
    ]
    if input_size is None:
        return knobs
    are_images = step.size_dimensions.start > 1
    sizes = numbers(_image_sizes(input_size) if are_images else _sequence_lengths(input_size))
    size = Knob(
        "input_size",
        "input_size",
        "Input size",
        "Batch",
        "slider",
        lambda knobs, value: knobs.replace(input_size=None if value == input_size else value),
        lambda knobs: knobs.input_size or input_size,
        lambda knobs: sizes,
        unit="pixels" if are_images else "tokens",
    )
    return [*knobs, size]


def _image_sizes(size: int) -> list[int]:
    """Return multiples of a quarter of a size."""
    return [max(size * quarters // 4, 1) for quarters in range(1, 9)]


def _sequence_lengths(size: int) -> list[int]:
    """Return a length and powers of two around it."""
    return [size, *(2**power for power in range(20) if size / 16 <= 2**power <= size * 8)]


def _optimizer_knobs(written: Mapping[str, str]) -> list[Knob]:
    zero = {ZeroGrad.AS_WRITTEN: "", ZeroGrad.TO_NONE: "to None", ZeroGrad.TO_ZERO: "to zeros"}
    own = written.get("optimizer", "")
    # The written optimizer can have other arguments than the one of the knob.
    optimizers = {kind: f"{kind.value}, default arguments" if kind.value == own else kind.value for kind in Optimizer}
    updates = {kind: kind.value for kind in Update}
    return [
        _choice("optimizer", "Optimizer", "Optimizer", optimizers, own, is_primary=True),
        _choice("update", "Update", "Optimizer", updates, written.get("update", "")),
        _choice("zero_grad", "zero_grad", "Optimizer", zero, written.get("zero_grad", "")),
    ]


def _layer_knobs() -> list[Knob]:
    ranks = numbers(2**power for power in range(9))

    def with_layers(knobs: Knobs, text: str) -> Knobs:
        names = tuple(text.split())
        return knobs.replace(checkpoint=Checkpoint(CheckpointKind.LAYERS, layers=names) if names else Checkpoint())

    lines = [
        Knob(
            CHOSEN_LAYERS,
            "checkpoint",
            "Checkpoint layers",
            "Layers",
            "text",
            with_layers,
            lambda knobs: " ".join(knobs.checkpoint.layers),
        )
    ]
    for field in ("frozen", "lora"):
        updated, value_of = _field(field)
        lines.append(
            Knob(
                field,
                field,
                LAYER_FIELDS[field],
                "Layers",
                "text",
                lambda knobs, text, updated=updated: updated(knobs, tuple(text.split())),  # type: ignore[misc]
                lambda knobs, value_of=value_of: " ".join(value_of(knobs)),  # type: ignore[misc]
            )
        )
    rank = Knob("lora_rank", "lora_rank", "LoRA rank", "Layers", "slider", *_field("lora_rank"), lambda knobs: ranks)
    return [*lines, rank]


_MEMORY_GROUPS = ((0, "up to 12 GB"), (14, "16 GB"), (21, "24 GB"), (28, "32 to 48 GB"), (50, "64 to 96 GB"))
_LARGEST_GROUP = (105, "more than 96 GB")


def _gpu_knobs(gpu: str) -> list[Knob]:
    """Return the knobs of the GPU and its allocator; `gpu` is the initial target, a real one is listed first."""
    table = gpu_catalogue.gpus()
    rows = [(str(key), int(capacity)) for key, capacity in table["capacity"].items()]
    initial = gpu if targets.is_real(gpu) else gpu_catalogue.find(gpu).key
    options = [Option(f"{key} · {size_text(capacity)}", key) for key, capacity in rows]
    groups: list[tuple[int, str]] = []
    for least, title in (*_MEMORY_GROUPS, _LARGEST_GROUP):
        first = next((number for number, (_, size) in enumerate(rows) if size >= least * 1024**3), None)
        if first is not None:
            groups.append((first, title))
    if initial not in dict(rows):
        label = targets.display_name(initial) if targets.is_real(initial) else initial
        options.insert(0, Option(label, initial))
        groups = [(0, "as written"), *((first + 1, title) for first, title in groups)]
    knob = Knob(
        "gpu",
        "gpu",
        "GPU",
        "GPU and allocator",
        "choice",
        lambda knobs, value: knobs.replace(gpu=None if value == initial else value),
        lambda knobs: gpu_catalogue.find(knobs.gpu).key if knobs.gpu else initial,
        lambda knobs: list(options),
        is_primary=True,
        groups=tuple(groups),
    )
    mebibytes = [Option("unlimited", ""), *(Option(f"{size} MiB", str(size)) for size in (20, 32, 64, 128, 256, 512))]
    mebibytes.append(Option("1024 MiB", "1024"))
    divisions = [Option("off", ""), *(Option(f"{count} steps", str(count)) for count in (2, 4, 8, 16))]
    thresholds = [Option("off", ""), *(Option(f"{percent} %", f"{percent / 100:g}") for percent in range(50, 100, 10))]
    return [
        knob,
        _setting("expandable_segments", "Expandable segments", [Option("off", ""), Option("on", "True")], "switch"),
        _setting("max_split_size_mb", "Split blocks up to", mebibytes),
        _setting("roundup_power2_divisions", "Round sizes up, per 2ⁿ", divisions),
        _setting("garbage_collection_threshold", "Collect garbage from", thresholds),
    ]


def _setting(name: str, label: str, options: list[Option], kind: str = "choice") -> Knob:
    def value_of(knobs: Knobs) -> str:
        value = allocator_settings.setting_of(knobs.settings, name)
        if kind == "switch":
            return "True" if value.lower() == "true" else ""
        return value

    return Knob(
        f"settings {name}",
        "settings",
        label,
        "GPU and allocator",
        kind,
        lambda knobs, value: knobs.replace(settings=allocator_settings.with_setting(knobs.settings, name, value)),
        value_of,
        lambda knobs: options,
    )


def variable_knob(name: str, values: list[Any], assigned: Any) -> Knob:
    """Return a slider over the values of a variable of a cell.

    `assigned` is the value that the cell assigns, None if it is not a literal: the slider then has a position for it.
    """
    written = AS_WRITTEN if assigned is None else assigned

    def updated(knobs: Knobs, value: Any) -> Knobs:
        others = {variable: setting for variable, setting in knobs.variables if variable != name}
        return knobs.replace(variables=others if value == written else {**others, name: value})

    every = [written, *(value for value in values if value != written)]
    if isinstance(assigned, int | float):
        every.sort()
    options = [Option(f"{value:g}" if isinstance(value, float) else str(value), value) for value in every]
    return Knob(
        f"variables {name}",
        "variables",
        name,
        "Variables",
        "slider",
        updated,
        lambda knobs: dict(knobs.variables).get(name, written),
        lambda knobs: list(options),
        is_primary=True,
    )
