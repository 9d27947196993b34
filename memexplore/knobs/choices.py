"""The choices of knobs: enums whose first member changes nothing, and their texts for type checkers."""

from __future__ import annotations

import enum
from typing import Literal


class InPlace(enum.Enum):
    """Whether activation functions overwrite their input."""

    AS_WRITTEN = "as written"
    OFF = "off"
    ON = "on"


class Precision(enum.Enum):
    """Precision of the step; `FP16` has a `GradScaler`, `ALL_BF16` has no fp32 weights."""

    AS_WRITTEN = "as written"
    OFF = "off"
    FP16 = "fp16"
    BF16 = "bf16"
    ALL_BF16 = "all bf16"


class Optimizer(enum.Enum):
    """Optimizer that updates the weights."""

    AS_WRITTEN = "as written"
    SGD = "SGD"
    MOMENTUM = "SGD with momentum"
    ADAM = "Adam"
    ADAMW = "AdamW"
    ADAFACTOR = "Adafactor"


class Update(enum.Enum):
    """Iteration of the optimizer over the parameters."""

    AS_WRITTEN = "as written"
    FOREACH = "foreach"
    FUSED = "fused"
    PER_TENSOR = "per tensor"
    IN_BACKWARD = "in backward"


class ZeroGrad(enum.Enum):
    """Value of the gradients after `zero_grad`: None or zeros."""

    AS_WRITTEN = "as written"
    TO_NONE = "set to none"
    TO_ZERO = "set to zero"


class MemoryFormat(enum.Enum):
    """Memory format of images."""

    AS_WRITTEN = "as written"
    CHANNELS_LAST = "channels last"


class Offload(enum.Enum):
    """Location of tensors saved for backward."""

    AS_WRITTEN = "as written"
    SAVED_TENSORS = "saved tensors on the CPU"


class Mode(enum.Enum):
    """Whether the step trains, or only runs forward with `eval()` and `no_grad()`."""

    AS_WRITTEN = "as written"
    INFERENCE = "inference"


class CheckpointKind(enum.Enum):
    """Which activations are freed after forward and recomputed in backward."""

    AS_WRITTEN = "as written"
    NONE = "none"
    EVERY = "every"
    SQRT = "sqrt"
    LAYERS = "layers"
    KEEP_MATMULS = "keep matmuls"
    NORMS = "norms"


class Strategy(enum.Enum):
    """Division of the training between several GPUs; each wraps every repeated block and then the model.

    `FSDP2_NO_RESHARD` keeps the gathered parameters from forward to backward, `HSDP` shards inside a node of eight GPUs
    and keeps a copy on each node, `ZERO_1` is DDP with a `ZeroRedundancyOptimizer`.
    """

    AS_WRITTEN = "as written"
    DDP = "ddp"
    FSDP2 = "fsdp2"
    FSDP2_NO_RESHARD = "fsdp2 no reshard"
    HSDP = "hsdp"
    ZERO_1 = "zero 1"


class FsdpPrecision(enum.Enum):
    """`MixedPrecisionPolicy` of FSDP2: dtype of the gathered parameters and of the reduced gradients."""

    AS_WRITTEN = "as written"
    REDUCED_IN_FP32 = "bf16, reduced in fp32"
    BF16 = "bf16"


class FsdpOffload(enum.Enum):
    """`CPUOffloadPolicy` of FSDP2: where the shards of parameters, gradients and optimizer state are."""

    AS_WRITTEN = "as written"
    SHARDS = "shards on the CPU"


InPlaceText = Literal["as written", "off", "on"]
PrecisionText = Literal["as written", "off", "fp16", "bf16", "all bf16"]
OptimizerText = Literal["as written", "SGD", "SGD with momentum", "Adam", "AdamW", "Adafactor"]
UpdateText = Literal["as written", "foreach", "fused", "per tensor", "in backward"]
ZeroGradText = Literal["as written", "set to none", "set to zero"]
MemoryFormatText = Literal["as written", "channels last"]
OffloadText = Literal["as written", "saved tensors on the CPU"]
ModeText = Literal["as written", "inference"]
StrategyText = Literal["as written", "ddp", "fsdp2", "fsdp2 no reshard", "hsdp", "zero 1"]
FsdpPrecisionText = Literal["as written", "bf16, reduced in fp32", "bf16"]
FsdpOffloadText = Literal["as written", "shards on the CPU"]
