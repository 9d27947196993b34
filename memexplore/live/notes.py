"""Sentences about what a watched run does not measure."""

COMPILED = (
    "The model is compiled: its steps are watched, but none is recorded completely, because recording would make the "
    "compiler compile it again."
)
