"""``python -m memexplore``, the same as the command ``memexplore``."""

import sys

from memexplore.cli import main

sys.exit(main())
