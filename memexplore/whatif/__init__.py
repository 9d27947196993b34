"""What if a knob were turned: the same step run again with other settings, on the virtual GPU or for real."""

from memexplore.whatif.apply import Applied, LeftOut, apply
from memexplore.whatif.knobs import Checkpoint, Knobs
from memexplore.whatif.step import Step
from memexplore.whatif.trial import Trial, run

__all__ = ["Applied", "Checkpoint", "Knobs", "LeftOut", "Step", "Trial", "apply", "run"]
